"""jaxtrain."""
