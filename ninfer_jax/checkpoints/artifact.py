"""An artifact: the engine's own arrays on disk, with a manifest of what each one is. Written by `ninfer_jax.checkpoints.convert`.

    manifest.json                 what everything is; written last, so that its presence means a whole artifact
    parameters/<group>/           an Orbax PyTree checkpoint: the embedding, one decoder layer, the head, or the MTP layer
    config.json, tokenizer.json…  as the source had them (config.json without the source's own quantisation)

Arrays are stored uncompressed, one file each (`parameters/<group>/<array>/0.0`), and have SHA-256 digests: what an engine on a
CPU reads can be the file itself, mapped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ninfer_jax.checkpoints.quantised import Stored
from ninfer_jax.checkpoints.safetensors_file import CheckpointError, load_json

MANIFEST, PARAMETERS = "manifest.json", "parameters"
FORMAT, VERSION = "ninfer-jax artifact", 2
# A smaller array is read. A mapping keeps its file open, and of those a process may have 1,024.
MAPPED_BYTES = 4 << 20
READERS = 2  # groups read at a time: one more than the device takes, so that the disk never waits

LoadProgress = Callable[[int, int, str], None]


class ArtifactError(CheckpointError):
    """An artifact that cannot be used as it is, or a conversion that cannot go on; one line."""


@dataclass(frozen=True)
class StoredArray:
    """One array of a parameter: its name in the engine, which is also that of its folder, shape, dtype and digest."""

    name: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class StoredParameter:
    """role: as in recipes. stored: bits, group and kind, None where it is kept as it is. made: "quantised", "repacked"
    (codes of the source) or "kept". arrays: by field."""

    name: str
    role: str
    stored: Stored | None
    made: str
    arrays: Mapping[str, StoredArray]


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of that name, `bfloat16` and the like among them."""
    return np.dtype(getattr(ml_dtypes, name, name))


def digest(array: np.ndarray) -> str:
    """SHA-256 of the elements in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def is_artifact(path: str | Path) -> bool:
    """Whether a directory says that it holds a finished artifact."""
    return (Path(path) / MANIFEST).is_file()


class Artifact:
    """A finished artifact, its arrays unread; make one with `Artifact.open`."""

    def __init__(self, path: Path, manifest: Mapping[str, Any], parameters: Mapping[str, StoredParameter]):
        self.path, self.manifest, self.parameters = path, manifest, parameters

    @classmethod
    def open(cls, path: str | Path) -> Artifact:
        """Read the manifest and check it against the files: every array is there with its shape, dtype and size, none is
        left over, and the small files have their digests. ArtifactError, one line, names what does not fit."""
        path = Path(path)
        manifest = read_manifest(path / MANIFEST)
        try:
            parameters = {name: _parameter(name, about) for name, about in manifest["parameters"].items()}
            small = dict(manifest["files"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"{path / MANIFEST} is damaged: {type(error).__name__} {error}") from None
        artifact = cls(path, manifest, MappingProxyType(parameters))
        for name, expected in small.items():
            file = path / name
            if not file.is_file():
                raise ArtifactError(f"{path} lacks {name}, which its manifest lists")
            if hashlib.sha256(file.read_bytes()).hexdigest() != expected:
                raise ArtifactError(f"{file} has been changed or damaged: its SHA-256 is not the manifest's")
        artifact._check_groups()
        return artifact

    @property
    def groups(self) -> dict[str, list[StoredArray]]:
        """Arrays by group, in the order of the manifest."""
        found: dict[str, list[StoredArray]] = {}
        for parameter in self.parameters.values():
            for array in parameter.arrays.values():
                found.setdefault(array.group, []).append(array)
        return found

    @property
    def has_mtp(self) -> bool:
        return "mtp" in self.groups

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for arrays in self.groups.values() for array in arrays)

    def load(
        self,
        device_put: Callable[[np.ndarray], Any] = jax.device_put,
        *,
        verify: bool = True,
        skip: Sequence[str] = (),
        progress: LoadProgress | None = None,
    ) -> dict[str, Any]:
        """Every array through `device_put`, by name; arguments as for `read_groups`. Host memory holds two groups at a
        time, at most the head's and another, beside what `device_put` keeps."""
        loaded: dict[str, Any] = {}
        for arrays in self.read_groups(verify=verify, skip=skip, progress=progress):
            while arrays:
                name, array = arrays.popitem()
                loaded[name] = jax.block_until_ready(device_put(array))
                del array
        return loaded

    def read_groups(
        self, *, mapped: bool = False, verify: bool = True, skip: Sequence[str] = (), progress: LoadProgress | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """The arrays of one group after another, by name, read ahead in threads.

        mapped: large arrays are the files themselves, read-only; whoever changes a file changes them. verify: compare digests.
        skip: groups to leave out, such as "mtp". progress: called with (bytes done, bytes in all, group). ArtifactError names
        the file and the array that is damaged.
        """
        read = map_group if mapped else read_group
        wanted = {group: arrays for group, arrays in self.groups.items() if group not in skip}
        total, done = sum(a.nbytes for arrays in wanted.values() for a in arrays), 0
        ahead: deque[tuple[str, Future]] = deque()
        names = iter(wanted)
        with ThreadPoolExecutor(READERS) as pool:
            try:
                while True:
                    while len(ahead) < READERS and (group := next(names, None)) is not None:
                        ahead.append((group, pool.submit(read, self.path, group, wanted[group], verify)))
                    if not ahead:
                        return
                    group, future = ahead.popleft()
                    arrays = future.result()
                    del future
                    yield arrays
                    done += sum(array.nbytes for array in wanted[group])
                    if progress is not None:
                        progress(done, total, group)
            finally:
                pool.shutdown(cancel_futures=True)

    def _check_groups(self) -> None:
        folder = self.path / PARAMETERS
        groups = self.groups
        present = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
        for group in groups:
            if group not in present:
                raise ArtifactError(f"{folder} lacks {group}, which the manifest lists")
        for name in sorted(present - set(groups)):
            raise ArtifactError(f"{folder / name} is not in the manifest")
        for group, arrays in groups.items():
            _check_group(folder / group, arrays)


def read_manifest(file: Path) -> dict[str, Any]:
    """ArtifactError for one that is not there, not whole, or of another version."""
    try:
        manifest = load_json(file.read_bytes(), str(file))
    except OSError as error:
        raise ArtifactError(f"{file}: {error.strerror}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArtifactError(f"{file} is no manifest of an artifact")
    if manifest.get("version") != VERSION:
        raise ArtifactError(
            f"{file}: version {manifest.get('version')!r} of the format, this program reads {VERSION}: convert again"
        )
    if manifest.get("complete") is not True:
        raise ArtifactError(f"{file}: the conversion was not finished")
    return manifest


def read_group(path: Path, group: str, arrays: Sequence[StoredArray], verify: bool) -> dict[str, np.ndarray]:
    """The arrays of one group from its Orbax checkpoint, checked against the manifest."""
    import orbax.checkpoint as ocp  # here, because it takes a second that only users of artifacts should wait for

    folder = path / PARAMETERS / group

    how = {array.name: ocp.RestoreArgs(restore_type=np.ndarray) for array in arrays}
    try:
        found = checkpointer().restore(folder, args=ocp.args.PyTreeRestore(restore_args=how))
    except Exception as error:  # whatever the library meets in damaged files, the user gets one line
        raise ArtifactError(f"{folder} cannot be read: {one_line(error)}") from error
    for array in arrays:
        value = found.get(array.name)
        if value is None or value.shape != array.shape or value.dtype != numpy_dtype(array.dtype):
            raise ArtifactError(f"{folder / array.name}: {array.name} is not the {array.dtype} {list(array.shape)} of the manifest")
        if verify:
            _verify(folder, array, value)
    return found


def map_group(path: Path, group: str, arrays: Sequence[StoredArray], verify: bool) -> dict[str, np.ndarray]:
    """The same without a copy of those of `MAPPED_BYTES` and more."""
    folder, found = path / PARAMETERS / group, {}
    for array in arrays:
        try:
            found[array.name] = _map(folder / array.name, array)
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{folder / array.name} cannot be read: {one_line(error)}") from error
        if verify:
            _verify(folder, array, found[array.name])
    return found


def _map(folder: Path, array: StoredArray) -> np.ndarray:
    """An array by its file, which holds the elements in C order and nothing else."""
    about, dtype = load_json((folder / ".zarray").read_bytes(), str(folder / ".zarray")), numpy_dtype(array.dtype)
    whole = {"chunks": list(array.shape), "compressor": None, "filters": None, "order": "C"}
    if {key: about.get(key, ...) for key in whole} != whole or str(about.get("dtype")).startswith(">"):
        raise ArtifactError(f"{folder}: {array.name} is not one uncompressed file; convert again")
    file = folder / about.get("dimension_separator", ".").join("0" * len(array.shape))
    if file.stat().st_size != array.nbytes:
        raise ArtifactError(f"{file} has {file.stat().st_size} bytes, the manifest says {array.nbytes}: damaged or incomplete")
    if array.nbytes < MAPPED_BYTES:
        return np.fromfile(file, dtype).reshape(array.shape)
    with file.open("rb") as content:
        return np.frombuffer(mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ), dtype).reshape(array.shape)


def _verify(folder: Path, array: StoredArray, value: np.ndarray) -> None:
    if digest(value) != array.sha256:
        raise ArtifactError(f"{folder / array.name}: {array.name} is damaged, its SHA-256 is not the manifest's; convert again")


_here = threading.local()


def checkpointer() -> Any:
    """Orbax's, for uncompressed arrays of one file each; one a thread."""
    if not hasattr(_here, "checkpointer"):
        import orbax.checkpoint as ocp

        # It warns of a format for many hosts that is not wanted here, and logs errors that it also raises.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        _here.checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False))
    return _here.checkpointer


_OS_ERROR = re.compile(r'local file "(?P<file>[^"]+)".*: (?P<reason>[^:]+?) \[os_error_code')


def one_line(error: BaseException) -> str:
    """The one line that an error of Orbax or of the system comes to."""
    text = str(error).strip()
    if found := _OS_ERROR.search(text):
        return f"{found['file']}: {found['reason']}"
    return text.splitlines()[0][:300] if text else type(error).__name__


def _parameter(name: str, about: Mapping[str, Any]) -> StoredParameter:
    stored = None if about["kind"] == "plain" else Stored(about["kind"], int(about["bits"]), int(about["group_size"]))
    arrays = {}
    for field, array in about["arrays"].items():
        shape, full = tuple(int(n) for n in array["shape"]), name if stored is None else f"{name}.{field}"
        numpy_dtype(array["dtype"])
        arrays[field] = StoredArray(full, about["group"], shape, array["dtype"], array["sha256"])
    return StoredParameter(name, about["role"], stored, about["made"], arrays)


def _check_group(folder: Path, arrays: Sequence[StoredArray]) -> None:
    """Names, shapes, dtypes and sizes, without reading data."""
    held = {p.name for p in folder.iterdir() if p.is_dir()}
    for array in arrays:
        if array.name not in held:
            raise ArtifactError(f"{folder} lacks {array.name}, which the manifest lists")
        size = sum(p.stat().st_size for p in (folder / array.name).iterdir() if not p.name.startswith("."))
        if size != array.nbytes:
            raise ArtifactError(f"{folder / array.name} has {size} bytes, the manifest says {array.nbytes}: damaged or incomplete")
    for name in sorted(held - {array.name for array in arrays}):
        raise ArtifactError(f"{folder / name} is not in the manifest")
    try:
        tree = checkpointer().metadata(folder).item_metadata.tree
    except Exception as error:
        raise ArtifactError(f"{folder} is damaged: {one_line(error)}") from error
    for array in arrays:
        about = tree.get(array.name)
        if about is None or tuple(about.shape) != array.shape or np.dtype(about.dtype) != numpy_dtype(array.dtype):
            raise ArtifactError(f"{folder / array.name} is not the {array.dtype} {list(array.shape)} of the manifest")


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Atomically: whoever reads sees the old file or the whole new one."""
    write_bytes(file, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def write_bytes(file: Path, content: bytes) -> None:
    """Atomically, and on disk when it returns."""
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, file)
