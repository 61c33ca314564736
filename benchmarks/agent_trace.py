"""Time to the first token of an agent's turns, with the prefix cache and without: measured on the bundled model.

    python benchmarks/agent_trace.py [--plot trace.png] [--json trace.json]      # the plot needs matplotlib, from the `train` extra

Thirty turns of one conversation that grows beyond 8,000 tokens: a system text with tools, questions, tool calls with their
results, edits of the last message, a fork four messages back, and a compaction that replaces the middle by a summary. Each prompt
is answered twice by the same engine, cold and with the cache; both answers must be the same tokens. Between turns the engine is
idle, as while a tool runs, and settles the answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

jax.config.update("jax_platforms", "cpu")

from ninfer_jax import tables  # noqa: E402
from ninfer_jax.config import EngineConfig  # noqa: E402
from ninfer_jax.decoding import SamplingParams  # noqa: E402
from ninfer_jax.engine import Engine  # noqa: E402
from ninfer_jax.engine.prefixes import NoPrefixes  # noqa: E402

CONFIG = EngineConfig(context=16_384, slots=1, draft=3, kv="rk4v4-e8", prefill_chunk=256, prefix_cache="exact", cache_bytes=2 << 30)
TURNS, ANSWER = 30, 48
FORK, COMPACTION, EDITS = 11, 19, (6, 15, 23, 27)
CACHED, SOONER = 0.9, 10  # what it must show: share of tokens from the cache, and times sooner at the end,
LAST = 5  # by the median of so many turns: the machine has others to serve
WORDS = "the king shall speak no more of war but hear what every servant of this house has seen by night and fear it well"
_console = Console()


@dataclass
class Turn:
    """One prompt. cold_s, warm_s: to the first token. settle_s: of idle time after it."""

    number: int
    what: str
    tokens: int
    cached: int
    cold_s: float
    warm_s: float
    settle_s: float


class Agent:
    """The conversation, whose texts are drawn from a seed."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self.tools = [self._tool(name) for name in ("read_file", "write_file", "search", "run", "list", "fetch")]
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self._text(4500)}]
        self._before: list[dict[str, Any]] = []

    def turn(self, number: int) -> str:
        """The next prompt's messages are in `messages`; what kind of turn it is."""
        if number in EDITS:
            self.messages = [*self._before[:-1], self._before[-1] | {"content": self._before[-1]["content"] + self._text(20)}]
            what = "edit"
        elif number == FORK:
            self.messages = [*self.messages[:-4], {"role": "user", "content": self._text(60)}]
            what = "fork"
        elif number == COMPACTION:
            summary = {"role": "user", "content": "Summary: " + self._text(300)}
            self.messages = [self.messages[0], summary, *self.messages[-10:], {"role": "user", "content": self._text(40)}]
            what = "compaction"
        elif number % 3 == 2:
            call = {"type": "function", "function": {"name": "search", "arguments": {"query": self._text(6)}}}
            self.messages[-1] = {"role": "assistant", "content": "", "tool_calls": [call]}
            self.messages.append({"role": "tool", "content": self._text(150)})
            what = "tool result"
        else:
            self.messages.append({"role": "user", "content": self._text(60)})
            what = "question"
        self._before = list(self.messages)
        return what

    def hears(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choice(WORDS.split(), words))

    def _tool(self, name: str) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"query": {"type": "string", "description": self._text(20)}}}
        return {"type": "function", "function": {"name": name, "description": self._text(60), "parameters": parameters}}


def run(engine: Engine) -> list[Turn]:
    """All turns; RuntimeError where a warm answer is not the cold one."""
    agent, prefixes, turns = Agent(), engine.runner.prefixes, []
    params = SamplingParams(temperature=0.0, max_new_tokens=ANSWER)
    for number in range(1, TURNS + 1):
        what = agent.turn(number)
        engine.runner.prefixes = NoPrefixes()
        cold = engine.generate(agent.messages, params, tools=agent.tools)
        engine.runner.prefixes = prefixes
        warm = engine.generate(agent.messages, params, tools=agent.tools)
        if warm.tokens != cold.tokens:
            raise RuntimeError(f"turn {number}: the warm answer is another one than the cold one")
        started = time.perf_counter()
        engine.settle()
        turns.append(
            Turn(
                number,
                what,
                warm.prompt_tokens,
                warm.stats.cached_tokens,
                cold.stats.first_token_s,
                warm.stats.first_token_s,
                time.perf_counter() - started,
            )
        )
        agent.hears(warm.text)
    return turns


def show(engine: Engine, turns: list[Turn]) -> None:
    table = Table(title=f"{engine.device}: seconds to the first token")
    for column in ("turn", "what", "tokens", "cached", "cold", "warm", "sooner", "settled"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for t in turns:
        row = (f"{t.number}", t.what, f"{t.tokens:,}", f"{t.cached:,}", f"{t.cold_s:.3f}", f"{t.warm_s:.3f}")
        table.add_row(*row, f"{t.cold_s / t.warm_s:.1f}x", f"{t.settle_s:.3f}")
    tables.show(_console, table)
    counters = engine.prefix_counters
    assert counters is not None  # the configuration has a cache
    _console.print(
        f"cached: {share(turns):.1%} of all prompt tokens; {sooner(turns):.1f}x sooner, the median of the last {LAST}. "
        f"{counters.stored} checkpoints taken in {counters.snapshot_s:.2f} s, {counters.hits_host} restored in "
        f"{counters.restore_s:.2f} s, {counters.host_bytes:,} bytes of host memory at the end"
    )


def share(turns: list[Turn]) -> float:
    return sum(t.cached for t in turns) / sum(t.tokens for t in turns)


def sooner(turns: list[Turn]) -> float:
    return statistics.median(t.cold_s / t.warm_s for t in turns[-LAST:])


def plot(turns: list[Turn], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    numbers = [t.number for t in turns]
    axes.plot(numbers, [t.cold_s for t in turns], marker="o", label="cold")
    axes.plot(numbers, [t.warm_s for t in turns], marker="o", label="with the cache")
    for t in turns:
        if t.what in ("fork", "compaction", "edit"):
            axes.annotate(
                t.what,
                (t.number, t.warm_s),
                rotation=90,
                fontsize=7,
                ha="center",
                va="top",
                xytext=(0, -8),
                textcoords="offset points",
            )
    axes.set(
        xlabel=f"turn (1: {turns[0].tokens:,} tokens, {turns[-1].number}: {turns[-1].tokens:,})",
        ylabel="seconds to the first token",
    )
    axes.set(yscale="log", ylim=(min(t.warm_s for t in turns) / 3, None))
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    engine = Engine.load("tiny", CONFIG)
    engine.generate("warm up", SamplingParams(temperature=0.0, max_new_tokens=8))
    turns = run(engine)
    show(engine, turns)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(t) for t in turns], indent=1) + "\n")
    if arguments.plot:
        plot(turns, arguments.plot)
    if share(turns) < CACHED or turns[-1].tokens < 8000 or sooner(turns) < SOONER:
        raise SystemExit(f"wanted: {CACHED:.0%} cached, 8,000 tokens and {SOONER}x sooner at the end")


if __name__ == "__main__":
    main()
