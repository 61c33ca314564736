"""Choosing block sizes for a card: by times measured on it, or by what the compiler made where it is not at hand."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import targets, tuned
from pallas_kernels.lab import bench, check, registry, rows, work

# Assumed, of any card: from asking memory to having the answer; how much faster L2 is than memory; warps a scheduler
# needs to issue at every clock, as each waits some clocks for its own last result.
LATENCY = 0.8e-6
L2_FACTOR = 4.0
WARPS_PER_SCHEDULER = 4


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Block sizes with what speaks for them: `rank` sorts, the best first, and `why` says it in words."""

    config: Any
    rank: tuple[float, ...]
    why: str


def cases(ops: list[str] | None = None) -> list[registry.Case]:
    """The cases of `ops` that have candidates, one of each shape. ValueError where none has."""
    found: dict[tuple[str, str], registry.Case] = {}
    for case in registry.cases(ops):
        if hasattr(case, "configs") and case.configs():
            found.setdefault((case.op, case.key), case)
    if not found:
        raise ValueError(f"OP: no case of {', '.join(ops or [])} offers block sizes to choose from")
    return list(found.values())


def this_card(wanted: str | None = None) -> str:
    """The name of the GPU that is here. ValueError where it is not the `wanted` one, or has no description."""
    kind = jax.devices()[0].device_kind
    name = targets.of_device(kind)
    if name is None:
        raise ValueError(f"tune: no description of {kind} among {', '.join(targets.names())}, so nothing would look it up")
    if wanted not in (None, name):
        raise ValueError(f"--target: {wanted} cannot be measured on a {kind}; leave it out, or use `--by compiled`")
    return name


def modelled_us(row: rows.Row, config: Any, card: targets.Target) -> tuple[float, float]:
    """Two modelled times of a compiled candidate: everything overlapped, and nothing overlapped.

    Beside the limits of `rows.Row` they know latency (a pass of the loop waits for loads issued `stages - 1` passes
    ahead) and that few warps issue slowly; L2 counts in the second only, its speed being assumed.
    """
    resident = min(row.blocks_per_sm, -(-row.blocks // card.sms))
    waves = -(-row.blocks // (card.sms * max(resident, 1)))
    latency = waves * row.loop_passes * LATENCY / max(getattr(config, "stages", 2) - 1, 1)
    warps = resident * row.threads / 32 / 4
    issue = row.thread_instructions / card.issue_rate / min(warps / WARPS_PER_SCHEDULER, 1)
    memory, l2 = row.bytes_moved / card.bandwidth, row.requested_bytes / (L2_FACTOR * card.bandwidth)
    return max(row.modelled_us, issue * 1e6, latency * 1e6), (memory + issue + l2 + latency) * 1e6


def rank(row: rows.Row, config: Any, card: targets.Target) -> tuple[float, ...]:
    """Sort key of a compiled candidate: spilled bytes, SMs without a block, the two modelled times, the first to 1 %, and
    occupancy, the higher the better."""
    overlapped, apart = modelled_us(row, config, card)
    return (row.spill_bytes, max(card.sms - row.blocks, 0), round(100 * math.log(overlapped)), apart, -row.occupancy)


def by_compiled(case: registry.Case, target: str, jobs: int = 1) -> tuple[list[Candidate], list[str]]:
    """The candidates of a case, the best first, and a line for each that does not compile."""
    card = targets.get(target)
    configs = case.configs()
    found, failed = [], []
    for config, row in zip(configs, work.compiled([(case.op, case.name, c) for c in configs], target, jobs), strict=True):
        if isinstance(row, str):
            failed.append(row)
            continue
        overlapped, apart = modelled_us(row, config, card)
        why = (
            f"{row.blocks} blocks, {row.spill_bytes} bytes spilled, {overlapped:.1f} us, {apart:.1f} without overlap, "
            f"{row.occupancy:.0%} occupied"
        )
        found.append(Candidate(config, rank(row, config, card), why))
    return sorted(found, key=lambda c: c.rank), failed


def by_measured(case: registry.Case, copy_speed: float) -> tuple[list[Candidate], list[str]]:
    """The same by time on the GPU that is here; needs one."""
    found, failed = [], []
    for config in case.configs():
        try:
            timing = bench.run(case, copy_speed, config)
        except Exception as e:  # block sizes that do not fit the card are part of trying
            failed.append(f"{case.op}/{case.name} {config}: {str(e).strip().splitlines()[0]}")
            continue
        why = f"{timing.median_us:.1f} us, spread {timing.spread:.1%}, {timing.fraction:.0%} of copy speed"
        found.append(Candidate(config, (timing.median_us,), why))
    return sorted(found, key=lambda c: c.rank), failed


def first_right(case: registry.Case, candidates: list[Candidate]) -> Candidate:
    """The best candidate whose numbers hold: compiled on a GPU, interpreted on a small twin elsewhere.

    RuntimeError where none's do.
    """
    (checked,) = [case] if check.on_gpu() else list(registry.cases([f"{case.op}/{case.name}"], small=True))
    for candidate in candidates:
        if check.run(checked, config=candidate.config).passed:
            return candidate
    raise RuntimeError(f"{case.op}/{case.name}: no candidate compiles and agrees with the reference")


def write(path: Path, chosen: list[tuple[registry.Case, Candidate]], by: str) -> list[str]:
    """Add what was chosen to the file of tuned sizes at `path`; returns a line for each entry left as it was.

    A measured entry is not replaced by a compiled one.
    """
    entries = tuned.read(path) if path.exists() else {}
    kept = []
    for case, candidate in chosen:
        keys = entries.setdefault(case.op, {})
        if by == "compiled" and keys.get(case.key, {}).get("by") == "measured":
            kept.append(f"{case.op} {case.key}: kept, it was measured")
            continue
        keys[case.key] = {
            "config": dataclasses.asdict(candidate.config),
            "by": by,
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
        }
    ordered = {op: dict(sorted(keys.items())) for op, keys in sorted(entries.items())}
    path.write_text(json.dumps(ordered, indent=1) + "\n")
    tuned.entries.cache_clear()
    return kept


def choose(
    case: registry.Case, candidates: Callable[[], tuple[list[Candidate], list[str]]], say: Callable[[str], None]
) -> Candidate:
    """The winner of a case, and a line about every candidate."""
    found, failed = candidates()
    best = first_right(case, found)
    say(f"{case.op}/{case.name} ({case.key})")
    for candidate in found:
        fields = " ".join(f"{k}={v}" for k, v in dataclasses.asdict(candidate.config).items())
        say(f"  {'*' if candidate is best else ' '} {fields}: {candidate.why}")
    for line in failed:
        say(f"    failed: {line}")
    return best
