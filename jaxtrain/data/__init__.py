"""Data: sources with random access, the order of the samples, and loading onto the mesh."""
