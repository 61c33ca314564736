"""Judgements on NVIDIA cards, by what nvidia-smi says of them."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ninfer_jax.doctor.finding import FINE, NOTE, WRONG, Finding, gib
from ninfer_jax.doctor.inputs import CARD_FIELDS, PROCESS_FIELDS, Inputs

# The least driver that serves a plugin's CUDA: docs/setup.md.
DRIVERS = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
NEED = 19.5 * 2**30  # bytes of the 27B with its whole context (compiled: docs/memory.md)
MIB = 2**20


@dataclass(frozen=True)
class Card:
    """A card as nvidia-smi describes it; None for what it does not tell. Memory in bytes, power in watts."""

    index: int
    name: str
    uuid: str
    driver: str
    total: int | None
    used: int | None
    free: int | None
    display: bool | None
    persistence: bool | None
    power: float | None
    default_power: float | None
    generation: int | None
    width: int | None
    widest: int | None
    celsius: int | None


def parse_cards(text: str) -> list[Card]:
    """The cards in what nvidia-smi printed. ValueError for a line that is none."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) != len(CARD_FIELDS):
            raise ValueError(f"{len(row)} fields in a line of nvidia-smi, {len(CARD_FIELDS)} were asked for")
        index, name, uuid, driver, *rest = (value.strip() for value in row)
        total, used, free = (None if (n := _number(v)) is None else int(n * MIB) for v in rest[:3])
        display, persistence = (_switch(v) for v in rest[3:5])
        power, default = (_number(v) for v in rest[5:7])
        generation, width, widest, celsius = (None if (n := _number(v)) is None else int(n) for v in rest[7:])
        found.append(
            Card(
                int(index),
                name,
                uuid,
                driver,
                total,
                used,
                free,
                display,
                persistence,
                power,
                default,
                generation,
                width,
                widest,
                celsius,
            )
        )
    return found


def parse_processes(text: str) -> list[tuple[str, int, int | None]]:
    """(card's UUID, process id, bytes or None) of each process that computes on a card; other lines are passed."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(PROCESS_FIELDS) and row[1].strip().isdecimal():
            size = _number(row[2])
            found.append((row[0].strip(), int(row[1]), None if size is None else int(size * MIB)))
    return found


def judge_card(inputs: Inputs) -> list[Finding]:
    """Findings about driver, plugin and each card; one that says so where there is no driver."""
    plugins = [name for name in DRIVERS if name in inputs.versions]
    if not inputs.cards:
        return [_no_card(inputs, plugins)]
    try:
        cards = parse_cards(inputs.cards)
    except ValueError as error:
        return [
            Finding(
                "card",
                NOTE,
                f"nvidia-smi says something that is not understood ({error})",
                "report this: `ninfer-jax doctor --report`",
            )
        ]
    if not cards:
        return [_no_card(inputs, plugins)]
    processes = parse_processes(inputs.processes or "")
    found = [_driver(inputs, cards[0], plugins)]
    for card in cards:
        found += _one(card, [p for p in processes if p[0] == card.uuid], inputs)
    if len(cards) > 1:
        found.append(
            Finding(
                "cards", NOTE, f"{len(cards)} cards, of which an engine uses the first", "CUDA_VISIBLE_DEVICES=1 chooses another"
            )
        )
    return found


def _no_card(inputs: Inputs, plugins: list[str]) -> Finding:
    facts = {"driver": None, "plugins": plugins}
    if inputs.smi_error:
        said = f"nvidia-smi fails: {inputs.smi_error}"
        advice = "restart the machine if the driver was just updated, else install it again"
        return Finding("card", WRONG, said, advice, facts)
    if plugins:
        advice = "install NVIDIA's driver" + (", on the side of Windows" if inputs.wsl else "") + ", or leave it: the CPU is used"
        return Finding("card", NOTE, f"{', '.join(plugins)} is installed, but no driver answers", advice, facts)
    return Finding("card", FINE, "no NVIDIA driver: the CPU is used", "", facts)


def _driver(inputs: Inputs, card: Card, plugins: list[str]) -> Finding:
    major = int(found[0]) if (found := re.match(r"\d+", card.driver)) else 0
    best = next((name for name in reversed(DRIVERS) if major >= DRIVERS[name]), None)
    extra = best and best.removeprefix("jax-").removesuffix("-plugin")
    facts = {"driver": card.driver, "plugins": plugins}
    text = f"driver {card.driver}, {', '.join(f'{p} {inputs.versions[p]}' for p in plugins) or 'no CUDA plugin of JAX'}"
    if best is None:
        return Finding("driver", WRONG, text, f"update the driver to {DRIVERS['jax-cuda12-plugin']} or newer", facts)
    if not plugins:
        return Finding("driver", WRONG, text, f"the card is not used without one: pip install 'ninfer-jax[{extra}]'", facts)
    if len(plugins) > 1:
        other = next(p for p in plugins if p != best)
        return Finding("driver", WRONG, text, f"two plugins get in each other's way: pip uninstall {other}", facts)
    if major < DRIVERS[plugins[0]]:
        advice = (
            f"{plugins[0]} needs driver {DRIVERS[plugins[0]]} or newer: update it, or pip install 'ninfer-jax[{extra}]' instead"
        )
        return Finding("driver", WRONG, text, advice, facts)
    if "jax" in inputs.versions and inputs.versions[plugins[0]] != inputs.versions["jax"]:
        return Finding(
            "driver", WRONG, text, f"JAX is {inputs.versions['jax']}: pip install '{plugins[0]}=={inputs.versions['jax']}'", facts
        )
    return Finding("driver", FINE, text, "", facts)


def _one(card: Card, processes: list[tuple[str, int, int | None]], inputs: Inputs) -> Iterator[Finding]:
    name = f"card {card.index}"
    held = sum(size or 0 for _, _, size in processes)
    facts = {
        "card": card.name,
        "total_bytes": card.total,
        "free_bytes": card.free,
        "processes": len(processes),
        "held_bytes": held,
        "display": card.display,
        "persistence": card.persistence,
        "power_w": card.power,
        "default_power_w": card.default_power,
        "pcie_width": card.width,
        "pcie_widest": card.widest,
        "pcie_generation": card.generation,
        "celsius": card.celsius,
    }
    text = card.name
    if card.total and card.free is not None:
        text += f", {gib(card.free)} of {gib(card.total)} free"
    yield Finding(name, FINE, text, "", facts)
    if card.total and card.free is not None and card.total >= NEED > card.free:
        sizes = Counter({pid: size or 0 for _, pid, size in processes})
        who = ", ".join(f"process {pid}" + (f" ({gib(size)})" if size else "") for pid, size in sizes.most_common(5))
        advice = f"end what holds it: {who}" if who else "see `nvidia-smi` for what holds it"
        yield Finding(f"{name}: memory", NOTE, "too little is free for the 27B with its whole context (19.4 GiB, compiled)", advice)
    if card.display:
        advice = "connect the display to the processor's graphics; until then a smaller --context leaves room"
        yield Finding(f"{name}: display", NOTE, "a display hangs on it and takes memory that comes and goes", advice)
    if card.persistence is False and not inputs.wsl:
        advice = "sudo nvidia-smi -pm 1, or the service nvidia-persistenced"
        yield Finding(
            f"{name}: persistence", NOTE, "off: the first use after a pause waits for the driver to start the card", advice
        )
    if card.power and card.default_power and card.power < 0.95 * card.default_power:
        text = f"limited to {card.power:.0f} W of {card.default_power:.0f} W"
        yield Finding(
            f"{name}: power", NOTE, text, f"measurements are of that limit; sudo nvidia-smi -pl {card.default_power:.0f} lifts it"
        )
    if card.width and card.widest and card.width < card.widest:
        text = f"{card.width} lanes of PCIe of {card.widest}: weights arrive at that part of the speed, answers do not wait for it"
        yield Finding(f"{name}: PCIe", NOTE, text, "another slot of the board may have all lanes")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        return None


def _switch(text: str) -> bool | None:
    return {"enabled": True, "disabled": False}.get(text.strip().lower())
