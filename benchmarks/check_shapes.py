"""The 27B's widths and vocabulary from end to end on a CPU: checkpoint, convert, plan, generate, logits against transformers.

    make check-shapes          # or: python benchmarks/check_shapes.py [--dir D] [--keep] [--recipe w8] [--layers 4]

Writes a random BF16 checkpoint (3 delta-rule layers, 1 attention layer, MTP layer: 9 GB), converts it, lets `generate` speak
with and without drafts, and compares the engine's logits and the MTP head's first drafts with what transformers' own layers
make of the artifact's numbers. Every step is a process of its own, its peak is the most memory that it had resident.
`--miniature` takes the same way with small widths in a minute. Exit code 1: a step failed or something differs, see the last
lines; 2: bad arguments, or too little room.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tree beside this script is what is checked, installed or not

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.shapes import checkpoint  # noqa: E402
from ninfer_jax import tables  # noqa: E402
from ninfer_jax.models import kept  # noqa: E402

TOKENS, MAX_NEW, SEED = 96, 6, 0
PROMPT = "The quality of mercy is not strained"
CONVERT_PEAK = 6 << 30  # bytes that docs/artifact.md allows a conversion
# Root mean square of the difference over that of the logits. float32: sums of 5,120 to 17,408 products in two orders.
# bfloat16: some forty roundings of 2^-9 one after another, weights included, are about 1.2 % (modelled).
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}
# A single column of the head, of 96 values, may be so much worse than the mean of all.
WORST_COLUMN = 10
_console = Console(stderr=True, highlight=False)


class Failed(Exception):
    """A step that did not end well; one line."""


@dataclasses.dataclass(frozen=True)
class Step:
    """seconds on the wall; peak: bytes resident; out: what it printed to stdout; note: for the table."""

    name: str
    seconds: float
    peak: int
    out: str
    note: str = ""


def run(name: str, folder: Path, *command: str) -> Step:
    """`python command...` to its end. Failed with its last line where it fails."""
    logs = folder / "stdout.txt", folder / "stderr.txt"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    started = time.perf_counter()
    with logs[0].open("w") as out, logs[1].open("w") as err, _console.status(name):
        child = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=environment, stdout=out, stderr=err)
        _, status, usage = os.wait4(child.pid, 0)  # unlike getrusage, of this child alone
    child.returncode = os.waitstatus_to_exitcode(status)
    step = Step(name, time.perf_counter() - started, usage.ru_maxrss << 10, logs[0].read_text())
    if child.returncode:
        lines = logs[1].read_text().strip().splitlines() or ["no message (killed for memory?)"]
        raise Failed(f"{name}: exit {child.returncode}: {lines[-1]}")
    return step


def go_through(folder: Path, options: argparse.Namespace, steps: list[Step]) -> list[str]:
    """All steps in `folder`, appended to `steps` as they end; what differs, a line each."""
    source, artifact = folder / "checkpoint", folder / "artifact"
    ids, engine, oracle = folder / "ids.npy", folder / "engine.npz", folder / "oracle.npz"
    config = checkpoint.text_config(options.layers, options.miniature)
    size = checkpoint.nbytes(config)

    def step(name: str, *command: str, note: str = "") -> Step:
        done = run(name, folder, *command)
        steps.append(dataclasses.replace(done, note=note.format(rate=size / done.seconds / 1e6)))
        return done

    extra = ["--miniature"] if options.miniature else []
    drawn = ("benchmarks.shapes.checkpoint", str(source), "--layers", str(options.layers), *extra)
    step("checkpoint", *drawn, note=f"{kept.size(size)} in BF16")
    cli = "ninfer_jax.cli.main"
    conversion = (cli, "convert", str(source), str(artifact), "--recipe", options.recipe)
    converted = step(f"convert {options.recipe}", *conversion, note="{rate:.0f} MB/s of BF16")
    shapes = ["--context", "256", "--prefill-chunk", "64", "--dtype", options.dtype, "--kv", "f32"]
    asked = ("plan", str(artifact), "--target", "cpu", "--draft", "3", *shapes, "--compiled", "--json")
    planned = json.loads(step("plan", cli, *asked).out)
    need = planned["total_bytes"] - planned["executables_bytes"]
    steps[-1] = dataclasses.replace(steps[-1], note=f"{kept.size(need)} for {options.dtype} on a CPU")
    request = ("--prompt", PROMPT, "--greedy", "--max-new", str(MAX_NEW), "--json")
    plain = json.loads(step("generate, no drafts", cli, "generate", str(artifact), *request, *shapes, "--draft", "0").out)["tokens"]
    named = min(config["vocab_size"], 1024 if options.miniature else 248_077)
    np.save(ids, np.random.default_rng(SEED).integers(0, named, TOKENS))
    files = (str(artifact), str(ids), str(engine))
    step("engine, 3 drafts", "benchmarks.shapes.engine_side", *files, options.dtype, str(MAX_NEW), PROMPT)
    with np.load(engine) as timed:
        parts = ", ".join(f"{name[2:]} {timed[name]:.0f} s" for name in timed if name[:2] == "s_")
        steps[-1] = dataclasses.replace(steps[-1], note=parts)
    step("transformers", "benchmarks.shapes.oracle", *files, str(oracle))
    with np.load(engine) as ours, np.load(oracle) as theirs:
        broken = compare(dict(ours), dict(theirs), options.dtype)
        if (drafted := ours["tokens"].tolist()) != plain:
            broken.append(f"greedy tokens with drafts {drafted}, without {plain}")
    if converted.peak > CONVERT_PEAK:
        broken.append(f"convert had {converted.peak:,} bytes resident, {CONVERT_PEAK:,} are allowed")
    return broken


def compare(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], dtype: str) -> list[str]:
    """What differs between the engine's and transformers' numbers, a line each."""
    broken, allowed, expected = [], TOLERANCE[dtype], theirs["logits"]
    difference, size = ours["logits"] - expected, np.sqrt(np.mean(np.square(expected)))
    whole = np.sqrt(np.mean(np.square(difference))) / size
    by_column = np.sqrt(np.mean(np.square(difference), axis=0)) / size
    worst = int(by_column.argmax())
    same = int((ours["logits"].argmax(1) == expected.argmax(1)).sum())
    _console.print(
        f"logits {expected.shape[0]} x {expected.shape[1]:,}, root mean square {size:.3f}: engine against transformers "
        f"{whole:.2e} of it, worst column {by_column[worst]:.2e}, worst single {np.abs(difference).max() / size:.2e}; "
        f"same most likely token {same}/{len(expected)}",
        soft_wrap=True,
    )
    if not whole <= allowed:
        broken.append(f"logits differ by {whole:.2e} of their size, {allowed:.0e} is allowed for {dtype}")
    if not by_column[worst] <= WORST_COLUMN * allowed:
        limit = f"{WORST_COLUMN * allowed:.0e} is allowed for {dtype}"
        broken.append(f"logits of token {worst} differ by {by_column[worst]:.2e}, {limit}")
    chosen = [("first token", int(ours["first"]), expected[-1])]
    chosen += [(f"draft {i + 1}", int(token), theirs["drafts"][i]) for i, token in enumerate(ours["drafts"])]
    for what, token, row in chosen:
        behind = (row.max() - row[token]) / size
        if not behind <= WORST_COLUMN * allowed:
            broken.append(f"{what} is {token}, which transformers puts {behind:.2e} behind its own choice {int(row.argmax())}")
    own = [int(row.argmax()) for *_, row in chosen]
    _console.print(f"first token and drafts {[token for _, token, _ in chosen]}, transformers {own}", soft_wrap=True)
    return broken


def show(steps: list[Step]) -> None:
    table = Table(title="peak: most memory resident, of the step's own process", title_justify="left")
    for column, justify in (("step", "left"), ("seconds", "right"), ("peak GB", "right"), ("", "left")):
        table.add_column(column, justify=justify)
    for step in steps:
        table.add_row(step.name, f"{step.seconds:.1f}", f"{step.peak / 1e9:.2f}", step.note)
    tables.show(Console(highlight=False), table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="an empty directory to work in; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="leave checkpoint and artifact there")
    parser.add_argument("--recipe", default="q4", help="q4 or w8")
    parser.add_argument("--layers", type=int, default=4, help="a multiple of 4")
    parser.add_argument("--dtype", default="float32", choices=TOLERANCE, help="the engine's; bfloat16 takes half the memory")
    parser.add_argument("--miniature", action="store_true", help="small widths and vocabulary")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    options = parser.parse_args(argv)
    if options.layers < 4 or options.layers % 4:
        return _refuse(f"--layers is {options.layers}, it must be a multiple of 4")
    if options.dir is not None and options.dir.exists() and (not options.dir.is_dir() or any(options.dir.iterdir())):
        return _refuse(f"--dir: {options.dir} is not an empty directory")
    made = [] if options.dir is None or options.dir.exists() else [options.dir]
    for path in made:
        path.mkdir(parents=True)
    folder = options.dir or Path(tempfile.mkdtemp(prefix="check-shapes-"))
    steps: list[Step] = []
    try:
        if refusal := no_room(folder, checkpoint.text_config(options.layers, options.miniature)):
            return _refuse(refusal)
        broken = go_through(folder, options, steps)
    except Failed as error:
        broken = [str(error)]
    finally:
        if steps:
            show(steps)
        if not options.keep:
            clear(folder, remove=options.dir is None or bool(made))
    if options.json:
        options.json.write_text(json.dumps({"steps": [_as_json(s) for s in steps], "broken": broken}, indent=1) + "\n")
    for line in broken:
        _console.print(line, style="bold red", markup=False, soft_wrap=True)
    if options.keep:
        _console.print(f"kept in {folder}", soft_wrap=True)
    return 1 if broken else 0


def no_room(folder: Path, config: dict[str, Any]) -> str:
    """What is too small, or nothing: the disk has to hold the checkpoint and an artifact of at most 0.6 of its size."""
    need, free = int(1.6 * checkpoint.nbytes(config)) + (1 << 28), shutil.disk_usage(folder).free
    if need <= free:
        return ""
    return f"{folder}: {need:,} bytes are needed on this disk, {free:,} are free; choose another with --dir"


def clear(folder: Path, remove: bool) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if remove:
        folder.rmdir()


def _as_json(step: Step) -> dict[str, Any]:
    return {"step": step.name, "seconds": round(step.seconds, 2), "peak_bytes": step.peak, "note": step.note}


def _refuse(message: str) -> int:
    _console.print(f"error: {message}", style="bold red", markup=False, soft_wrap=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
