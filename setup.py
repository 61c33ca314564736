"""Where the bundled model comes from: `weights/tiny` in the tree, `ninfer_jax/tiny` in a wheel. All else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["ninfer_jax", "ninfer_jax.*", "pallas_kernels", "pallas_kernels.*"]), "ninfer_jax.tiny"],
    package_dir={"ninfer_jax.tiny": "weights/tiny"},
)
