"""Names of the KV-cache formats and the sizes that configurations are checked against; without JAX, so that a command line
can print and check them before it starts.

What each format is: `pallas_kernels.kv_codecs` and docs/kv_formats.md.
"""

FORMATS = ("f32", "bf16", "int8", "rk8v4", "rk4v4", "rk4v4-e8")
ROTATION_GROUP = 64  # dims turned by one Hadamard matrix, and dims under one int8 scale
PAGE = 64  # tokens of a page


def check_format(format: str, head_dim: int | None = None) -> str:
    """Returns `format`; ValueError if it is unknown or cannot hold vectors of `head_dim` numbers."""
    if format not in FORMATS:
        raise ValueError(f"kv format {format!r} is unknown; known formats: {', '.join(FORMATS)}")
    if head_dim is not None and (head_dim <= 0 or head_dim % ROTATION_GROUP):
        raise ValueError(
            f"head_dim {head_dim} does not fit kv format {format!r}: it must be a positive multiple of {ROTATION_GROUP}"
        )
    return format
