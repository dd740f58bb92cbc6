"""Models as pure functions; the only package that imports flax."""
