"""A random artifact with the 27B's widths and vocabulary and as many layers as asked for, written group by group.

    python -m benchmarks.shapes.artifact DIR [--layers 64] [--recipe q4] [--miniature]

Codes are uniform, scales go around a middle, and units are such that a projection's outputs have the size of its inputs, or half
of it where they are added to the residual stream: everything stays finite, however many layers there are. No checkpoint is
behind it, so that 27 billion weights are 15 GB to write and nothing to quantise; at most one group (the head, 1.3 GB) and what
Orbax copies of it are in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.shapes import checkpoint
from ninfer_jax.checkpoints import Artifact, ParameterSpec
from ninfer_jax.checkpoints.artifact import FORMAT, MANIFEST, PARAMETERS, VERSION, checkpointer, digest, write_json
from ninfer_jax.checkpoints.convert import described, entry, group_of, parameter_key
from ninfer_jax.config import ModelConfig, recipe
from ninfer_jax.files import read_object
from ninfer_jax.model import TextModel, parameters_of

_SPREAD = {4: 4.6, 8: 73.0}  # standard deviation of uniform codes of so many bits
_MIDDLE, _REACH = 85, 42  # of groups' scales, in units of the column
_ADDED = ("o_proj", "out_proj", "down_proj")


def write(path: Path, config: dict[str, Any], name: str, seed: int) -> Artifact:
    """The artifact directory `path` (new or empty) in the formats of recipe `name`; config: `checkpoint.text_config`."""
    path.mkdir(parents=True, exist_ok=True)
    checkpoint.write_small_files(path, config)
    small = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}
    specs = parameters_of(TextModel(ModelConfig.from_hf(path), jnp.bfloat16, mtp=True, recipe=recipe(name)))
    groups: dict[str, list[ParameterSpec]] = {}
    for spec in specs:
        groups.setdefault(group_of(spec), []).append(spec)
    (path / PARAMETERS).mkdir()
    entries = {}
    for group, own in groups.items():
        arrays = {}
        for spec in own:
            drawn = draw(spec, seed)
            arrays |= {a.name: drawn[field] for field, a in zip(spec.arrays, described(spec, {}), strict=True)}
        checkpointer().save(path / PARAMETERS / group, args=ocp.args.PyTreeSave(arrays))
        digests = {name: digest(array) for name, array in arrays.items()}
        entries |= {parameter_key(spec): entry(spec, "quantised" if spec.stored else "kept", digests) for spec in own}
    about = {"recipe": recipe(name).as_json(), "notes": ["random numbers"], "config": read_object(path / "config.json")}
    whole = {"format": FORMAT, "version": VERSION, "complete": True, **about, "source": {"format": "random", "files": {}}}
    write_json(
        path / MANIFEST, {**whole, "files": small, "packages": {}, "parameters": {k: entries[k] for k in map(parameter_key, specs)}}
    )
    return Artifact.open(path)


def draw(spec: ParameterSpec, seed: int) -> Mapping[str, np.ndarray]:
    """The arrays of a parameter by field; from its name, so that layer counts share them."""
    stored, rng = spec.stored, np.random.Generator(np.random.SFC64([seed, zlib.crc32(parameter_key(spec).encode())]))
    if stored is None:
        ((field, array),) = spec.arrays.items()
        return {field: checkpoint.draw(spec.tensors[0].name, array.shape, seed).astype(array.dtype)}
    first = stored.fields[0]
    codes = _codes(rng, spec.arrays[first], stored.bits)
    if stored.kind == "rows":
        size = rng.uniform(0.5, 1.5, spec.arrays["scales"].shape) / _SPREAD[stored.bits]
        return {first: codes, "scales": size.astype(ml_dtypes.bfloat16)}
    inputs, outputs = spec.tensors[0].shape[1], sum(t.shape[0] for t in spec.tensors)
    words = spec.arrays["scales"]
    drawn = rng.integers(_MIDDLE - _REACH, _MIDDLE + _REACH + 1, (*words.shape, words.dtype.itemsize), np.uint8)
    planes = drawn.shape[2]
    there = np.arange(drawn.shape[0])[:, None] * planes + np.arange(planes) < -(-inputs // stored.group)
    scales = np.where(there[:, None], drawn, 0) + np.uint8(128)
    unit = (0.5 if spec.name.endswith(_ADDED) else 1.0) / (_SPREAD[stored.bits] * inputs**0.5 * _MIDDLE)
    units = np.where(np.arange(words.shape[1]) < outputs, np.float32(unit), np.float32(0))
    return {first: codes, "scales": scales.view(words.dtype)[..., 0], "unit": units}


def _codes(rng: np.random.Generator, array: Any, bits: int) -> np.ndarray:
    """Any bits are codes, but -128 is none of 8 bits."""
    size = array.size * array.dtype.itemsize
    drawn = rng.integers(0, 2**64, -(-size // 8), np.uint64).view(np.uint8)[:size]
    if bits == 8:
        drawn[drawn == 0x80] = 0x81
    return drawn.view(array.dtype).reshape(array.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--recipe", default="q4")
    parser.add_argument("--miniature", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    made = write(options.path, checkpoint.text_config(options.layers, options.miniature), options.recipe, options.seed)
    print(f"{made.nbytes:,} bytes, {shutil.disk_usage(options.path).free:,} free on the disk")


if __name__ == "__main__":
    main()
