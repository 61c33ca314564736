"""What a check found, stage by stage, against a clock; on disk after every item, so that a time limit loses only the rest."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

SCHEMA = 1
GRACE = 20.0  # seconds after the end of the budget until a step that is still running is given up
_console = Console(stderr=True, highlight=False)


class Report:
    """The stages of one run and the folder they are written to: `results.json` and `results.md`.

    minutes: the budget of the whole run. Stages share it by the fractions of it at which they have to end, so time that one
    leaves goes to the next. All times are seconds since the start.
    """

    def __init__(self, folder: Path, minutes: float, facts: Mapping[str, Any]):
        self.folder, self.budget = folder, 60 * minutes
        self.facts = {"schema": SCHEMA, "minutes": minutes, **facts}
        self.stages: list[Stage] = []
        self._start = time.perf_counter()
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    @property
    def failed(self) -> bool:
        return any("failed" in item for stage in self.stages for item in stage.items)

    @contextlib.contextmanager
    def stage(self, name: str, title: str, until: float) -> Iterator[Stage]:
        """A stage that has to end by the fraction `until` of the budget. What it raises is recorded, not passed on: the next
        stage is worth having all the same."""
        stage = Stage(self, name, title, until * self.budget)
        with self._lock:
            self.stages.append(stage)
        _console.print(f"[{self.elapsed:5.0f} s] {name}: {title}", markup=False, soft_wrap=True)
        try:
            yield stage
        except Exception as error:  # whatever a compiler or a card may say
            stage.record("the stage itself", {"failed": one_line(error)})
        stage.done()

    def write(self) -> None:
        with self._lock:
            content = self.facts | {"elapsed_s": round(self.elapsed, 2), "stages": [s.json() for s in self.stages]}
            _replace(self.folder / "results.json", json.dumps(content, indent=1, default=str) + "\n")
            _replace(self.folder / "results.md", markdown(content))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it the process ends some seconds after the budget's end, whatever is running then: nothing can stop a
        compiler, and all that was found before is on disk."""
        timer = threading.Timer(self.budget + GRACE - self.elapsed, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        with self._lock:
            for stage in self.stages:
                if stage.seconds is None:
                    for name in sorted(stage.running) or ["the rest"]:
                        stage.leave_out(name, f"was still running {GRACE:.0f} s after the end of the budget")
            self.write()
            _console.print(f"stopped at the end of the budget; what was found: {self.folder}", markup=False, soft_wrap=True)
            sys.stderr.flush()
            os._exit(1 if self.failed else 0)


class Stage:
    """Items found (`name`, `seconds`, whatever there is to say; `failed` where something is wrong) and items left out."""

    def __init__(self, report: Report, name: str, title: str, until: float):
        self.name, self.title, self.notes = name, title, []
        self.items: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []
        self.running: set[str] = set()
        self.seconds: float | None = None
        self._report, self._until, self._began = report, until, report.elapsed
        self._longest: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def left(self) -> float:
        """Seconds of this stage that are left."""
        return self._until - self._report.elapsed

    def run(self, name: str, work: Callable[[], Mapping[str, Any]], kind: str = "", guess: float = 0.0) -> Mapping[str, Any] | None:
        """What `work` found, recorded; None where it failed or did not fit.

        It is left out, by name, when the longest item of its kind so far (before the first: `guess`, in seconds) is more than
        what is left.
        """
        need = self._longest.get(kind, guess)
        if need > self.left:
            self.leave_out(name, f"{max(self.left, 0):.0f} s left, about {need:.0f} s needed")
            return None
        self.running.add(name)
        start, found = time.perf_counter(), None
        try:
            found = work()
            entry = dict(found)
        except Exception as error:
            entry = {"failed": one_line(error)}
        seconds = time.perf_counter() - start
        self.running.discard(name)
        with self._lock:
            self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)
        self.record(name, {"seconds": round(seconds, 3), **entry})
        return found

    def record(self, name: str, entry: Mapping[str, Any]) -> None:
        with self._lock:
            self.items.append({"name": name, **entry})
        if "failed" in entry:
            _console.print(f"  FAILED {name}: {entry['failed']}", markup=False, soft_wrap=True)
        self._report.write()

    def leave_out(self, name: str, why: str) -> None:
        with self._lock:
            self.left_out.append({"name": name, "why": why})
        _console.print(f"  left out: {name} ({why})", markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """A sentence that readers of the items need: how they came to be."""
        self.notes.append(text)

    def done(self) -> None:
        self.seconds = self._report.elapsed - self._began
        self._report.write()

    def json(self) -> dict[str, Any]:
        fields = ("name", "title", "notes", "items", "left_out")
        return {f: list(v) if isinstance(v := getattr(self, f), list) else v for f in fields} | {
            "seconds": None if self.seconds is None else round(self.seconds, 2),
            "budget_end_s": round(self._until, 1),
        }


def one_line(error: BaseException) -> str:
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text[:300]}"


def markdown(content: Mapping[str, Any]) -> str:
    """The same content as `results.json`, for reading."""
    lines = [f"# {content['what']}", ""]
    lines += [f"- {key}: {_cell(value)}" for key, value in content.items() if key not in ("what", "stages", "schema")]
    for stage in content["stages"]:
        took = "not finished" if stage["seconds"] is None else f"{stage['seconds']:.1f} s"
        lines += ["", f"## {stage['name']}: {stage['title']} ({took})", ""]
        lines += [line for note in stage["notes"] for line in (note, "")]
        lines += _tables(stage["items"])
        if stage["left_out"]:
            lines += ["Left out:", "", *(f"- {x['name']}: {x['why']}" for x in stage["left_out"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _tables(items: list[dict[str, Any]]) -> list[str]:
    """One table for every run of items that have the same fields."""
    lines: list[str] = []
    previous: tuple[str, ...] | None = None
    for item in items:
        fields = tuple(item)
        if fields != previous:
            lines += ([""] if lines else []) + ["| " + " | ".join(fields) + " |", "|---" * len(fields) + "|"]
            previous = fields
        lines.append("| " + " | ".join(_cell(v) for v in item.values()) + " |")
    return [*lines, ""] if lines else []


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        # Not 4.3e+03: these are read by people.
        if abs(value) >= 1e4:
            return f"{value:,.0f}"
        return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.2e}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_cell(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


def _replace(path: Path, text: str) -> None:
    """Whole or not at all, also when the process is killed in between."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
