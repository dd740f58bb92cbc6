"""Models in the format of Hugging Face: import, export, and proof that both are right."""
