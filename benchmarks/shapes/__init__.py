"""The steps of `check_shapes.py`, each a process of its own: two of them together would not fit into memory."""
