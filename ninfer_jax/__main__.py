"""`python -m ninfer_jax`: the same as `ninfer-jax`."""

from ninfer_jax.cli.entry import main

if __name__ == "__main__":
    main()
