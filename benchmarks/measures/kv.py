"""Measures of KV formats: loss, kld, acceptance and needle, one engine a format; copy, drafts, drift and noise."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import asdict

import collapsed_e8
import jax.numpy as jnp
import numpy as np

from measures import repeats
from measures.engines import COLLAPSED, ORDER, STRIDE, WINDOW, accepted, both_texts, collapsed_pages, console, load, track
from ninfer_jax.evaluate import divergence, drift, needle, perplexity
from pallas_kernels.kv_codecs import FORMATS, decode, encode

BY_FORMAT = ("loss", "kld", "acceptance", "needle")
LENGTHS, DEPTHS = (256, 1024), (0.0, 0.25, 0.5, 0.75, 1.0)


def by_format(options: argparse.Namespace, plays: str, code: str, wanted: list[str]) -> dict[str, list[dict]]:
    """Those of BY_FORMAT that are wanted."""
    found: dict[str, list[dict]] = {name: [] for name in wanted}
    expected = None
    for kv in ORDER if wanted else ():
        with collapsed_pages() if kv == COLLAPSED else nullcontext():
            engine = load(kv, draft=3 if "acceptance" in wanted else 0)
            ids, code_ids = (engine.tokenizer.encode(text) for text in (plays, code))
            if "loss" in wanted:
                both = both_texts(engine, options, plays, code)
                found["loss"].append({**asdict(perplexity.text_loss(engine, both, WINDOW, STRIDE)), "kv": kv})
            if "kld" in wanted:
                with track(f"{kv}: decode steps") as tell:
                    rows = divergence.decode_logprobs(engine, ids, options.depths, options.tokens, tell)
                expected = expected or rows
                for depth, ref, own in zip(options.depths, expected, rows, strict=True):
                    targets = ids[depth + 1 : depth + 1 + options.tokens]
                    found["kld"].append(asdict(divergence.compare(kv, depth, ref, own, targets)))
            if "acceptance" in wanted:
                found["acceptance"].append({**accepted(engine, ids + code_ids, options.prompts), "kv": kv})
            if "needle" in wanted:
                with track(f"{kv}: needles") as tell:
                    cells = needle.needle_grid(engine, ids, LENGTHS, DEPTHS, options.trials, 0, False, tell)
                found["needle"] += [{"kv": kv, **asdict(cell)} for cell in cells]
        console.print(f"{kv}: {', '.join(wanted)} done")
    return found


def by_distance(options: argparse.Namespace, plays: str) -> list[dict]:
    """Repeats in every format of the engine; the collapsed code, which runs on the host, would take longer than all of them."""
    rows = []
    for kv in ORDER[:-1]:
        engine = load(kv, 0)
        with track(f"{kv}: repeats") as tell:
            found = repeats.measure(engine, engine.tokenizer.encode(plays), options.repeats, tell)
        rows += [{"kv": kv, **asdict(repeat)} for repeat in found]
        console.print(f"{kv}: repeats done")
    return rows


def by_draft(options: argparse.Namespace, plays: str, code: str) -> list[dict]:
    rows = []
    for draft in range(1, 6):
        engine = load("f32", draft)
        rows.append(accepted(engine, engine.tokenizer.encode(plays) + engine.tokenizer.encode(code), options.prompts))
        console.print(f"{draft} drafts a round: done")
    return rows


def of_drift(options: argparse.Namespace, plays: str) -> list[dict]:
    engine = load("f32", 0)
    with track("drift") as tell:
        points = drift.state_drift(engine, engine.tokenizer.encode(plays), options.drift_tokens, 512, "float64", tell)
    return [asdict(point) for point in points]


def codec_noise(vectors: int = 4096, dims: int = 256) -> list[dict]:
    """dB of keys and values, Gaussian and Student t with 3 degrees of freedom, seed 7 each."""
    rows = []
    for kv in (*FORMATS[1:], COLLAPSED):
        row = {"kv": kv}
        for name in ("gaussian", "t3"):
            drawn = np.random.default_rng(7)
            x = drawn.standard_normal((vectors, dims)) if name == "gaussian" else drawn.standard_t(3, (vectors, dims))
            x = x.astype(np.float32)
            for part in "kv":
                if kv == COLLAPSED:
                    y = collapsed_e8.rotate64((collapsed_e8.collapsed_e8_keys if part == "k" else collapsed_e8.absmax_int4)(x))
                else:
                    y = np.asarray(decode(encode(jnp.asarray(x), kv, part), kv, part))
                errors = x - y.astype(np.float64)
                row[f"{name}_{part}"] = float(10 * np.log10((x.astype(np.float64) ** 2).sum() / (errors**2).sum()))
        rows.append(row)
    return rows
