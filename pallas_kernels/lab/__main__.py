"""`python -m pallas_kernels.lab`: list, report, check."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pallas_kernels import targets
from pallas_kernels.lab import check, plot, registry, rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every op and case")

    report = commands.add_parser("report", help="compile cases for a card, no GPU needed, and print what came out")
    report.add_argument("ops", nargs="*", metavar="OP", help="op or op/case; all by default")
    report.add_argument("--target", default="rtx4090", help=f"one of {', '.join(targets.names())}")
    report.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    report.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the kernels on the card's roofline")
    report.add_argument("--compare", type=Path, metavar="OLD.json", help="print what changed since that report")

    checking = commands.add_parser("check", help="numbers against the reference: interpreted on a CPU, compiled on a GPU")
    checking.add_argument("ops", nargs="*", metavar="OP")
    checking.add_argument("--json", type=Path, metavar="FILE")

    arguments = parser.parse_args(argv)
    try:
        return {"list": _list, "report": _report, "check": _check}[arguments.command](arguments)
    except (ValueError, RuntimeError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def _list(arguments: argparse.Namespace) -> int:
    for case in registry.cases():
        print(f"{case.op}/{case.name}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    targets.get(arguments.target)
    found = []
    for case in registry.cases(arguments.ops):
        found.append(rows.measure(case, arguments.target))
        # A row at a time: all cases take minutes.
        print("\n".join(rows.table(found[-1:]).splitlines()[len(found) > 1 :]), flush=True)
    if arguments.compare:
        print(rows.compare(json.loads(arguments.compare.read_text()), found))
    if arguments.json:
        arguments.json.write_text(json.dumps([r.json() for r in found], indent=1) + "\n")
    if arguments.plot:
        plot.roofline(found, targets.get(arguments.target), arguments.plot)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    results = [check.run(case) for case in check.cases(arguments.ops)]
    for r in results:
        print(f"{'ok  ' if r.passed else 'FAIL'} {r.op}/{r.case}: relative error {r.error:.2e}, allowed {r.allowed:.0e} ({r.mode})")
    if arguments.json:
        arguments.json.write_text(json.dumps([r.json() for r in results], indent=1) + "\n")
    return 0 if all(r.passed for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
