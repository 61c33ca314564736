"""A decode round and a prefill chunk of the 27B, predicted for a card from compiled kernels: nothing here is measured.

    python benchmarks/round_model.py [--target rtx4090] [--json F] [--plot F.png]

A kernel's time is the longest of bytes moved / (bandwidth x 0.92), thread instructions / issue rate and multiply-adds /
tensor rate, from the lab's compiled figures; a launch costs 1.5 us beside it. The two numbers are assumptions: 0.92 is what
large copies reach on Ada cards, 1.5 us the launch work of a CUDA graph's node. Attention scales with the tokens it walks;
the sums that its splits leave are counted whole at every depth. The GDN core is counted as if as many rows waited for it as
it adds. Small operations: what the real plain round of one slot, compiled, launches and copies beside the kernels named here,
when it draws greedily, at a launch's cost each.

Rounds: plain = one row; with K drafts = K + 1 rows, the MTP layer over the emitted rows and K - 1 times over one
more, and a head for each draft (`--draft-head` rows of it; all when 0). Tokens a second with drafts use `--accepted` tokens
a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from published import DECODE, PREFILL
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ninfer_jax import tables
from ninfer_jax.config import EngineConfig, recipe
from ninfer_jax.programs.card import compile_program
from ninfer_jax.programs.setup import model_of, resolve
from pallas_kernels import deviceless, targets  # before the first JAX computation
from pallas_kernels.lab import registry, rows
from pallas_kernels.matmul.cases import HIDDEN, INTERMEDIATE, Case, HeadCase

BANDWIDTH_REACHED, LAUNCH_US = 0.92, 1.5
MODEL = "qwen3_8_27b"
GDN_LAYERS, ATTENTION_LAYERS, LAYERS, CONTEXT = 48, 16, 64, 262_144
DEPTHS = (2_048, 32_768, 131_072, 235_000, 262_144)
PREFILL_DEPTHS = (1_024, 6_144, 32_768, 131_072, 262_144)
CHUNK = 1_024
_console = Console()

# Of the MTP layer, whose weights are w8; beside it the cases that the lab has.
MTP = (
    Case("mtp.qkv_gate", HIDDEN, 14336, bits=8, group=128, norm=True),
    Case("mtp.out", 6144, HIDDEN, bits=8, group=128, residual=True),
    Case("mtp.gate_up", HIDDEN, 2 * INTERMEDIATE, bits=8, group=128, norm=True, swiglu=True),
    Case("mtp.down", INTERMEDIATE, HIDDEN, bits=8, group=128, residual=True),
)


@dataclasses.dataclass(frozen=True)
class Timed:
    """One kernel case: compiled figures and the time modelled from them, microseconds, its launches' cost included."""

    bytes: float
    instructions: float
    multiply_adds: float
    launches: int
    us: float


def timed(card: targets.Target, row: rows.Row, share: float = 1.0) -> Timed:
    """share: of the case's bytes and work, for one that walks fewer tokens."""
    rate = card.tensor_8 if "int8" in row.case or "int8" in row.op else card.tensor_16
    moved, instructions, adds = row.bytes_moved * share, row.thread_instructions * share, row.multiply_adds * share
    seconds = max(moved / (card.bandwidth * BANDWIDTH_REACHED), instructions / card.issue_rate, adds / rate)
    return Timed(moved, instructions, adds, row.launches, seconds * 1e6 + row.launches * LAUNCH_US)


def compiled_steps(program: str, target: str, kv: str) -> int:
    """Launches and copies of a program of the 27B for one slot without drafts, compiled; a round's when it draws greedily."""
    model, named = model_of(MODEL)
    setup = resolve(model, named, EngineConfig(context=CONTEXT, slots=1, draft=0, kv=kv, prefill_chunk=CHUNK), "cuda", recipe("q4"))
    return compile_program(program, setup.programs().source(program), target)[1].shortest


def _by_rows(case: Case, counts: set[int]) -> list[Case]:
    return [dataclasses.replace(case, name=f"{case.name}@{rows}", rows=rows) for rows in sorted(counts)]


class Model:
    """Compiled rows by `op/case`, and sums over a round."""

    def __init__(self, target: str, kv: str, draft: int, draft_head: int):
        self.card, self.kv, self.draft = targets.get(target), kv, draft
        self.draft_head = HeadCase("draft", HIDDEN, draft_head, bits=8, group=128, valid=draft_head) if draft_head else None
        wanted = [
            "quantised_matmul/attention.qkv_gate",
            "quantised_matmul/attention.out",
            "quantised_matmul_pair/delta.inputs",
            "quantised_matmul/delta.out",
            "quantised_matmul/mlp.gate_up",
            "quantised_matmul/mlp.down",
            "quantised_matmul/mtp.fc",
            "quantised_matmul/mlp.gate_up.prefill_int8",
            "quantised_matmul/mlp.down.prefill_int8",
            "head/argmax",
            f"kv_append/decode.{kv}",
            f"decode_attention/{kv}",
            f"decode_attention/{kv}.1row",
            "delta_decode/1x1",
            "delta_decode/1x4",
            "kv_append/prefill.rk4v4-e8",
            f"prefill_attention/{kv}",
            "delta_prefill/1024x1of1",
        ]
        known = {f"{c.op}/{c.name}": c for c in registry.cases()}
        cases = [known[name] for name in wanted if name in known]
        cases += [*MTP, *([self.draft_head] if self.draft_head else [])]
        # The lab's decode cases have 16 rows, four slots with three drafts; a kernel reads and writes the rows that there are.
        cases = [one for c in cases for one in (_by_rows(c, {1, draft + 1}) if isinstance(c, Case) and c.rows <= 16 else [c])]
        self.rows = {f"{c.op}/{c.name}": rows.measure(c, target) for c in track(cases, "compiling", console=Console(stderr=True))}
        self.small_operations = 0
        self.prefill_steps = compiled_steps("prefill", target, kv)
        self.small_operations = compiled_steps("decode_round", target, kv) - sum(
            launches for launches, _ in self._parts(DEPTHS[0], 1).values()
        )

    def us(self, name: str, share: float = 1.0) -> float:
        return timed(self.card, self.rows[name], share).us

    def attention_row(self, rows_: int) -> rows.Row:
        name = f"decode_attention/{self.kv}" + (".1row" if rows_ == 1 and f"decode_attention/{self.kv}.1row" in self.rows else "")
        return self.rows[name]

    def attention_us(self, depth: int, rows_: int) -> float:
        """Decode attention of one layer: pages scale with depth, the splits' sums do not."""
        row = self.attention_row(rows_)
        walked = row.bytes_moved - (row.bytes_moved - row.ideal_bytes)
        moved = walked * depth / CONTEXT + (row.bytes_moved - row.ideal_bytes)
        seconds = max(
            moved / (self.card.bandwidth * BANDWIDTH_REACHED), row.thread_instructions * depth / CONTEXT / self.card.issue_rate
        )
        return seconds * 1e6 + row.launches * LAUNCH_US

    def verify_us(self, depth: int, rows_: int) -> dict[str, float]:
        return {name: us for name, (_, us) in self._parts(depth, rows_).items()}

    def _parts(self, depth: int, rows_: int) -> dict[str, tuple[int, float]]:
        """Launches and microseconds of a verify pass by what they are for."""
        m = "quantised_matmul/"

        def layers(count: int, *names: str) -> tuple[int, float]:
            own = [n if n in self.rows else f"{n}@{rows_}" for n in names]
            return count * sum(self.rows[n].launches for n in own), count * sum(self.us(n) for n in own)

        append, walk = layers(ATTENTION_LAYERS, f"kv_append/decode.{self.kv}"), self.attention_row(rows_).launches
        return {
            "GDN projections": layers(GDN_LAYERS, "quantised_matmul_pair/delta.inputs", m + "delta.out"),
            "GDN core": layers(GDN_LAYERS, "delta_decode/1x1" if rows_ == 1 else "delta_decode/1x4"),
            "attention projections": layers(ATTENTION_LAYERS, m + "attention.qkv_gate", m + "attention.out"),
            "attention": (append[0] + ATTENTION_LAYERS * walk, append[1] + ATTENTION_LAYERS * self.attention_us(depth, rows_)),
            "MLP": layers(LAYERS, m + "mlp.gate_up", m + "mlp.down"),
            "head": layers(1, "head/argmax"),
            "small operations": (self.small_operations, self.small_operations * LAUNCH_US),
        }

    def draft_us(self, depth: int) -> float:
        """The MTP layer once, and a head."""
        m = "quantised_matmul/"
        # At the rows of the first time, which realigns; the others have one.
        rows_ = self.draft + 1
        layer = sum(self.us(f"{m}{name}@{rows_}") for name in ("mtp.fc", "mtp.qkv_gate", "mtp.out", "mtp.gate_up", "mtp.down"))
        head = self.us("head/draft@1") if self.draft_head else self.us("head/argmax@1")
        return layer + head + self.us(f"kv_append/decode.{self.kv}") + self.attention_us(depth, 1) + 8 * LAUNCH_US

    def round_us(self, depth: int, draft: int) -> float:
        return sum(self.verify_us(depth, draft + 1).values()) + draft * self.draft_us(depth)

    def prefill_us(self, depth: int) -> float:
        """One chunk whose last token stands at `depth`. Projections that the lab has no case of go by multiply-adds."""
        m = "quantised_matmul/"
        gate_up, down = self.us(m + "mlp.gate_up.prefill_int8"), self.us(m + "mlp.down.prefill_int8")
        per_add = gate_up / self.rows[m + "mlp.gate_up.prefill_int8"].multiply_adds
        adds = CHUNK * (GDN_LAYERS * (HIDDEN * 16384 + 6144 * HIDDEN) + ATTENTION_LAYERS * (HIDDEN * 14336 + 6144 * HIDDEN))
        attention = self.rows[f"prefill_attention/{self.kv}"]
        share = max(depth - CHUNK / 2, CHUNK / 2) / (32_768 - CHUNK / 2)
        counted = sum(
            count * self.rows[name].launches
            for count, name in (
                (LAYERS, m + "mlp.gate_up.prefill_int8"),
                (LAYERS, m + "mlp.down.prefill_int8"),
                (GDN_LAYERS, "delta_prefill/1024x1of1"),
                (ATTENTION_LAYERS, f"prefill_attention/{self.kv}"),
                (ATTENTION_LAYERS, "kv_append/prefill.rk4v4-e8"),
            )
        )
        return (
            LAYERS * (gate_up + down)
            + adds * per_add
            + GDN_LAYERS * self.us("delta_prefill/1024x1of1")
            + ATTENTION_LAYERS * (timed(self.card, attention, share).us + self.us("kv_append/prefill.rk4v4-e8"))
            + (self.prefill_steps - counted) * LAUNCH_US
        )

    def prefill_rate(self, tokens: int) -> float:
        """Tokens a second of a whole prompt."""
        chunks = [min((i + 1) * CHUNK, tokens) for i in range(-(-tokens // CHUNK))]
        return tokens / sum(self.prefill_us(depth) for depth in chunks) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="rtx4090", help=f"one of {', '.join(targets.names())}")
    parser.add_argument("--kv", default="rk4v4-e8")
    parser.add_argument("--draft", type=int, default=3)
    parser.add_argument(
        "--accepted", type=float, default=3.3, help="tokens a round with drafts; 3.3 is NInfer's published figure on code"
    )
    parser.add_argument("--draft-head", type=int, default=32_768, help="rows of the head that drafts choose from; 0: all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    try:
        targets.get(options.target)
        deviceless.require_tools()
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model = Model(options.target, options.kv, options.draft, options.draft_head)
    table = Table(title=f"Modelled for {options.target}, {options.kv}: decode, one slot", title_justify="left")
    for column in ("depth", "plain ms", "plain tok/s", f"K={options.draft} ms", f"tok/s at {options.accepted} a round"):
        table.add_column(column, justify="right")
    decode = []
    for depth in DEPTHS:
        plain, drafted = model.round_us(depth, 0) / 1e3, model.round_us(depth, options.draft) / 1e3
        decode.append({"depth": depth, "plain_ms": plain, "draft_ms": drafted})
        table.add_row(
            f"{depth:,}", f"{plain:.2f}", f"{1e3 / plain:.1f}", f"{drafted:.2f}", f"{options.accepted * 1e3 / drafted:.1f}"
        )
    tables.show(_console, table)
    parts = model.verify_us(DEPTHS[0], 1)
    table = Table(title=f"Where a plain round goes, depth {DEPTHS[0]:,}", title_justify="left")
    table.add_column("part")
    table.add_column("ms", justify="right")
    for name, us in parts.items():
        table.add_row(name, f"{us / 1e3:.2f}")
    table.add_row(
        f"beside it, with drafts: {options.draft} x MTP layer and head", f"{options.draft * model.draft_us(DEPTHS[0]) / 1e3:.2f}"
    )
    tables.show(_console, table)
    table = Table(title="Prefill of a whole prompt, a floor", title_justify="left")
    table.add_column("prompt", justify="right")
    table.add_column("tok/s", justify="right")
    prefill = {tokens: model.prefill_rate(tokens) for tokens in PREFILL_DEPTHS}
    for tokens, rate in prefill.items():
        table.add_row(f"{tokens:,}", f"{rate:,.0f}")
    tables.show(_console, table)
    published = beside_published(model) if options.draft == 3 else []
    if options.json:
        facts = {
            "target": options.target,
            "kv": options.kv,
            "decode": decode,
            "parts_us": parts,
            "prefill_tok_s": prefill,
            "published": published,
            "rows": {name: row.json() for name, row in model.rows.items()},
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    if options.plot:
        draw(model, options, options.plot)
    return 0


def beside_published(model: Model) -> list[dict]:
    """What others measured on this card at their depths and shares of accepted drafts, and what is modelled there."""
    table = Table(title="Published measurements of others, and modelled here", title_justify="left")
    for column in ("", "tokens", "drafts accepted", "measured, tok/s", "modelled, tok/s"):
        table.add_column(column, justify="left" if not column else "right")
    found = []
    for kind, rows_ in (("decode", DECODE), ("prefill", PREFILL)):
        for p in rows_:
            if kind == "prefill":
                modelled = model.prefill_rate(p.depth)
            else:
                modelled = (1 + 3 * (p.share or 0)) * 1e6 / model.round_us(p.depth, 0 if p.share is None else 3)
            share = "" if p.share is None else f"{p.share:.1%}"
            table.add_row(f"{kind}: {p.what}", f"{p.depth:,}", share, f"{p.tok_s:,.1f}", f"{modelled:,.1f}")
            found.append({"kind": kind, **p._asdict(), "modelled": modelled})
    tables.show(_console, table)
    return found


def draw(model: Model, options: argparse.Namespace, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    depths = [2_048 * i for i in range(1, 129)]
    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.plot(depths, [1e6 / model.round_us(d, 0) for d in depths], label="plain")
    label = f"K = {options.draft}, {options.accepted} tokens a round"
    axes.plot(depths, [options.accepted * 1e6 / model.round_us(d, options.draft) for d in depths], label=label)
    axes.set_xlabel("tokens in the context")
    axes.set_ylabel("tokens a second")
    axes.set_ylim(0)
    axes.set_title(f"{model.card.description}, {options.kv}: modelled from compiled kernels, not measured", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
