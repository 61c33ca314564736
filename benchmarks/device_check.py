"""One command on a new card: do the kernels' numbers hold, how long do they take, how fast is the whole 27B.

    python benchmarks/device_check.py                    # at most 9 minutes, no checkpoint, no network
    python benchmarks/device_check.py --tiny             # the same steps on a CPU, in miniature
    python benchmarks/device_check.py --target rtx4090   # without a card: what the compiler makes of it

Writes `results.json` and `results.md` to benchmarks/results/<device>-<date>/ after every step: a time limit loses only the
rest, and a step that would not fit is named as left out. Exit code 1: something failed, see there; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tree beside this script is what is checked, installed or not
# The model takes nearly all of a 24 GB card: JAX's own share of it, three quarters, is too small.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")

import jax  # noqa: E402
from device import around, kernels, whole_model  # noqa: E402
from device.report import Report  # noqa: E402
from rich.console import Console  # noqa: E402

from pallas_kernels import targets  # noqa: E402  (before the first JAX computation)

LONGEST = 60.0  # minutes
_console = Console(stderr=True, highlight=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="budget of the whole run (9)")
    parser.add_argument("--tiny", action="store_true", help="4 layers of small widths and small kernel cases, on the CPU")
    parser.add_argument("--target", default="rtx4090", help=f"without a GPU, compile for it: one of {', '.join(targets.names())}")
    parser.add_argument("--ops", nargs="*", metavar="OP", help="without a GPU, compile these ops' kernels only, and no model")
    parser.add_argument("--programs", type=Path, metavar="DIR", help="executables that `ninfer-jax compile` wrote, to run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there instead")
    options = parser.parse_args(argv)
    if not 0 < options.minutes <= LONGEST:
        return _refuse(f"--minutes is {options.minutes:g}, it must be more than 0 and at most {LONGEST:g}")
    if options.programs and not options.programs.is_dir():
        return _refuse(f"--programs: {options.programs} is no directory")
    try:
        targets.get(options.target)
    except ValueError as error:
        return _refuse(f"--target: {error}")
    if options.tiny:
        jax.config.update("jax_platforms", "cpu")
    on_gpu = jax.default_backend() == "gpu"
    device = jax.devices()[0].device_kind
    if options.tiny:
        what, slug = "Device check in miniature, on a CPU: no figure in here says anything about a card", "cpu-tiny"
    elif on_gpu:
        what, slug = f"Device check of {device}", re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    else:
        what, slug = (f"Compiled for {options.target} on a machine without a GPU: nothing was run", f"{options.target}-compiled")
    folder = options.out or _unused(ROOT / "benchmarks" / "results" / f"{slug}-{datetime.date.today()}")
    command = " ".join(["device_check.py", *(sys.argv[1:] if argv is None else argv)])
    facts = {"what": what, "device": device, "date": str(datetime.date.today()), "command": command}
    report = Report(folder, options.minutes, facts)
    with report.watched():
        with report.stage("environment", "versions, device, driver, memory", until=0.05) as stage:
            around.environment(stage)
        if options.tiny or on_gpu:
            _measured(report, options)
        else:
            line = f"no GPU here: measuring needs one, so only what compiling for {options.target} tells is done"
            _console.print(line, soft_wrap=True)
            _compiled(report, options)
    _console.print(f"{'FAILED, see' if report.failed else 'done:'} {folder / 'results.md'}", markup=False, soft_wrap=True)
    return 1 if report.failed else 0


def _measured(report: Report, options: argparse.Namespace) -> None:
    size = whole_model.TINY if options.tiny else whole_model.WHOLE
    weights, speed = whole_model.Weights(), None
    # Compilers work in the background of what is not timed.
    compiling = whole_model.Compiling(size, threads=2 if options.tiny else 5)
    try:
        with report.stage("numbers", "kernels against their references", until=0.35) as stage:
            kernels.numbers(stage, options.tiny, around.limit_bytes())
        with report.stage("compile", f"programs of the {size.name} compiled here", until=0.55) as stage:
            stage.note("In threads, beside the stage before: compile_s is elapsed time, not work.")
            compiling.wait(stage.left)
            compiling.record(stage)
        with report.stage("times", "kernels beside the copy speed of this device", until=0.7) as stage:
            if compiling.waiting:
                stage.note("Compilers were still at work, and may have disturbed these times.")
            speed = kernels.times(stage, options.tiny)
        with report.stage("model", f"{size.name}, random weights", until=0.93 if options.programs else 0.98) as stage:
            whole_model.measure(stage, compiling, weights, speed, around.peak_bytes)
        with report.stage("executables", "compiled elsewhere without a device", until=1.0) as stage:
            around.executables(stage, options.programs, size, weights)
    finally:
        compiling.abandon()


def _compiled(report: Report, options: argparse.Namespace) -> None:
    with report.stage("kernels", f"compiled for {options.target}", until=1.0 if options.ops else 0.5) as stage:
        around.compiled_kernels(stage, options.target, options.ops)
    with report.stage("programs", f"of the {whole_model.WHOLE.name}, compiled for {options.target}", until=1.0) as stage:
        if options.ops:
            stage.leave_out("everything", "--ops names kernels only")
        else:
            around.compiled_programs(stage, options.target, whole_model.WHOLE)


def _unused(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3 ... that is not there: a run never overwrites another."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _refuse(line: str) -> int:
    print(f"error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
