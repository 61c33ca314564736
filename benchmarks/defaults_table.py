"""The table of docs/defaults.md: what `auto` comes to for two models on cards of six sizes, with 0, 1 and 2 GiB taken by others.

    python benchmarks/defaults_table.py [--write]      # without --write: print it

Needs neither a card nor a compiler; `tests/planning/test_defaults_table.py` compares the document with what this makes.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ninfer_jax.config import EngineConfig
from ninfer_jax.planning.budget import Place, card
from ninfer_jax.planning.choose import Choice, choose
from ninfer_jax.planning.known import known_of

DOCUMENT = Path(__file__).parent.parent / "docs/defaults.md"
BEGIN, END = "<!-- made by benchmarks/defaults_table.py -->", "<!-- end -->"
MODELS = ("qwen3_8_27b", "tiny")
TAKEN = (0, 1, 2)
# Cards by their data sheets; for 16 and 48 GB, of which no card is described here, what a card of that size reports at least.
CARDS: dict[str, tuple[str, int | None]] = {
    "16 GB": ("16 GB", 16_700_000_000),
    "24 GB (RTX 4090)": ("rtx4090", None),
    "32 GB (RTX 5090)": ("rtx5090", None),
    "48 GB": ("48 GB", 50_600_000_000),
    "80 GB (A100)": ("a100", None),
    "141 GB (H200)": ("h200", None),
}
HEADER = ("model", "card", "taken", "recipe", "KV", "slots", "context", "K", "needed", "free", "workspace")


def place(name: str, taken: int) -> Place:
    known, total = CARDS[name]
    return card(known, taken << 30, total)


def chosen(model: str, name: str, taken: int) -> Choice:
    known = known_of(model)
    return choose(known.model, EngineConfig(), place(name, taken), known.asked(None, "cuda"), known.drafts)


def cells(model: str, name: str, taken: int, choice: Choice) -> tuple[str, ...]:
    config, free = choice.config, choice.place.free or 0
    recipe = choice.recipe.name if choice.recipe else "none"
    shape = recipe, f"`{config.kv}`", f"{config.slots}", f"{config.context:,}", f"{config.draft}"
    if not choice.fits:
        shape = ("nothing fits", *[""] * 4)
    need = f"{choice.budget.total / 2**30:.2f}"
    return model, name, f"{taken} GiB", *shape, need, f"{free / 2**30:.2f}", choice.budget.workspace.how


def table() -> str:
    """The lines between the document's two marks. What is the same for every number of `TAKEN` is one line."""
    rows: list[tuple[str, ...]] = []
    for model in MODELS:
        for name in CARDS:
            found = [cells(model, name, taken, chosen(model, name, taken)) for taken in TAKEN]
            if len({(row[3:9], row[10]) for row in found}) == 1:
                frees = f"{found[-1][9]} to {found[0][9]}"
                found = [(*found[0][:2], f"{TAKEN[0]} to {TAKEN[-1]} GiB", *found[0][3:9], frees, found[0][10])]
            rows += found
    lines = [HEADER, ("---", "---", "---", "---", "---", "---:", "---:", "---:", "---:", "---:", "---"), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"into {DOCUMENT.name}")
    if not parser.parse_args().write:
        print(table(), end="")
        return
    text = DOCUMENT.read_text("utf-8")
    DOCUMENT.write_text(re.sub(f"({BEGIN}\n).*({END})", lambda m: f"{m[1]}{table()}{m[2]}", text, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    main()
