"""`python -m ninfer_jax`: the same as `ninfer-jax`."""

from ninfer_jax.cli.main import app

if __name__ == "__main__":
    app(prog_name="ninfer-jax")
