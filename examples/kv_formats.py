"""The KV formats side by side: what a token costs, and what the format does to the model's predictions.

    python examples/kv_formats.py

Two measures against f32 pages: how many greedy tokens agree before the first difference, and the mean KL divergence of
the next-token distributions over a given text (in nats, from f32 to the format; every position sees the same past).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.checkpoints import tiny_path
from pallas_kernels.kv_codecs import FORMATS

TEXT = """KING.
What is it that you would? Speak, and be brief.

SECOND LORD.
My gracious liege, the men that hold the northern gate have sent to know your pleasure; they have stood three nights in
the rain, and their captain says they will not stand a fourth without bread.

KING.
Then let them have it from my own table. A king who dines while his walls are hungry will shortly have neither.
"""


def main(
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory; default: the bundled model.")] = None,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 file to score; default: a short scene.")] = None,
    kv: Annotated[
        list[str] | None, typer.Option(help="A format to compare with f32; may be given several times. Default: all.")
    ] = None,
    max_new: Annotated[int, typer.Option(help="Greedy tokens to compare.")] = 200,
    context: Annotated[int, typer.Option(help="Tokens the text, and prompt and answer, may have.")] = 1024,
) -> None:
    """Compare KV formats."""
    passage = text.read_text("utf-8") if text else TEXT
    reference = None
    table = Table("format", "bytes a token", "greedy tokens agreeing", "mean KL (nats)")
    print("an engine for each format; a first start compiles its programs: seconds on a CPU, minutes for the 27B", file=sys.stderr)
    for name in ("f32", *(kv or FORMATS[1:])):
        engine = Engine.load(model or tiny_path(), EngineConfig(context=context, kv=name, slots=1, draft=0))
        ids = engine.tokenizer.encode(passage)
        answer = engine.generate(ids[: len(ids) // 2], SamplingParams(temperature=0, max_new_tokens=max_new, ignore_eos=True))
        logprobs = log_softmax(engine.score(ids)[:, : engine.tokenizer.vocab_size])
        if reference is None:
            reference = answer.tokens, logprobs
        tokens, p = reference
        agreeing = next((n for n, (a, b) in enumerate(zip(tokens, answer.tokens, strict=True)) if a != b), len(tokens))
        kl = np.mean(np.sum(np.exp(p) * (p - logprobs), axis=1))
        table.add_row(name, str(engine.kv_bytes_per_token), f"{agreeing} of {len(tokens)}", f"{kl:.2e}")
        del engine  # before the next one is loaded: two models may not fit on the device
    Console().print(table)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


if __name__ == "__main__":
    typer.run(main)
