"""The 27B's shapes on a CPU: a random artifact, written by streaming, run as it is stored.

    python benchmarks/cpu_27b.py [--layers 64] [--recipe q4] [--context 8192] [--dir D] [--keep] [--draft 3]
    python benchmarks/cpu_27b.py --layers 4 --compare        # logits and drafts against transformers' own layers too

Says tokens a second and the most memory that was resident. What lies in mapped files is counted with the rest: a step reads all of
it. The whole model takes 15 GB of disk and as much memory. Exit code 1: a step failed or something differs; 2: bad arguments or
too little room.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tree beside this script is what is checked, installed or not

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402

from benchmarks import check_shapes  # noqa: E402

TOKENS, PROMPT_TOKENS, MAX_NEW = 96, 64, 16
BYTES_A_LAYER, BYTES_BESIDE = 200 << 20, 3 << 30  # of a q4 artifact, rounded up
_console = Console(stderr=True, highlight=False)


def go_through(folder: Path, options: argparse.Namespace, steps: list[check_shapes.Step]) -> list[str]:
    """Appends the steps as they end; what differs, a line each."""
    artifact, extra = folder / "artifact", ["--miniature"] if options.miniature else []
    drawn = ("benchmarks.shapes.artifact", str(artifact), "--layers", str(options.layers), "--recipe", options.recipe, *extra)
    steps.append(check_shapes.run("random artifact", folder, *drawn))
    steps[-1] = dataclasses.replace(steps[-1], note=steps[-1].out.split(" bytes")[0] + " bytes")
    shapes = (str(options.context), str(options.draft), str(PROMPT_TOKENS), str(options.max_new))
    done = check_shapes.run(f"generate, draft {options.draft}", folder, "benchmarks.shapes.speak", str(artifact), *shapes)
    said = json.loads(done.out)
    note = (
        f"{said['tokens_per_s']:.2f} tokens/s; load {said['load_s']:.0f} s, first token of {PROMPT_TOKENS} after "
        f"{said['first_token_s']:.0f} s; {said['files'] / 1e9:.2f} GB in files"
    )
    steps.append(dataclasses.replace(done, note=note))
    if not options.compare:
        return []
    ids, engine, oracle = folder / "ids.npy", folder / "engine.npz", folder / "oracle.npz"
    np.save(ids, np.random.default_rng(0).integers(0, 1024, TOKENS))
    files = (str(artifact), str(ids), str(engine))
    steps.append(check_shapes.run("engine, 3 drafts", folder, "benchmarks.shapes.engine_side", *files, "float32", "6", "x"))
    steps.append(check_shapes.run("transformers", folder, "benchmarks.shapes.oracle", *files, str(oracle)))
    with np.load(engine) as ours, np.load(oracle) as theirs:
        return check_shapes.compare(dict(ours), dict(theirs), "float32")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="an empty directory to work in; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="leave the artifact there")
    parser.add_argument("--recipe", default="q4", help="q4, w8 or q4-quality")
    parser.add_argument("--layers", type=int, default=64, help="a multiple of 4")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--draft", type=int, default=0)
    parser.add_argument("--max-new", type=int, default=MAX_NEW)
    parser.add_argument("--compare", action="store_true", help="logits against transformers, layer by layer")
    parser.add_argument("--miniature", action="store_true", help="small widths and vocabulary")
    options = parser.parse_args(argv)
    if options.layers < 4 or options.layers % 4:
        return _refuse(f"--layers is {options.layers}, it must be a multiple of 4")
    if options.dir is not None and options.dir.exists() and (not options.dir.is_dir() or any(options.dir.iterdir())):
        return _refuse(f"--dir: {options.dir} is not an empty directory")
    made = options.dir is not None and not options.dir.exists()
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
    folder = options.dir or Path(tempfile.mkdtemp(prefix="cpu-27b-"))
    steps: list[check_shapes.Step] = []
    try:
        need, free = (2 if options.recipe != "q4" else 1) * room(options), shutil.disk_usage(folder).free
        if need > free:
            return _refuse(f"{folder}: {need:,} bytes are needed on this disk, {free:,} are free; choose another with --dir")
        broken = go_through(folder, options, steps)
    except check_shapes.Failed as error:
        broken = [str(error)]
    finally:
        if steps:
            check_shapes.show(steps)
        if not options.keep:
            check_shapes.clear(folder, remove=options.dir is None or made)
    for line in broken:
        _console.print(line, style="bold red", markup=False, soft_wrap=True)
    return 1 if broken else 0


def room(options: argparse.Namespace) -> int:
    return (1 << 28) if options.miniature else options.layers * BYTES_A_LAYER + BYTES_BESIDE


def _refuse(message: str) -> int:
    _console.print(f"error: {message}", style="bold red", markup=False, soft_wrap=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
