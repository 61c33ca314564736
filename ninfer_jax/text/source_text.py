"""The tokenizer of a source of weights, whose files may be inside a GGUF file."""

from __future__ import annotations

from ninfer_jax.checkpoints.sources import Source
from ninfer_jax.files import parse_json
from ninfer_jax.text.tokenizer import Tokenizer


def tokenizer_in(source: Source) -> Tokenizer:
    """The tokenizer among what a source brings beside its tensors. ValueError where there is none, and for a damaged one."""
    if "tokenizer.json" not in source.companions:
        raise ValueError(
            f"{source.path}: no tokenizer.json beside the weights; a checkpoint needs this file, but for token ids alone "
            "(tokenizer=None, --no-tokenizer)"
        )
    folder = source.path if source.path.is_dir() else source.path.parent
    names = [name for name in ("tokenizer.json", "tokenizer_config.json") if name in source.companions]
    files = [parse_json(source.companions[name], str(folder / name)) for name in names]
    if not all(isinstance(content, dict) for content in files):
        raise ValueError(f"{folder}: {' and '.join(names)} must be JSON objects")
    return Tokenizer(files[0], str(folder / "tokenizer.json"), *files[1:], model_type=source.config.get("model_type"))
