"""`ninfer-jax bench`: speed, drafts and memory over a matrix of request shapes and engine shapes."""
