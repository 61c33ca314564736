"""A checkpoint directory in the Hugging Face layout: which tensors it holds and in which files.

Opening one reads headers only, so that a missing or damaged shard is found at once and not after most of the load: the
1,199 tensors of the 27B in 18 shards took 8 ms (measured on a CPU machine, headers in the page cache). Tensor data are
read by `ninfer_jax.checkpoints.fill`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo, load_json, read_header
from ninfer_jax.files import FileError, directory, head_of, kind_of, looks_like, shown, user_path

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Longest first. The vision-language class saves the text model under model.language_model., the text-only class under
# model.; lm_head.* and mtp.* carry no prefix in either.
PREFIXES = ("model.language_model.", "model.")


def canonical_name(name: str) -> str:
    """The name without the prefix of the class that saved it: `model.language_model.norm.weight` → `norm.weight`."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def some_names(names: Iterable[str], limit: int = 4) -> str:
    """The first few names and how many follow, for a one-line message."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one checkpoint by canonical name, none of them read yet.

    `tensors` holds the text model, the head and the MTP layer. `vision_tensors` holds the vision tower (`visual.*`), kept
    apart because the text engine leaves it unread.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    vision_tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Opens a directory (index and shards, or one file), or one `.safetensors` file; checks all headers.

        Raises CheckpointError, one line naming the file and the tensor: a file or an index that is missing, cut short,
        too long or damaged; an index and shards that disagree; a tensor held twice, also when only the prefixes differ.
        """
        try:
            path = user_path(path, "checkpoint")
            found = _open_path(path)
        except CheckpointError:
            raise
        except FileError as error:
            raise CheckpointError(str(error)) from None

        by_name: dict[str, TensorInfo] = {}
        for info in found:
            name = canonical_name(info.original_name)
            if name in by_name:
                other = by_name[name]
                raise CheckpointError(
                    f"{other.original_name} in {other.file} and {info.original_name} in {info.file} are both {name}: "
                    "keep one of them"
                )
            by_name[name] = info
        return cls(
            path,
            MappingProxyType({n: t for n, t in by_name.items() if not n.startswith("visual.")}),
            MappingProxyType({n: t for n, t in by_name.items() if n.startswith("visual.")}),
        )

    @property
    def has_mtp(self) -> bool:
        """Whether any `mtp.*` tensor is present. Whether all of them are is checked against the specs when loading."""
        return any(name.startswith("mtp.") for name in self.tensors)


def _open_path(path: Path) -> list[TensorInfo]:
    kind = kind_of(path)
    if kind == "a directory":
        return _open_directory(directory(path))
    if kind == "a file" and path.suffix == ".safetensors":
        return list(read_header(path).values())
    if kind is None:
        raise CheckpointError(f"{shown(path)} does not exist")
    known = looks_like(head_of(path)) if kind == "a file" else None
    raise CheckpointError(f"{shown(path)} is {known or kind}: neither a directory nor a .safetensors file")


def _open_directory(directory: Path) -> list[TensorInfo]:
    index, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if index.exists():
        weight_map = _read_index(index)
        if single.exists() and SINGLE_NAME not in weight_map.values():
            raise CheckpointError(f"{directory} holds {SINGLE_NAME} and {INDEX_NAME}, which does not name it: remove one")
        return _read_shards(index, weight_map)
    if single.is_file():
        return list(read_header(single).values())

    others = sorted(p for p in directory.glob("*.safetensors") if p.is_file())
    if len(others) == 1:
        return list(read_header(others[0]).values())
    if others:
        raise CheckpointError(
            f"{directory} holds {len(others)} .safetensors files ({some_names(p.name for p in others)}) but no "
            f"{INDEX_NAME}: fetch the index"
        )
    raise CheckpointError(f"{directory} holds no .safetensors file: expected {SINGLE_NAME}, or {INDEX_NAME} with its shards")


def _read_index(index: Path) -> dict[str, str]:
    """The weight map of an index: tensor name as in the file → file name, a plain name in the index's directory."""
    content = load_json(index.read_bytes(), str(index))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name:
            raise CheckpointError(f"{index} puts {name} into {file!r}: expected the plain name of a file beside the index")
    return weight_map


def _read_shards(index: Path, weight_map: dict[str, str]) -> list[TensorInfo]:
    shards = {file: index.parent / file for file in sorted(set(weight_map.values()))}
    for file, path in shards.items():
        if not path.is_file():
            names = [name for name, f in weight_map.items() if f == file]
            raise CheckpointError(f"{index} names {file} (for {some_names(names, 2)}), which is not in the directory: fetch it")
    headers = {file: read_header(path) for file, path in shards.items()}

    for file, header in headers.items():
        for name in header:
            listed = weight_map.get(name)
            if listed is None:
                raise CheckpointError(f"{shards[file]} holds {name}, which {index} does not list")
            if listed != file and name in headers[listed]:
                raise CheckpointError(f"{name} is held twice: in {shards[listed]} and in {shards[file]}")
            if listed != file:
                raise CheckpointError(f"{index} puts {name} into {listed}, but {shards[file]} holds it")
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointError(f"{index} puts {name} into {file}, which does not hold it: fetch {shards[file]} again")
    return [info for header in headers.values() for info in header.values()]
