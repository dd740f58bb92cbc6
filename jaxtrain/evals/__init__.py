"""Tasks of lm-eval for our models: what is asked as tokens, the answers on a mesh, the results."""
