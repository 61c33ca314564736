"""The shortest way from a checkpoint to text: load, stream, look at the completion.

python examples/generate.py "HAMLET.\nTo be, or not to be"
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.checkpoints import tiny_path


def main(
    prompt: Annotated[str, typer.Argument(help="Raw text to continue.")] = "ROMEO.\nBut soft! what light through yonder ",
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory; default: the bundled model.")] = None,
    max_new: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    context: Annotated[int, typer.Option(help="Tokens that prompt and answer may have together.")] = 2048,
) -> None:
    """Continue a text."""
    print("loading; a first start compiles its programs: seconds on a CPU, minutes for the 27B", file=sys.stderr)
    engine = Engine.load(model or tiny_path(), EngineConfig(context=context))
    # Top-k, top-p and the like are the checkpoint's own unless given here.
    params = engine.default_params(max_new_tokens=max_new, temperature=temperature, seed=seed)

    print(prompt, end="", flush=True)
    completion = None
    for piece in engine.stream(prompt, params):
        print(piece.text, end="", flush=True)
        completion = piece.completion
    print()

    stats = completion.stats
    print(
        f"\n{completion.prompt_tokens} prompt tokens in {stats.prefill_s:.2f} s, {len(completion.tokens)} more "
        f"in {stats.decode_s:.2f} s on {engine.device}; finish reason: {completion.finish_reason}"
    )


if __name__ == "__main__":
    typer.run(main)
