"""The measures' tables, Markdown, and pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from measures.engines import COLLAPSED, REFERENCE
from ninfer_jax.evaluate import acceptance, divergence, drift, needle, plots

GIB = 2**30


def write(name: str, rows: list[dict], out: Path) -> None:
    (out / f"{name}.md").write_text(table(name, rows), encoding="utf-8")
    draw(name, rows, out)


def table(name: str, rows: list[dict]) -> str:
    """A measure's figures as Markdown."""
    if name == "loss":
        cells = [[f"`{r['kv']}`", f"{r['nats_per_token']:.5f}", f"{r['nats_per_byte']:.5f}"] for r in rows]
        return _markdown(["KV", "nats a token", "nats a byte"], cells)
    if name == "kld":
        kl = {(r["kv"], r["depth"]): r["kl"] for r in rows}
        cells = [
            [
                f"`{r['kv']}`",
                f"{r['depth']:,}",
                f"{r['kl'] * 1e6:.2f} ± {r['kl_error'] * 1e6:.2f}",
                f"{r['kl_p99'] * 1e6:.1f}",
                f"{r['kl'] / kl[COLLAPSED, r['depth']]:.3f}",
                f"{r['same_top']:.2%}",
            ]
            for r in sorted(rows, key=lambda r: r["depth"])
            if r["kv"] != REFERENCE
        ]
        head = ["KV", "tokens before", "mean KL, 1e-6 nats", "99th percentile", "over the collapsed code's", "same top token"]
        return _markdown(head, cells)
    if name in ("acceptance", "drafts"):
        return _markdown(["KV", "K", *DRAFTS], [[f"`{r['kv']}`", str(r["draft"]), *_drafts(r)] for r in rows])
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
    if name in ("roles", "recipes", "copy"):
        return {"roles": _roles, "recipes": _recipes, "copy": _copy}[name](rows)
    cells = [[f"`{r['kv']}`", *(f"{r[field]:.2f}" for field in ("gaussian_k", "gaussian_v", "t3_k", "t3_v"))] for r in rows]
    return _markdown(["code", "Gaussian K, dB", "Gaussian V, dB", "t3 K, dB", "t3 V, dB"], cells)


def per_role(rows: list[dict]) -> list[dict]:
    """One row a role, most KL removed a GiB first: role, added (GiB that 8 bits take more than 4 on the 27B), four, eight (KL
    alone), worth (KL that 8 bits remove a GiB), kept (bits in q4), within (q4 with the role in the width that it has not)."""
    cell = {(r["role"], r["bits"], r["in"]): r for r in rows}
    found = []
    for role in dict.fromkeys(r["role"] for r in rows if "kl" in r and r["role"] != "all"):
        four, eight = cell[role, 4, "alone"], cell[role, 8, "alone"]
        added = (four["bytes8"] - four["bytes4"]) / GIB
        (other,) = (r for r in rows if (r["role"], r["in"]) == (role, "q4"))
        found.append(
            {
                "role": role,
                "four": four,
                "eight": eight,
                "added": added,
                "small": four["bytes4"] / GIB,
                "worth": (four["kl"] - eight["kl"]) / added,
                "within": other,
                "kept": 4 if other["bits"] == 8 else 8,
            }
        )
    return sorted(found, key=lambda r: -r["worth"])


def _roles(rows: list[dict]) -> str:
    cells = [
        [
            f"`{r['role']}`",
            str(r["kept"]),
            f"{r['small']:.2f}",
            f"{r['added']:.2f}",
            _kl(r["four"]),
            _kl(r["eight"]),
            f"{r['worth'] * 1e6:,.0f}",
            f"{r['within']['bits']} bits: {_kl(r['within'])}",
        ]
        for r in per_role(rows)
    ]
    head = [
        "role",
        "bits in `q4`",
        "27B, GiB in 4 bits",
        "8 bits add",
        "alone in 4 bits: KL, 1e-6 nats",
        "alone in 8 bits",
        "removed a GiB",
        "`q4` but for this role",
    ]
    (whole,) = (r for r in rows if r["role"] == "all")
    mtp = [[f"{r['bits']} bits", *_drafts(r)] for r in rows if r["role"] == "mtp"]
    return "\n".join([_markdown(head, cells), f"all of `q4`: {_kl(whole)}\n", _markdown(["MTP head alone", *DRAFTS], mtp)])


def _recipes(rows: list[dict]) -> str:
    formats, names = (list(dict.fromkeys(r[field] for r in rows)) for field in ("kv", "recipe"))
    loss = {(r["recipe"], r["kv"]): f"{r['nats_per_token']:.4f}" for r in rows}
    losses = [[f"`{name}`", *(loss[name, kv] for kv in formats)] for name in names]
    cells = [
        [
            f"`{r['recipe']}`",
            f"{r['bytes'] / GIB:.2f}",
            _kl(r),
            f"{r['kl_p99'] * 1e6:,.0f}",
            f"{r['same_top']:.2%}",
            f"{r['above']:+.4f} ± {r['above_error']:.4f}",
            *_drafts(r["drafts"]),
        ]
        for r in rows
        if "kl" in r
    ]
    head = ["weights", "27B, GiB", "mean KL, 1e-6 nats", "99th percentile", "same top token", "loss above bf16", *DRAFTS]
    return "\n".join([_markdown(["weights", *(f"`{kv}`" for kv in formats)], losses), _markdown(head, cells)])


def _copy(rows: list[dict]) -> str:
    formats = [kv for kv in dict.fromkeys(r["kv"] for r in rows) if kv != REFERENCE]
    helps = {(r["source"], r["distance"], r["kv"]): np.array(r["helps"]) for r in rows}
    cells = []
    for r in (r for r in rows if r["kv"] == REFERENCE):
        at = r["source"], r["distance"]
        changes = (_spread(helps[*at, kv] - helps[*at, REFERENCE]) for kv in formats)
        cells.append([at[0], f"{at[1]:,}", f"{r['without']:.3f}", f"{r['second']:.3f}", _spread(helps[*at, REFERENCE]), *changes])
    head = ["tokens", "distance", "nats a token without the first", "with it", f"help, `{REFERENCE}`"]
    head += [f"`{kv}` minus that" for kv in formats]
    return _markdown(head, cells)


DRAFTS = ("drafts accepted", "share", "tokens a round")


def _drafts(r: dict) -> list[str]:
    return [f"{r['accepted']:,} of {r['drafted']:,}", f"{r['accepted_share']:.1%}", f"{r['tokens_per_round']:.2f}"]


def _kl(r: dict) -> str:
    return f"{r['kl'] * 1e6:,.1f} ± {r['kl_error'] * 1e6:,.1f}"


def _spread(x: np.ndarray) -> str:
    """Mean ± its standard error."""
    return f"{x.mean():+.3f} ± {x.std(ddof=1) / len(x) ** 0.5:.3f}"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"


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
    elif name == "roles":
        _plot_roles(file, per_role(rows))


def _plot_roles(file: Path, roles: list[dict]) -> None:
    """Divergence over the bytes that 8 bits add, both logarithmic; roles on one dashed line are worth the same."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for kept, label in ((4, "4 bits in q4"), (8, "8 bits in q4")):
        own = [r for r in roles if r["kept"] == kept]
        axes.scatter([r["added"] for r in own], [r["four"]["kl"] for r in own], marker="os"[kept == 8], label=label)
    for r in roles:
        axes.annotate(r["role"], (r["added"], r["four"]["kl"]), textcoords="offset points", xytext=(6, 5))
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="GiB that 8 bits add on the 27B",
        ylabel="KL in 4 bits, alone, nats a token",
        title="What 4 bits of each role cost (bundled model)",
    )
    ends = np.array([min(r["added"] for r in roles) / 2, max(r["added"] for r in roles) * 3])
    limits = axes.get_ylim()
    for worth in (1e-4, 1e-3, 1e-2):
        axes.plot(ends, worth * ends, "--", color="gray", linewidth=0.7, zorder=0)
    axes.set(xlim=ends, ylim=(limits[0] / 2, limits[1] * 2))
    axes.legend(fontsize=8, loc="lower right", title="dashed: the same KL a GiB", title_fontsize=8)
    figure.savefig(file, dpi=90)
