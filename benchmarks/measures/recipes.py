"""Measures of recipes: what each role's bits do to the answers, and what each recipe as a whole does.

Every artifact is made by the real conversion of the bundled model into a temporary directory and loaded like any other.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from measures.engines import REFERENCE, STRIDE, WINDOW, accepted, both_texts, console, track
from ninfer_jax import Engine, EngineConfig
from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.config import RECIPES, Recipe, preset
from ninfer_jax.engine.convert import convert
from ninfer_jax.evaluate import divergence, perplexity
from ninfer_jax.evaluate.forced import log_softmax
from ninfer_jax.model import TextModel, parameters_of
from pallas_kernels.kv_codecs import FORMATS

PLAIN = Recipe("bf16", {})  # every weight as the checkpoint has it
Q4, W8 = RECIPES["q4"], RECIPES["w8"]
ROLES = tuple(Q4.formats)
FOUR = Q4.formats["mlp"]  # what q4 has for the bulk of the weights
GEOMETRY = "qwen3_8_27b"


def by_role(options: argparse.Namespace, plays: str, code: str) -> list[dict]:
    """Each role alone in 4 and in 8 bits; and q4 with one role in the other width. KL against the checkpoint's own weights.

    The MTP head has no part in the next token's distribution: its rows count accepted drafts instead."""
    rows, bits = [], {4: dict.fromkeys(ROLES, FOUR), 8: W8.formats}
    with _shared_programs():
        with _engine(PLAIN, draft=3) as engine:
            ids = both_texts(engine, options, plays, code)
            prompts = engine.tokenizer.encode(plays) + engine.tokenizer.encode(code)
            expected = _logprobs(engine, ids)
            rows.append({"role": "mtp", "bits": 16, "in": "alone", **accepted(engine, prompts, options.prompts)})

        def measured(role: str, width: int, within: str, recipe: Recipe) -> dict:
            with _engine(recipe, draft=3) as engine:
                console.print(f"{role} in {width} bits, {within}: done")
                about = {"role": role, "bits": width, "in": within}
                if role == "mtp":
                    return {**about, **accepted(engine, prompts, options.prompts)}
                return {**about, **_divergence(expected, _logprobs(engine, ids), ids)}

        for role in ROLES:
            for width, formats in bits.items():
                rows.append(measured(role, width, "alone", Recipe(role, {role: formats[role]})))
        rows.append(measured("all", 4, "q4", Q4))
        for role in (r for r in ROLES if r != "mtp"):
            width = 4 if Q4.formats[role].bits == 8 else 8
            changed = dataclasses.replace(Q4, formats={**Q4.formats, role: bits[width][role]})
            rows.append(measured(role, width, "q4", changed))
    held = {width: weight_bytes(Recipe("all", formats)) for width, formats in bits.items()}
    return [{**row, **{f"bytes{width}": sizes.get(row["role"]) for width, sizes in held.items()}} for row in rows]


def by_recipe(options: argparse.Namespace, plays: str, code: str) -> list[dict]:
    """Each recipe with each KV format: loss. With bf16 pages also KL against bf16 weights, and accepted drafts."""
    rows, first, expected = [], None, None
    formats = (REFERENCE, *(kv for kv in FORMATS if kv not in (REFERENCE, "f32")))
    with _shared_programs():
        for recipe in (PLAIN, *sorted(RECIPES.values(), key=lambda r: -sum(weight_bytes(r).values()))):
            with _artifact(recipe) as path:
                for kv in formats:
                    whole = kv == REFERENCE
                    engine = Engine.load(path, EngineConfig(context=WINDOW, slots=1, kv=kv, draft=3 if whole else 0))
                    ids = both_texts(engine, options, plays, code)
                    nats = -perplexity.token_logprobs(engine, ids, WINDOW, STRIDE)
                    first = nats if first is None else first
                    above = nats - first
                    row = {
                        "recipe": recipe.name,
                        "kv": kv,
                        "nats_per_token": float(nats.mean()),
                        "above": float(above.mean()),
                        "above_error": float(above.std(ddof=1) / len(above) ** 0.5),
                    }
                    if whole:
                        logprobs = _logprobs(engine, ids)
                        expected = logprobs if expected is None else expected
                        prompts = engine.tokenizer.encode(plays) + engine.tokenizer.encode(code)
                        row |= _divergence(expected, logprobs, ids)
                        row["bytes"] = sum(weight_bytes(recipe).values())
                        row["drafts"] = accepted(engine, prompts, options.prompts)
                    rows.append(row)
                    console.print(f"{recipe.name}, {kv}: done")
    return rows


def weight_bytes(recipe: Recipe) -> dict[str, int]:
    """Bytes of the 27B's weights by role (array shapes)."""
    found: dict[str, int] = {}
    for spec in parameters_of(TextModel(preset(GEOMETRY), jnp.bfloat16, mtp=True, recipe=recipe)):
        size = sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in spec.arrays.values())
        found[spec.role] = found.get(spec.role, 0) + size
    return found


def _divergence(expected: np.ndarray, own: np.ndarray, ids: list[int]) -> dict:
    found = asdict(divergence.compare(REFERENCE, 0, expected, own, ids[1:]))
    return {key: value for key, value in found.items() if key not in ("kv", "depth")}


def _logprobs(engine: Engine, ids: list[int]) -> np.ndarray:
    """float32 `[len(ids) - 1, ids]`: after each token, in windows that begin anew, through the prefill program."""
    with track("scoring") as tell:
        parts = []
        for start in range(0, len(ids) - 1, WINDOW):
            parts.append(log_softmax(engine.score(ids[start : start + WINDOW]), engine.tokenizer.vocab_size))
            tell(start, len(ids))
    return np.concatenate(parts)[: len(ids) - 1]


@contextmanager
def _engine(recipe: Recipe, draft: int) -> Iterator[Engine]:
    with _artifact(recipe) as path:
        yield Engine.load(path, EngineConfig(context=WINDOW, slots=1, kv=REFERENCE, draft=draft))


@contextmanager
def _artifact(recipe: Recipe) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield convert(tiny_path(), Path(folder) / "made", recipe).path


@contextmanager
def _shared_programs() -> Iterator[None]:
    """Engines that differ in their weights alone are compiled once."""
    with tempfile.TemporaryDirectory() as folder:
        before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
        yield
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
