"""docs/defaults.md says what is chosen."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import defaults_table  # noqa: E402

from ninfer_jax.planning.choose import CARD_ROWS, CPU_ROWS  # noqa: E402
from ninfer_jax.planning.profiles import profiles  # noqa: E402

TEXT = (ROOT / "docs/defaults.md").read_text("utf-8")


def test_the_table_is_what_the_function_gives() -> None:
    between = TEXT.partition(defaults_table.BEGIN + "\n")[2].partition(defaults_table.END)[0]
    assert between == defaults_table.table()


def listed(heading: str) -> list[str]:
    """The numbered lines under a heading."""
    under = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert under, heading
    return re.findall(r"^\d+\. (.*)$", under[1], re.MULTILINE)


def test_the_lists_in_words_are_the_lists() -> None:
    """A line for each row, those that differ by the context alone together."""
    for heading, rows in (("On a card", CARD_ROWS), ("On a CPU", CPU_ROWS)):
        kinds = list(dict.fromkeys((row.recipe, row.kv, row.slots, row.context is None, row.draft, row.chunk) for row in rows))
        lines = listed(heading)
        assert len(lines) == len(kinds)
        for line, (recipe, kv, slots, whole, draft, chunk) in zip(lines, kinds, strict=True):
            assert f"`{recipe or 'none'}`" in line and f"`{kv}`" in line and f"K = {draft}" in line
            assert ("four slots" in line) == (slots == 4) and ("whole context" in line) == whole
            assert ("chunks of 256" in line) == (chunk == 256)


def test_every_profile_is_named() -> None:
    assert all(f"`{name}`" in TEXT for name in profiles(Path("nowhere.toml")))
