"""From a model's geometry and a machine's free memory to a configuration that fits, and to where each byte of it goes.

Nothing in this room starts JAX: a plan is there before a framework would have been imported.
"""
