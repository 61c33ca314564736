"""Object code of the CPU kernels that stored programs call, a file each beside them, under the kernel's target name.

A program holds only the names of what it calls; a name carries a digest of all that the code depends on, the CPU's features
among it. So the very code is kept, instead of how to make it: on another CPU, made again, it would have another name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pallas_kernels import cpu

SUFFIX = ".o"


def write_kernels(folder: Path, targets: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The manifest's entry for each of the `targets`, written as files; those of programs that were there before go."""
    for old in folder.glob(f"ninfer.*{SUFFIX}"):
        old.unlink()
    entries = {}
    for target in sorted(set(targets)):
        code = cpu.object_code(target)
        (folder / (target + SUFFIX)).write_bytes(code)
        entries[target] = {"sha256": hashlib.sha256(code).hexdigest(), "bytes": len(code)}
    return entries


def listed_kernels(manifest: Mapping[str, Any], programs: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Target and SHA-256 of each kernel that these programs call. KeyError, with the target, TypeError or ValueError for a
    damaged manifest."""
    for target in sorted({target for name in programs for target in manifest["programs"][name].get("calls", ())}):
        if cpu.called(target) != [target]:  # it becomes the name of a file
            raise ValueError(f"{target!r} is no kernel's name")
        yield target, str(manifest["kernels"][target]["sha256"])
