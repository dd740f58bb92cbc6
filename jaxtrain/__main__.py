"""`python -m jaxtrain COMMAND`."""

from jaxtrain.cli import main

if __name__ == "__main__":
    main()
