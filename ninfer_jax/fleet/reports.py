"""The numbers of all replicas in one place: a page of metrics with a label more, and one status for the dashboard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

_SUMMED = ("waiting", "pages_used", "pages_total")
_RECENT = 100


@dataclass(frozen=True)
class Report:
    """A replica's own `/metrics` and `/api/status`. name: the same after a restart."""

    name: str
    metrics: str = ""
    status: dict[str, Any] = field(default_factory=dict)


def merged_metrics(reports: Sequence[Report]) -> bytes:
    """Prometheus' text of all, each sample with the label `replica`."""
    registry = CollectorRegistry()
    registry.register(_Merged(reports))
    return generate_latest(registry)


class _Merged:
    def __init__(self, reports: Sequence[Report]):
        self._reports = reports

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for report in self._reports:
            for family in text_string_to_metric_families(report.metrics):
                into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.samples.append(sample._replace(labels={"replica": report.name, **sample.labels}))
        yield GaugeMetricFamily("ninfer_replicas", "Replicas that answer", len(self._reports))
        yield from families.values()


def merged_status(reports: Sequence[Report]) -> dict[str, Any]:
    """One status, as the page reads it: the slots of all replicas side by side, counts added up. `replicas`: a line of each."""
    told = [report for report in reports if report.status]
    if not told:
        return {"phase": "loading", "replicas": []}
    first = told[0].status
    said = dict(first)
    each = [report.status for report in told]
    said["phase"] = "ready" if any(status.get("phase") == "ready" for status in each) else first.get("phase")
    said["uptime_s"] = max(status.get("uptime_s", 0) for status in each)
    for name in ("running", "tokens"):
        said[name] = sum(status.get(name) or 0 for status in each)
    joules = [status["joules"] for status in each if status.get("joules") is not None]
    said["joules"] = sum(joules) if len(joules) == len(each) else None
    recent = [line for status in each for line in status.get("recent", [])]
    said["recent"] = sorted(recent, key=lambda line: line.get("at", 0), reverse=True)[:_RECENT]
    for name in ("totals", "today"):
        said[name] = _added([status.get(name) or {} for status in each])
    loads = [status["load"] for status in each if status.get("load")]
    if loads:
        said["load"] = {
            "slots": [slot for load in loads for slot in load["slots"]],
            **{name: sum(load[name] for load in loads) for name in _SUMMED},
            **{name: _added([load[name] for load in loads]) for name in ("cached_tokens", "numbers")},
        }
    memory = [status["memory"] for status in each if status.get("memory")]
    if memory:
        said["memory"] = {"total": sum(one["total"] for one in memory), "parts": _added([one["parts"] for one in memory])}
    said["replicas"] = [_line(report) for report in told]
    return said


def _line(report: Report) -> dict[str, Any]:
    load = report.status.get("load") or {}
    slots = load.get("slots", [])
    return {
        "name": report.name,
        "phase": report.status.get("phase"),
        "running": report.status.get("running", 0),
        "waiting": load.get("waiting", 0),
        "slots": len(slots),
        "busy": sum(slot.get("state") != "free" for slot in slots),
    }


def _added(mappings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums by key; of what is no number the first."""
    total: dict[str, Any] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            total[key] = total.get(key, 0) + value if number else total.get(key, value)
    return total
