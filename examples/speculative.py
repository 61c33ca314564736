"""Speculative decoding side by side with plain decoding: the same text in fewer rounds.

    python examples/speculative.py --draft 3

A round with drafts takes longer than one without, and says more: what it gains is the ratio of the two decode times.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ninfer_jax import Completion, Engine, EngineConfig, SamplingParams
from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.engine import allocator


def main(
    prompt: Annotated[str, typer.Argument(help="Raw text to continue.")] = "class Queue:\n    def __init__(self",
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory with an MTP head; default: the bundled model.")] = None,
    draft: Annotated[int, typer.Option(min=1, max=5, help="Tokens the MTP head drafts a round.")] = 3,
    max_new: Annotated[int, typer.Option(help="Tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the draws; the same for both.")] = 0,
    context: Annotated[int, typer.Option(help="Tokens that prompt and answer may have together.")] = 2048,
) -> None:
    """Generate with drafts and without, and compare."""
    params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new, ignore_eos=True)
    allocator.reserve(None)  # of a GPU all that is free: the second engine is larger than the first
    print("two engines; a first start compiles its programs: seconds on a CPU, minutes for the 27B", file=sys.stderr)
    plain, drafted = (complete(model or tiny_path(), k, context, prompt, params) for k in (0, draft))

    table = Table("", "plain", f"draft {draft}")
    for name, value in {
        "tokens": lambda c: str(len(c.tokens)),
        "rounds": lambda c: str(c.stats.rounds),
        "tokens a round": lambda c: f"{(len(c.tokens) - 1) / max(c.stats.rounds, 1):.2f}",
        "drafts accepted": lambda c: f"{c.stats.accepted} of {c.stats.drafted}" if c.stats.drafted else "-",
        "decode seconds": lambda c: f"{c.stats.decode_s:.2f}",
    }.items():
        table.add_row(name, value(plain), value(drafted))
    console = Console(highlight=False, emoji=False)
    console.print(plain.text, style="dim", markup=False)
    console.print(table)
    console.print("Same tokens." if plain.tokens == drafted.tokens else "The tokens differ.")


def complete(path: Path, draft: int, context: int, prompt: str, params: SamplingParams) -> Completion:
    """One completion by an engine of its own, after one that is not counted (first calls touch memory for the first time)."""
    engine = Engine.load(path, EngineConfig(context=context, draft=draft))
    engine.generate(prompt, params)
    return engine.generate(prompt, params)


if __name__ == "__main__":
    typer.run(main)
