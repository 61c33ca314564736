"""Writes artifacts: the engine's arrays from a source, group by group, tensor by tensor, in blocks of rows.

While it goes on, `progress.json` in the destination says which groups are done; a conversion that was killed goes on at
the first that is missing. `manifest.json` comes last, when everything has been read back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.checkpoints import artifact as artifacts
from ninfer_jax.checkpoints.artifact import (
    FORMAT,
    MANIFEST,
    PARAMETERS,
    VERSION,
    Artifact,
    ArtifactError,
    StoredArray,
    one_line,
    write_bytes,
    write_json,
)
from ninfer_jax.checkpoints.checkpoint import some_names
from ninfer_jax.checkpoints.quantised import BLOCK_ROWS, ParameterSpec, Stored, quantise_tensors
from ninfer_jax.checkpoints.safetensors_file import CheckpointError, load_json
from ninfer_jax.checkpoints.sources import Source, SourceTensor
from pallas_kernels.matmul.quantised import pack

PROGRESS = "progress.json"
_PACKAGES = ("ninfer-jax", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "orbax-checkpoint", "safetensors", "gguf")

# Called with ("digests" | "weights" | "verify", bytes done, bytes in all).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """The fate of each tensor of a source.

    parameters: of the model over the wanted formats. made: "quantised", "repacked" or "kept", by parameter. notes: where the
    source's own codes could not be kept although the format would have been right, and why. constants: the arrays of
    parameters that are in no source, by parameter.
    """

    parameters: Sequence[ParameterSpec]
    made: Mapping[str, str]
    notes: Sequence[str]
    constants: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


def parameter_key(spec: ParameterSpec) -> str:
    """The name of a parameter in a manifest: unlike `spec.name` unique, also for those that are kept as they are."""
    if spec.stored is not None:
        return spec.name
    (field,) = spec.arrays
    return f"{spec.name}.{field}" if spec.name else field


def repackable(parameters: Sequence[ParameterSpec], source: Source) -> tuple[dict[str, int], list[str]]:
    """4-bit matrices that can take the source's codes, name -> its group size; and notes on those whose
    tensors share a parameter but not a format."""
    groups: dict[str, int] = {}
    notes = []
    for spec in parameters:
        if spec.stored is None or spec.stored.kind != "matrix" or spec.stored.bits != 4:
            continue
        own = {t.name: source.tensors[t.name].group for t in spec.tensors if t.name in source.tensors}
        kinds = set(own.values())
        group = next(iter(kinds), None) if len(kinds) == 1 else None
        if group is not None:
            groups[spec.name] = group
        elif kinds - {None}:
            said = ", ".join(f"{name} {'not quantised' if g is None else f'group {g}'}" for name, g in own.items())
            notes.append(f"{spec.name}: its tensors differ ({said}), quantised again to group {spec.stored.group}")
    return groups, notes


def check_tensors(source: Source, parameters: Sequence[ParameterSpec], ignore: Sequence[str] = ()) -> None:
    """CheckpointError where tensors are missing, of another shape, or unknown (but for names that begin as in `ignore`)."""
    wanted = {t.name: t for spec in parameters for t in spec.tensors}
    missing = [name for name in wanted if name not in source.tensors]
    if missing:
        raise CheckpointError(f"{source.path} lacks {len(missing)} of {len(wanted)} tensors: {some_names(missing)}")
    extra = [name for name in source.tensors if name not in wanted and not name.startswith(tuple(ignore))]
    if extra:
        raise CheckpointError(f"{source.path} holds {len(extra)} tensors the model does not have: {some_names(extra)}")
    for name, spec in wanted.items():
        if source.tensors[name].shape != spec.shape:
            raise CheckpointError(
                f"{name} in {source.path} has shape {list(source.tensors[name].shape)}, the config asks for {list(spec.shape)}"
            )


def write_artifact(
    source: Source, plan: Plan, destination: str | Path, *, recipe: Mapping[str, Any], progress: Progress | None = None
) -> Artifact:
    """Convert `source` as planned into `destination`, going on with what an earlier run left, and verify the whole.

    recipe: what the manifest says of it. The source is only read. CheckpointError, one line, for anything in the way: a
    destination that holds something else or another conversion, a full disk, a value that is not finite.
    """
    with _one_line(destination), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return _Conversion(source, plan, Path(destination), dict(recipe), progress or (lambda stage, done, total: None)).run()


class _Conversion:
    def __init__(self, source: Source, plan: Plan, destination: Path, recipe: dict[str, Any], tell: Progress):
        self.source, self.plan, self.path, self.recipe, self.tell = source, plan, destination, recipe, tell
        self.groups: dict[str, list[ParameterSpec]] = {}
        for spec in plan.parameters:
            self.groups.setdefault(group_of(spec), []).append(spec)

    def run(self) -> Artifact:
        if self.path.exists() and (not self.path.is_dir() or not self._ours()):
            raise ArtifactError(f"{self.path} holds something else: choose a directory that is empty or not there")
        if not artifacts.is_artifact(self.path):  # before the whole source is read for its digests
            self._check_space()
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK):
                raise ArtifactError(f"{self.path}: Permission denied: choose a directory that may be written")
        identity = {
            "recipe": self.recipe,
            "parameters": {parameter_key(spec): self._entry(spec, {}) for spec in self.plan.parameters},
            "constants": {key: artifacts.digest(array) for key, array in self.plan.constants.items()},
            "source": {"format": self.source.format, "files": self._digests()},
            "files": {name: hashlib.sha256(content).hexdigest() for name, content in self._small_files().items()},
        }
        # As JSON has it, since it is compared with what was read from there.
        identity = json.loads(json.dumps(identity))
        if artifacts.is_artifact(self.path):
            return self._finished(identity)
        (self.path / PARAMETERS).mkdir(parents=True, exist_ok=True)
        done = self._resume(identity)
        for name, content in self._small_files().items():
            write_bytes(self.path / name, content)
        self._write_groups(identity, done)
        self._verify(identity, done)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "complete": True,
            "recipe": self.recipe,
            "notes": list(self.plan.notes),
            "config": self.source.config,
            "source": identity["source"],
            "files": identity["files"],
            "packages": _packages(),
            "parameters": {
                parameter_key(spec): self._entry(spec, done[group]) for group, specs in self.groups.items() for spec in specs
            },
        }
        write_json(self.path / MANIFEST, manifest)
        (self.path / PROGRESS).unlink()
        return Artifact.open(self.path)

    def _ours(self) -> bool:
        """Empty, or the beginning or the end of a conversion."""
        held = {p.name for p in self.path.iterdir()}
        return not held or PROGRESS in held or (MANIFEST in held and PARAMETERS in held) or held == {f".{PROGRESS}.partial"}

    def _finished(self, identity: dict[str, Any]) -> Artifact:
        manifest = artifacts.read_manifest(self.path / MANIFEST)
        if any(manifest.get(key) != identity[key] for key in ("recipe", "source", "files")):
            raise ArtifactError(f"{self.path} holds an artifact of another source or recipe: remove it or choose another directory")
        (self.path / PROGRESS).unlink(missing_ok=True)
        return Artifact.open(self.path)

    def _resume(self, identity: dict[str, Any]) -> dict[str, dict[str, str]]:
        """The digests of the groups that are whole, by array; what is left of others is removed."""
        file, done = self.path / PROGRESS, {}
        if file.exists():
            before = load_json(file.read_bytes(), str(file))
            if before.get("identity") != identity:
                raise ArtifactError(
                    f"{self.path} holds the beginning of a conversion of another source or recipe: "
                    "remove it or choose another directory"
                )
            done = before["done"]
        else:
            write_json(file, {"identity": identity, "done": {}})
        for folder in (self.path / PARAMETERS).iterdir():
            if folder.name not in done:
                shutil.rmtree(folder)
        return {group: digests for group, digests in done.items() if (self.path / PARAMETERS / group).is_dir()}

    def _write_groups(self, identity: dict[str, Any], done: dict[str, dict[str, str]]) -> None:
        sizes = {
            group: sum(self.source.tensors[t.name].nbytes for s in specs for t in s.tensors) for group, specs in self.groups.items()
        }
        total, so_far = sum(sizes.values()), sum(sizes[group] for group in done)
        self.tell("weights", so_far, total)
        saving: Future | None = None
        # A group is saved while the next is quantised; no more than these two are in memory.
        with ThreadPoolExecutor(1) as pool:
            for group, specs in self.groups.items():
                if group in done:
                    continue
                arrays: dict[str, np.ndarray] = {}
                for spec in specs:
                    for read in self._arrays(spec, arrays):
                        so_far += read
                        self.tell("weights", so_far, total)
                if saving is not None:
                    saving.result()
                saving = pool.submit(self._save, group, arrays, identity, done)
                del arrays
            if saving is not None:
                saving.result()

    def _save(self, group: str, arrays: dict[str, np.ndarray], identity: dict[str, Any], done: dict[str, dict[str, str]]) -> None:
        import orbax.checkpoint as ocp

        artifacts.checkpointer().save(self.path / PARAMETERS / group, args=ocp.args.PyTreeSave(arrays))
        done[group] = {name: artifacts.digest(array) for name, array in arrays.items()}
        write_json(self.path / PROGRESS, {"identity": identity, "done": done})

    def _arrays(self, spec: ParameterSpec, into: dict[str, np.ndarray]) -> Iterator[int]:
        """Makes the arrays of a parameter, by name; yields the bytes of the source that went into them."""
        key, tensors = parameter_key(spec), [_Rows(t.name, self.source.tensors[t.name]) for t in spec.tensors]
        if key in self.plan.constants:
            into[key] = self.plan.constants[key]
            return
        if spec.stored is None:
            (array,) = spec.arrays.values()
            values = _joined([t[0 : t.shape[0]] for t in tensors])
            into[key] = _narrowed(key, values, np.dtype(array.dtype))
            yield sum(t.nbytes for t in tensors)
            return
        arrays = {field: np.empty(a.shape, a.dtype) for field, a in spec.arrays.items()}
        axis = spec.stored.axis
        at = dict.fromkeys(arrays, 0)
        rows = sum(t.shape[0] for t in tensors)
        per_row = sum(t.nbytes for t in tensors) / rows
        blocks = _repack(tensors, spec.stored) if self.plan.made[key] == "repacked" else quantise_tensors(spec.stored, tensors)
        counted = 0
        for row, block in blocks:
            for field, part in block.items():
                place = slice(at[field], at[field] + part.shape[axis])
                arrays[field][(..., place) if axis else place] = part
                at[field] = place.stop
            yield int(row * per_row) - counted
            counted = int(row * per_row)
        for field, array in arrays.items():
            if at[field] != array.shape[axis]:
                raise AssertionError(f"{key}.{field}: {at[field]} of {array.shape[axis]} written")
            into[f"{key}.{field}"] = array

    def _verify(self, identity: dict[str, Any], done: dict[str, dict[str, str]]) -> None:
        found = {group: [a for spec in specs for a in described(spec, done[group])] for group, specs in self.groups.items()}
        total, so_far = sum(a.nbytes for arrays in found.values() for a in arrays), 0
        for group, arrays in found.items():
            try:
                artifacts.read_group(self.path, group, arrays, verify=True)
            except ArtifactError:
                del done[group]  # to be made again by the next run
                write_json(self.path / PROGRESS, {"identity": identity, "done": done})
                raise
            so_far += sum(a.nbytes for a in arrays)
            self.tell("verify", so_far, total)

    def _entry(self, spec: ParameterSpec, digests: Mapping[str, str]) -> dict[str, Any]:
        return entry(spec, self.plan.made[parameter_key(spec)], digests)

    def _small_files(self) -> dict[str, bytes]:
        config = (json.dumps(self.source.config, indent=2, ensure_ascii=False) + "\n").encode()
        return {"config.json": config, **self.source.companions}

    def _digests(self) -> dict[str, dict[str, Any]]:
        total, done, found = sum(f.stat().st_size for f in self.source.files), 0, {}
        for file in self.source.files:
            with file.open("rb") as content:
                digest = hashlib.sha256()
                while block := content.read(1 << 24):
                    digest.update(block)
                    done += len(block)
                    self.tell("digests", done, total)
            name = file.name if file.name not in found else str(file)
            found[name] = {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}
        return found

    def _check_space(self) -> None:
        need = sum(a.nbytes for specs in self.groups.values() for spec in specs for a in described(spec, {}))
        parameters = self.path / PARAMETERS
        there = sum(p.stat().st_size for p in parameters.rglob("*") if p.is_file()) if parameters.is_dir() else 0
        existing = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if need > free + there:
            raise ArtifactError(f"{self.path}: {need - there:,} bytes are needed, {free:,} are free on the disk")


class _Rows:
    """A tensor of the source as `quantise_tensors` takes it: rows are read when they are sliced."""

    def __init__(self, name: str, tensor: SourceTensor):
        self.name, self.tensor, self.shape, self.nbytes = name, tensor, tensor.shape, tensor.nbytes

    def __getitem__(self, rows: slice) -> np.ndarray:
        return _finite(self.name, self.tensor.read(rows.start, rows.stop), rows.start)

    def codes(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        codes, scales = self.tensor.read_codes(start, stop)
        return codes, _finite(f"the scales of {self.name}", scales, start)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _repack(tensors: Sequence[_Rows], stored: Stored) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """The blocks of `quantise_tensors`, but with the codes that the source has, and its scales as `pack` rounds them."""
    total = sum(t.shape[0] for t in tensors)
    for start in range(0, total, BLOCK_ROWS):
        stop, at, found = min(start + BLOCK_ROWS, total), 0, []
        for tensor in tensors:
            low, high = max(start - at, 0), min(stop - at, tensor.shape[0])
            if low < high:
                found.append(tensor.codes(low, high))
            at += tensor.shape[0]
        codes, scales = (_joined([pair[part] for pair in found]) for part in (0, 1))
        weight = pack(jnp.asarray(codes).T, jnp.asarray(scales).T, bits=stored.bits)
        yield stop, {field: np.asarray(getattr(weight, field)) for field in stored.fields}


def _finite(name: str, values: np.ndarray, first_row: int) -> np.ndarray:
    if not np.isfinite(values).all():
        where = [int(i) for i in np.argwhere(~np.isfinite(values))[0]]
        value = values[tuple(where)]
        raise CheckpointError(f"{name} holds {value} at {[where[0] + first_row, *where[1:]]}")
    return values


def _narrowed(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    if not np.isfinite(narrow.astype(np.float32)).all():
        raise CheckpointError(f"{name} holds values beyond the range of {dtype}")
    return narrow


def described(spec: ParameterSpec, digests: Mapping[str, str]) -> list[StoredArray]:
    """The arrays of a parameter with their digests, by name; "" where there is none yet."""
    key = parameter_key(spec)
    names = [key if spec.stored is None else f"{key}.{field}" for field in spec.arrays]
    return [
        StoredArray(name, group_of(spec), tuple(a.shape), str(np.dtype(a.dtype)), digests.get(name, ""))
        for name, a in zip(names, spec.arrays.values(), strict=True)
    ]


def entry(spec: ParameterSpec, made: str, digests: Mapping[str, str]) -> dict[str, Any]:
    """A parameter's entry in the manifest."""
    stored = spec.stored
    form = {"kind": "plain"} if stored is None else {"kind": stored.kind, "bits": stored.bits, "group_size": stored.group}
    arrays = {
        field: {"shape": list(a.shape), "dtype": a.dtype, "sha256": a.sha256}
        for field, a in zip(spec.arrays, described(spec, digests), strict=True)
    }
    return {"role": spec.role, **form, "made": made, "group": group_of(spec), "arrays": arrays}


def group_of(spec: ParameterSpec) -> str:
    """One Orbax checkpoint each: the embedding, a layer, the MTP layer, and the head with the final norm."""
    first, *rest = spec.name.split(".")
    if first == "layers":
        return f"layers.{rest[0]}"
    return {"mtp": "mtp", "embed_tokens": "embedding"}.get(first, "head")


def _packages() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # not every source needs every one
            continue
    return found


@contextmanager
def _one_line(destination: str | Path) -> Iterator[None]:
    """Whatever the file system or Orbax has to say, as one line."""
    try:
        yield
    except (CheckpointError, AssertionError):
        raise
    except OSError as error:
        raise ArtifactError(f"{error.filename or destination}: {error.strerror or one_line(error)}") from error
    except (ValueError, RuntimeError) as error:
        raise ArtifactError(f"{destination}: {one_line(error)}") from error
