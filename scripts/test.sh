#!/usr/bin/env bash
# Sets up and passes the checks: lint, format, types, tests. Usage: bash scripts/test.sh [PYTEST ARGUMENT ...]
#
# With arguments only pytest runs, with those: bash scripts/test.sh tests/test_step.py -k accumulate
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" JAX_PLATFORMS=cpu

if [ $# -gt 0 ]; then
    exec pytest "$@"
fi
ruff check .
ruff format --check .
pyright
# Three workers for two cores: many tests wait for processes that wait for each other. loadscope
# keeps a module's fixtures together, and their order starts with the folders of long tests, so that
# none of them is left to run alone at the end.
exec pytest -q -n 3 --dist loadscope --no-loadscope-reorder -m "not long" --durations=15
