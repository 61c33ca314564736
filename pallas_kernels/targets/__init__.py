"""The graphics cards this package compiles for, as XLA target descriptions: one text proto a card.

Each file says where its figures come from. Nothing here was read from a card: boost clocks and bandwidths are the
makers', so a time modelled from them is a floor.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import re

# Multiply-adds per SM and clock, dense: 16-bit inputs with float32 sums, and 8-bit integers. They follow from the rates
# of the makers' data sheets, halved to multiply-adds, over SMs and clock: A100 312 / 624 T(FL)OPS, 3090 71 / 284,
# 4090 165.2 / 660.6, H200 989.4 / 1978.9, 5090 209.5 / 838.
_TENSOR_16 = {(8, 0): 1024, (8, 6): 256, (8, 9): 256, (9, 0): 2048, (12, 0): 256}
_TENSOR_8 = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (12, 0): 1024}
# Hz; elsewhere tensor cores are rated at the boost clock of the rest.
_TENSOR_CLOCK = {(9, 0): 1.83e9}
# Resident blocks per SM, by the CUDA C++ Programming Guide's table of compute capabilities.
_BLOCKS_PER_SM = {(8, 0): 32, (8, 6): 16, (8, 9): 24, (9, 0): 32, (12, 0): 24}


@dataclasses.dataclass(frozen=True)
class Target:
    """One card.

    `proto` is what XLA is given; the other fields are read from it. Sizes in bytes, `bandwidth` in bytes/s, `clock` in
    Hz (boost), `tensor_16` and `tensor_8` in multiply-adds a second of the whole card (data sheet, dense).
    """

    name: str
    description: str
    compute_capability: tuple[int, int]
    sms: int
    threads_per_sm: int
    registers_per_sm: int
    smem_per_sm: int
    smem_per_block: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    clock: float
    proto: str = dataclasses.field(repr=False)

    @property
    def arch(self) -> str:
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"

    @property
    def issue_rate(self) -> float:
        """Thread instructions a second: four schedulers an SM, 32 threads each, one instruction a clock."""
        return self.sms * 4 * 32 * self.clock

    @property
    def tensor_clock(self) -> float:
        return _TENSOR_CLOCK.get(self.compute_capability, self.clock)

    @property
    def tensor_16(self) -> float:
        return self.sms * self.tensor_clock * _TENSOR_16[self.compute_capability]

    @property
    def tensor_8(self) -> float:
        return self.sms * self.tensor_clock * _TENSOR_8[self.compute_capability]

    @property
    def blocks_per_sm(self) -> int:
        """Blocks an SM holds at most, however small."""
        return _BLOCKS_PER_SM[self.compute_capability]


def names() -> list[str]:
    """Names of all known cards, sorted."""
    folder = importlib.resources.files(__name__)
    return sorted(f.name.removesuffix(".txtpb") for f in folder.iterdir() if f.name.endswith(".txtpb"))


def of_device(kind: str) -> str | None:
    """The name of the card that calls itself `kind` (`jax.Device.device_kind`), None for one that has no file here."""
    return next((name for name in names() if get(name).description == kind), None)


@functools.cache
def get(name: str) -> Target:
    """The target called `name`; ValueError with the known names otherwise."""
    if name not in names():
        raise ValueError(f"target: unknown card {name!r}; known: {', '.join(names())}")
    proto = (importlib.resources.files(__name__) / f"{name}.txtpb").read_text()

    def read(pattern: str) -> str:
        found = re.search(pattern, proto)
        if found is None:
            raise ValueError(f"target: {name}.txtpb has nothing that matches {pattern!r}")
        return found[1]

    def number(key: str) -> float:
        return float(read(rf"\b{key}: ([\d.]+)"))

    return Target(
        name=name,
        description=read(r'device_description_str: "(.*)"'),
        compute_capability=(int(number("major")), int(read(r"major: \d+ minor: (\d+)"))),
        sms=int(number("core_count")),
        threads_per_sm=int(number("threads_per_core_limit")),
        registers_per_sm=int(number("registers_per_core_limit")),
        smem_per_sm=int(number("shared_memory_per_core")),
        smem_per_block=int(number("shared_memory_per_block_optin")),
        l2_bytes=int(number("l2_cache_size")),
        memory_bytes=int(number("device_memory_size")),
        bandwidth=number("memory_bandwidth"),
        clock=number("clock_rate_ghz") * 1e9,
        proto=proto,
    )
