"""What the measures share: engines of the bundled model, the collapsed code in their pages, progress."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from unittest import mock

import collapsed_e8
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.evaluate import acceptance
from pallas_kernels.kv_append import reference as kv_append
from pallas_kernels.kv_codecs import FORMATS

COLLAPSED = "collapsed"
REFERENCE = "bf16"
ORDER = (REFERENCE, *(f for f in FORMATS if f != REFERENCE), COLLAPSED)  # the reference first: the others are compared with it
CONTEXT, WINDOW, STRIDE = 8192, 2048, 1024
console = Console(stderr=True)


@contextmanager
def collapsed_pages() -> Iterator[None]:
    """While programs are traced in here, keys and values go through the collapsed code before they reach the pages."""
    append = kv_append.append

    def by(code):
        def on_host(x: np.ndarray) -> np.ndarray:
            return collapsed_e8.rotate64(code(np.asarray(x))).astype(np.float32)  # back from the rotated basis

        return lambda x: jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, jnp.float32), x)

    keys, values = by(collapsed_e8.collapsed_e8_keys), by(collapsed_e8.absmax_int4)

    def through(pool, k, v, table, positions, format):
        return append(pool, keys(k), values(v), table, positions, format)

    with mock.patch.object(kv_append, "append", through):
        yield


def load(kv: str, draft: int) -> Engine:
    return Engine.load(tiny_path(), EngineConfig(context=CONTEXT, slots=1, kv="f32" if kv == COLLAPSED else kv, draft=draft))


def both_texts(engine: Engine, options: argparse.Namespace, plays: str, code: str) -> list[int]:
    """`--loss-tokens` tokens, half plays and half code."""
    half = options.loss_tokens // 2
    return engine.tokenizer.encode(plays)[:half] + engine.tokenizer.encode(code)[:half]


def accepted(engine: Engine, ids: list[int], prompts: int) -> dict:
    with track("continuations") as tell:
        return asdict(acceptance.draft_acceptance(engine, acceptance.cut_prompts(ids, prompts, 200), 128, tell))


@contextmanager
def track(what: str) -> Iterator[Callable[[int, int], None]]:
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
