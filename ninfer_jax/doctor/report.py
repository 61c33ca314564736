"""A text for bug reports: versions, figures and judgements, without a path, a prompt or the name of a process."""

from __future__ import annotations

from collections.abc import Sequence

from ninfer_jax import __version__
from ninfer_jax.doctor.finding import Finding


def report(findings: Sequence[Finding]) -> str:
    """Facts alone: what findings say in words may name files."""
    lines = [f"ninfer-jax {__version__}, doctor's report"]
    for finding in findings:
        facts = ", ".join(f"{name} {_shown(value)}" for name, value in finding.facts.items())
        lines.append(f"{finding.status:5s} {finding.name}" + (f": {facts}" if facts else ""))
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return {None: "not known", True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool | None) else str(value)
