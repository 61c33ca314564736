"""`python -m pallas_kernels.lab`: list, report, check, bench, tune."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels import deviceless, targets, tuned
from pallas_kernels.lab import bench, check, plot, registry, rows, tune, work


def main(argv: list[str] | None = None) -> int:
    """Exit code of one command: 0, 1 where a case failed, 2 where it could not be asked."""
    arguments = _parser().parse_args(argv)
    try:
        for option in ("json", "plot", "out"):
            _check_place(f"--{option}", getattr(arguments, option, None))
        return {"list": _list, "report": _report, "check": _check, "bench": _bench, "tune": _tune}[arguments.command](arguments)
    except (ValueError, RuntimeError, OSError) as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    cards = f"one of {', '.join(targets.names())}"

    def command(name: str, help: str, json_file: bool = True) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.add_argument("ops", nargs="*", metavar="OP", help="op or op/case; all by default")
        if json_file:
            added.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
        return added

    command("list", "name every op and case", json_file=False)

    report = command("report", "compile cases for a card, no GPU needed, and print what came out")
    report.add_argument("--target", default="rtx4090", help=cards)
    report.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the kernels on the card's rooflines")
    report.add_argument("--compare", type=Path, metavar="OLD.json", help="print what changed since that report")
    report.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that compile (1)")

    command("check", "numbers against the reference: a GPU's kernels interpreted on a CPU, and its own compiled")

    command("bench", "times and bandwidth on the GPU that is here; without one, of CPU kernels")

    tuning = command("tune", "choose block sizes for a card and write them where kernels look them up", json_file=False)
    tuning.add_argument("--by", choices=tuned.BY, default="measured", help="times on this GPU, or compiled figures (measured)")
    tuning.add_argument("--target", help=f"with --by compiled: {cards}")
    tuning.add_argument("--out", type=Path, metavar="FILE", help="the file to add to (the package's own for the card)")
    tuning.add_argument("--jobs", type=int, default=1, metavar="N", help="with --by compiled: processes that compile (1)")
    return parser


def _list(arguments: argparse.Namespace) -> int:
    for case in registry.cases(arguments.ops, on_cpu=True):
        print(f"{case.op}/{case.name}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    card = targets.get(arguments.target)
    deviceless.require_tools()
    old = _old_rows(arguments.compare) if arguments.compare else None
    cases = registry.cases(arguments.ops)
    found, failed = [], []
    with work.progress(f"compiling for {card.name}", len(cases)) as done:
        tasks = [(case.op, case.name, None) for case in cases]
        for case, row in zip(cases, work.compiled(tasks, card.name, arguments.jobs), strict=True):
            done(f"{case.op}/{case.name}")
            if isinstance(row, str):
                failed.append(row)
                continue
            found.append(row)
            # A row at a time: all cases take minutes.
            print("\n".join(rows.table([row]).splitlines()[len(found) > 1 :]), flush=True)
    if old is not None:
        print(rows.compare(old, found))
    _write(arguments.json, found)
    if arguments.plot and found:
        plot.roofline(found, card, arguments.plot)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def _check(arguments: argparse.Namespace) -> int:
    results = []
    cases = check.cases(arguments.ops)
    with work.progress("checking", len(cases)) as done:
        for case in cases:
            r = check.run(case)
            done(f"{case.op}/{case.name}")
            results.append(r)
            verdict = "ok  " if r.passed else "FAIL"
            print(f"{verdict} {r.op}/{r.case}: relative error {r.error:.2e}, allowed {r.allowed:.0e} ({r.mode})", flush=True)
    _write(arguments.json, results)
    return 0 if all(r.passed for r in results) else 1


def _bench(arguments: argparse.Namespace) -> int:
    if check.on_gpu():
        cases, speed = registry.cases(arguments.ops), bench.copy_bytes_per_second()
        print(f"copy: {speed / 1e9:.0f} GB/s")
    else:
        cases, speed = registry.cpu_cases(arguments.ops), bench.read_bytes_per_second()
        print(f"a sum on all cores: {speed / 1e9:.1f} GB/s")
    found = []
    with work.progress("timing", len(cases)) as done:
        for case in cases:
            found.append(bench.run(case, speed))
            done(f"{case.op}/{case.name}")
            print("\n".join(bench.table(found[-1:]).splitlines()[len(found) > 1 :]), flush=True)
    _write(arguments.json, found)
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    cases = tune.cases(arguments.ops)
    if arguments.by == "compiled":
        if not arguments.target:
            raise ValueError(f"--target: which card to compile for: {', '.join(targets.names())}")
        name = targets.get(arguments.target).name
        deviceless.require_tools()
        candidates = functools.partial(tune.by_compiled, target=name, jobs=arguments.jobs)
    else:
        bench.require_gpu("tune", "; `tune --by compiled --target CARD` ranks by compiled figures")
        name = tune.this_card(arguments.target)
        candidates = functools.partial(tune.by_measured, copy_speed=bench.copy_bytes_per_second())
    chosen = []
    with work.progress("choosing", len(cases)) as done:
        for case in cases:
            chosen.append((case, tune.choose(case, functools.partial(candidates, case), functools.partial(print, flush=True))))
            done(f"{case.op}/{case.name}")
    path = arguments.out or tuned.FOLDER / f"{name}.json"
    for line in tune.write(path, chosen, arguments.by):
        print(line)
    print(f"wrote {path}")
    return 0


def _check_place(option: str, path: Path | None) -> None:
    """ValueError for a file that cannot be written: to be known before minutes of work."""
    if path is None:
        return
    if not path.name or path.is_dir():
        raise ValueError(f"{option} {path}: is a directory, name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: {path.parent} is no directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: cannot be written")


def _old_rows(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as e:
        raise ValueError(f"--compare {path}: {e.strerror or e}") from None
    except ValueError:
        raise ValueError(f"--compare {path}: not JSON, as `report --json` writes it") from None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ValueError(f"--compare {path}: no rows, as `report --json` writes them")
    return found


def _write(path: Path | None, found: Sequence[Any]) -> None:
    if path:
        path.write_text(json.dumps([r.json() for r in found], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
