"""The files of a repository that a model consists of: decided by the listing alone, so that nothing else is fetched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from ninfer_jax.files import FileError
from ninfer_jax.model_path import COMPANIONS
from ninfer_jax.models.kept import size
from ninfer_jax.models.names import MAIN, HubName

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
SMALL = (CONFIG, *COMPANIONS, "quantize_config.json")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf$")


def small_files(sizes: Mapping[str, int]) -> list[str]:
    """Names of the files beside the weights, and of the index of these, as far as there are any."""
    return [name for name in (*SMALL, INDEX) if name in sizes]


def weight_files(name: HubName, sizes: Mapping[str, int], listed_in_index: list[str]) -> list[str]:
    """The files with the weights, the one to open first: all shards of the index and an MTP head beside them, or the one GGUF
    model. FileError where there is none, where the choice is the user's, and where a shard is missing."""
    if name.file is None and (found := _safetensors(name, sizes, listed_in_index)):
        return found
    models = _ggufs(sizes)
    if name.file is not None:
        return _chosen(name, models)
    if not models:
        raise FileError(f"{name} holds no model: {_what(sizes)}")
    if len(models) > 1:
        raise FileError(f"{name} holds {len(models)} GGUF models, choose one: {_choices(name, models, sizes)}")
    return next(iter(models.values()))


def _safetensors(name: HubName, sizes: Mapping[str, int], listed: list[str]) -> list[str]:
    top = sorted(n for n in sizes if n.endswith(".safetensors") and "/" not in n)
    if INDEX in sizes:
        if lacking := [file for file in listed if file not in sizes]:
            raise FileError(f"{name}: {INDEX} names {lacking[0]}, which the repository lacks: is it whole at {name.revision}?")
        own = list(dict.fromkeys(listed))
    elif SINGLE in top:
        own = [SINGLE]
    else:
        own = [n for n in top if not _mtp(n) and n != "adapter_model.safetensors"]
        if len(own) > 1:
            raise FileError(f"{name} holds {len(own)} .safetensors files but no {INDEX}: it is not whole at {name.revision}")
    return [*own, *(n for n in top if _mtp(n) and n not in own)] if own else []


def _mtp(name: str) -> bool:
    return "mtp" in name.lower()


def _ggufs(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The files of each GGUF model, by the name of the first."""
    found: dict[str, list[str]] = {}
    for name in sorted(n for n in sizes if n.endswith(".gguf") and not PurePosixPath(n).name.startswith("mmproj")):
        part = _PART.match(name)
        first = f"{part[1]}-00001-of-{part[3]}.gguf" if part else name
        found.setdefault(first, []).append(name)
    return {first: parts for first, parts in found.items() if first in parts}


def _chosen(name: HubName, models: Mapping[str, list[str]]) -> list[str]:
    wanted = name.file or ""
    if wanted in models:
        return models[wanted]
    if not wanted.endswith(".gguf"):
        tag = re.compile(rf"(^|[-._/]){re.escape(wanted)}(-00001-of-\d{{5}})?\.gguf$", re.IGNORECASE)
        found = [first for first in models if tag.search(first)]
        if len(found) == 1:
            return models[found[0]]
        if found:
            raise FileError(f"{name}: {len(found)} GGUF models have {wanted} in their names, choose one: {', '.join(found[:8])}")
    there = ", ".join(list(models)[:8]) or "no GGUF file at all"
    raise FileError(f"{name}: {name.repo} has no {wanted}; it has {there}")


def _choices(name: HubName, models: Mapping[str, list[str]], sizes: Mapping[str, int]) -> str:
    plain = HubName(name.repo, name.revision)
    said = [f"{plain}:{first} ({size(sum(sizes[n] for n in parts))})" for first, parts in models.items()]
    return ", ".join(said[:12]) + (f" and {len(said) - 12} more" if len(said) > 12 else "")


def _what(sizes: Mapping[str, int]) -> str:
    if "adapter_config.json" in sizes:
        return "it is an adapter, whose base model is to be merged with it first"
    others = sorted(
        {PurePosixPath(n).suffix for n in sizes if n.endswith((".bin", ".pt", ".pth", ".onnx", ".msgpack", ".h5", ".ckpt"))}
    )
    if others:
        return f"its weights are {', '.join(others)}, which are not read: take a version with safetensors or GGUF"
    return "neither .safetensors nor .gguf files are in it"


def checked_config(name: HubName, sizes: Mapping[str, int], weights: list[str]) -> None:
    """FileError for safetensors without a config.json."""
    if CONFIG not in sizes and not weights[0].endswith(".gguf"):
        raise FileError(f"{name} holds weights but no {CONFIG}: it is no model, or not whole at {name.revision or MAIN}")
