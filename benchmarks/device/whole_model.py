"""The whole model with random weights: prefill, decode rounds at several depths, memory against the plan.

Everything runs through the engine's own programs, compiled for its own shapes. What is not like service: pages and recurrent
states hold random numbers, a depth is reached by setting a slot's length, and the tokens mean nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from device.random_model import draw_arrays, fill_pages, parameters_from, place, tables
from device.report import Stage, one_line
from ninfer_jax.config import FULL, LINEAR, PAGE, EngineConfig, ModelConfig, preset, recipe
from ninfer_jax.config.presets import NAMED_IDS
from ninfer_jax.decoding import SamplingParams
from ninfer_jax.programs import PrefillInputs, Programs, RoundOutput, admission
from ninfer_jax.programs.card import workspace_bytes
from ninfer_jax.programs.plan import kv_bytes, nbytes
from ninfer_jax.programs.setup import Setup, resolve
from ninfer_jax.state import State, StateShape

SEED = 0
WARM_UP = 2  # rounds before those that are timed


@dataclasses.dataclass(frozen=True)
class Size:
    """What is run: `marks` of the prefill and `depths` of one slot in tokens, `shared` depths of several slots, rounds timed.

    A depth that leaves no room for the rounds within `context` is reduced by what they need. configurations: (slots, drafts a
    round) in the order of their worth; the first one prefills too and has drafts. preset: its name for `ninfer-jax compile`.
    """

    name: str
    preset: str | None
    model: ModelConfig
    valid_ids: int
    engine: EngineConfig  # of several slots; one slot has its context and no pool
    marks: tuple[int, ...]
    depths: tuple[int, ...]
    shared: tuple[tuple[int, ...], ...]
    rounds: int
    configurations: tuple[tuple[int, int], ...]

    def setup(self, slots: int, draft: int) -> Setup:
        one = {} if slots > 1 else {"pool": None}
        engine = dataclasses.replace(self.engine, slots=slots, draft=draft, **one)
        return resolve(self.model, self.valid_ids, engine, "cpu" if jax.default_backend() == "cpu" else "cuda", recipe("q4"))

    @property
    def setups(self) -> dict[str, Setup]:
        """The configurations by what they are called in results."""
        return {
            f"{slots} slot{'s' * (slots > 1)}, {f'{draft} drafts' if draft else 'plain'}": self.setup(slots, draft)
            for slots, draft in self.configurations
        }


# Its pages fill what a 24 GB card has left beside the weights, for four slots together.
WHOLE = Size(
    name="27B (qwen3_8_27b)",
    preset="qwen3_8_27b",
    model=preset("qwen3_8_27b"),
    valid_ids=NAMED_IDS,
    engine=EngineConfig(context=262_144, slots=4, draft=3, kv="rk4v4-e8", prefill_chunk=1024, pool=360_448, dtype="bfloat16"),
    marks=(1024, 8192, 32_768, 131_072),
    depths=(2048, 32_768, 131_072, 262_144),
    shared=((2048,) * 4, (32_768,) * 4, (262_144, 65_536, 16_384, 15_360)),
    rounds=16,
    configurations=((1, 3), (1, 0), (4, 3), (4, 0)),
)
TINY = Size(
    name="4 layers of small widths",
    preset=None,
    model=ModelConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=128,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL),
        query_heads=4,
        kv_heads=2,
        head_dim=64,
        rotary_dim=16,
        rope_theta=1e4,
        mrope_section=(3, 3, 2),
        gdn_key_heads=2,
        gdn_value_heads=4,
        gdn_key_dim=32,
        gdn_value_dim=32,
        conv_width=4,
        rms_norm_eps=1e-6,
        max_positions=4096,
        tied_embeddings=False,
        mtp_layers=1,
    ),
    valid_ids=290,
    engine=EngineConfig(context=512, slots=2, draft=2, kv="rk4v4-e8", prefill_chunk=64, pool=640, dtype="bfloat16"),
    marks=(64, 192),
    depths=(64, 512),
    shared=((64, 64), (512, 64)),
    rounds=3,
    configurations=((1, 2), (2, 0)),
)


class Compiling:
    """The programs of all configurations, compiled in threads while other things are done that are not timed."""

    def __init__(self, size: Size, threads: int):
        self.size, self.setups = size, size.setups
        self.programs = {name: setup.programs() for name, setup in self.setups.items()}
        self._pool = ThreadPoolExecutor(threads)
        self._futures: dict[tuple[str, str], Future[float]] = {}
        first = next(iter(self.programs))
        for name in self.programs:
            for program in ("decode_round", *(("prefill",) if name == first else ()), "allocate", "admit"):
                self._futures[name, program] = self._pool.submit(self._compile, name, program)

    def _compile(self, name: str, program: str) -> float:
        start = time.perf_counter()
        self.programs[name].compiled(program)
        return time.perf_counter() - start

    @property
    def waiting(self) -> bool:
        return any(not f.done() for f in self._futures.values())

    def wait(self, seconds: float) -> None:
        """Until everything is compiled or has failed, or so long."""
        end = time.perf_counter() + max(seconds, 0)
        while self.waiting and time.perf_counter() < end:
            time.sleep(0.05)

    def ready(self, name: str, seconds: float) -> Programs:
        """The programs of a configuration; RuntimeError where one did not compile or is not done in time."""
        end = time.perf_counter() + max(seconds, 0)
        for (owner, program), future in self._futures.items():
            if owner == name:
                try:
                    future.result(max(end - time.perf_counter(), 0))
                except TimeoutError:
                    raise RuntimeError(f"{program} was not compiled in time") from None
        return self.programs[name]

    def abandon(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def record(self, stage: Stage) -> None:
        for (name, program), future in self._futures.items():
            if not future.done():
                stage.leave_out(f"{program} ({name})", "not compiled within the budget")
            elif (error := future.exception()) is not None:
                stage.record(f"{program} ({name})", {"failed": f"does not compile: {one_line(error)}"})
            else:
                compiled = self.programs[name].compiled(program)
                found = {"compile_s": round(future.result(), 2), "workspace_bytes": workspace_bytes(compiled)}
                memory = compiled.memory_analysis()
                stage.record(f"{program} ({name})", found | {"argument_bytes": memory.argument_size_in_bytes})


class Weights:
    """The drawn arrays of the model with its MTP head; the other models take theirs from them."""

    def __init__(self) -> None:
        self.arrays: dict[str, jax.Array] | None = None

    def draw(self, setup: Setup) -> Mapping[str, Any]:
        start = time.perf_counter()
        self.arrays = jax.block_until_ready(draw_arrays(setup.text_model(), SEED))
        seconds = time.perf_counter() - start
        return {"arrays": len(self.arrays), "bytes": sum(map(nbytes, self.arrays.values())), "draw_s": round(seconds, 2)}

    def of(self, setup: Setup) -> list[jax.Array]:
        return parameters_from(setup.text_model(), self.arrays)


def reach(size: Size, shape: StateShape, depths: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """Depths that leave room for the rounds, that room in tokens, and the rounds that are run in one go."""
    width, count = shape.draft + 1, WARM_UP + size.rounds
    rounds = count * width  # so many tokens at least; a round emits one at least
    # Every one of them may emit `width`, and the last looks as far ahead.
    room = (rounds + 1) * width if shape.draft else rounds + 1
    return tuple(min(d, shape.context - room) for d in depths), room, rounds


class Session:
    """One configuration at work: its programs over the drawn weights and a state of its own."""

    def __init__(self, size: Size, setup: Setup, programs: Programs, weights: Weights, copy_speed: float | None = None):
        self.size, self.setup, self.programs, self.copy_speed = size, setup, programs, copy_speed
        self.parameters = weights.of(setup)
        self.state: State = fill_pages(programs.allocate(), SEED)
        self.slots, self.draft = setup.shape.slots, setup.shape.draft

    @property
    def planned(self) -> dict[str, int]:
        """Bytes that this configuration should take: arrays by their shapes, the largest workspace as compiled."""
        used = ("admit", "decode_round", "prefill") if self.draft and self.slots == 1 else ("admit", "decode_round")
        kv = kv_bytes(self.state)
        parts = {
            "weights": sum(map(nbytes, self.parameters)),
            "kv": kv,
            "state": sum(map(nbytes, jax.tree.leaves(self.state))) - kv,
            "workspace": max(workspace_bytes(self.programs.compiled(name)) or 0 for name in used),
        }
        return parts | {"total": sum(parts.values())}

    def admit(self, lengths: tuple[int, ...], room: int) -> None:
        shape = self.setup.shape
        rows = tables(lengths, room, shape.pages, shape.pages_per_slot, PAGE, SEED)
        for slot, row in enumerate(rows):
            new = admission(slot, row, 1 << 20, SamplingParams(temperature=0.0), SEED, ())
            self.state = self.programs.admit(self.state, new)

    def prefill(self, tokens: int, consumed: int) -> float:
        """Seconds for chunks of random tokens into slot 0 from `consumed` on until it holds `tokens`."""
        chunk, rng = self.programs.chunk, np.random.default_rng(consumed)
        start = time.perf_counter()
        while consumed < tokens:
            ids = rng.integers(0, self.size.valid_ids, chunk).astype(np.int32)
            positions = np.broadcast_to(consumed - 1 + np.arange(chunk + 1, dtype=np.int32), (3, chunk + 1))
            inputs = PrefillInputs(np.int32(0), ids, np.int32(chunk), np.ascontiguousarray(positions))
            self.state, _ = self.programs.prefill(self.parameters, self.state, inputs)
            consumed += chunk
        jax.block_until_ready(self.state)
        return time.perf_counter() - start

    def place(self, lengths: tuple[int, ...]) -> None:
        self.state = place(self.state, lengths, 1, SEED)

    def rounds(self, count: int, drafts: list[jax.Array] | None = None) -> tuple[float, list[RoundOutput]]:
        """Seconds of `count` rounds one after another and what they gave. drafts: int32 `[slots, K]` a round, on the device,
        put in the place of those that the MTP head proposed; it proposes them all the same, at its cost."""
        found = []
        start = time.perf_counter()
        for i in range(count):
            if drafts is not None:
                self.state = self.state._replace(slots=self.state.slots._replace(drafts=drafts[i]))
            self.state, out = self.programs.decode_round(self.parameters, self.state)
            found.append(out)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start, found

    def decode(self, depths: tuple[int, ...]) -> Mapping[str, Any]:
        """Rounds at these depths, a slot each: as drafted, and again with the drafts that the model will accept."""
        # As drafted first, for at least as many tokens as the second run emits: a round gives one at least.
        width, count = self.draft + 1, WARM_UP + self.size.rounds
        depths, room, needed = reach(self.size, self.setup.shape, depths)
        self.admit(depths, room)
        self.place(depths)
        _, first = self.rounds(WARM_UP)
        seconds, outs = self.rounds(self.size.rounds)
        entry = {"depths": list(depths)} | self._told("", seconds, outs)
        if not self.draft:
            return entry
        _, rest = self.rounds(needed - count)
        tokens = emitted(first + outs + rest, self.slots)
        drafts = [
            jnp.asarray(np.stack([row[i * width : i * width + self.draft] for row in tokens]), jnp.int32) for i in range(count)
        ]
        self.place(depths)  # the same start again
        _, first = self.rounds(WARM_UP, drafts)
        seconds, outs = self.rounds(self.size.rounds, drafts[WARM_UP:])
        entry |= self._told("all accepted: ", seconds, outs)
        if any(new != old[: len(new)] for new, old in zip(emitted(first + outs, self.slots), tokens, strict=True)):
            entry["failed"] = "with other drafts a slot emits other tokens"
        return entry

    def _told(self, prefix: str, seconds: float, outs: list[RoundOutput]) -> dict[str, Any]:
        tokens = sum(int(np.asarray(out.emitted).sum()) for out in outs)
        accepted = sum(int(np.asarray(out.accepted).sum()) for out in outs)
        round_s = seconds / len(outs)
        entry = {f"{prefix}ms_per_round": 1e3 * round_s, f"{prefix}tokens_per_s": tokens / seconds}
        if self.draft:
            entry[f"{prefix}accepted"] = accepted / (len(outs) * self.draft * self.slots)
        if self.copy_speed:
            entry[f"{prefix}of_copy_speed"] = self.ideal_bytes() / round_s / self.copy_speed
        if not all(np.isfinite(np.asarray(out.logprob)).all() for out in outs):
            entry["failed"] = "log-probabilities that are not finite"
        return entry

    def ideal_bytes(self) -> int:
        """What a round has to move for its verify pass: every weight but embedding and MTP head once, filled pages once,
        recurrent states read once and written once. What drafting reads is not counted."""
        with_roles = zip(self.parameters, self.programs.roles(), strict=True)
        weights = sum(nbytes(x) for x, role in with_roles if role not in ("embed", "mtp"))
        page = sum(nbytes(leaf) // leaf.shape[0] for pool in self.state.kv for leaf in jax.tree.leaves(pool))
        pages = sum(-(-int(d) // PAGE) for d in np.asarray(self.state.slots.length))
        return weights + page * pages + 2 * sum(map(nbytes, self.state.recurrent))


def emitted(outs: list[RoundOutput], slots: int) -> list[list[int]]:
    """The tokens of every slot over these rounds."""
    found: list[list[int]] = [[] for _ in range(slots)]
    for out in outs:
        tokens, counts = np.asarray(out.tokens), np.asarray(out.emitted)
        for slot in range(slots):
            found[slot] += tokens[slot, : counts[slot]].tolist()
    return found


def measure(stage: Stage, compiling: Compiling, weights: Weights, copy_speed: float | None, peak: Callable[[], int | None]) -> None:
    """The stage: weights, prefill, decode, memory, a configuration after another."""
    size, setups = compiling.size, compiling.setups
    stage.note(
        "Seeded random weights in the formats of recipe q4; pages and recurrent states random; a depth is reached by setting the "
        "slot's length, not by prefilling. A round is timed with its dispatch by the host, tokens are read afterwards."
    )
    stage.note(
        "`all accepted`: the drafts are those tokens that the model was seen to emit from the same start, written over the MTP "
        "head's proposals before each round; it still proposes, at its cost. Real acceptance depends on real weights. "
        "`of_copy_speed`: bytes of weights (without embedding and MTP head), filled pages and recurrent states (read and "
        "written), over the round's time, over the copy speed measured in the same run."
    )
    before = peak()
    with_mtp = next(iter(setups.values()))
    if stage.run("weights", lambda: weights.draw(with_mtp), guess=5) is None:
        return
    for number, (name, setup) in enumerate(setups.items()):
        session: Session | None = None

        def begin() -> Mapping[str, Any]:
            nonlocal session
            session = Session(size, setup, compiling.ready(name, stage.left), weights, copy_speed)
            jax.block_until_ready(session.state)
            return {}

        if stage.run(f"{name}: state", begin, kind="state", guess=5) is None:
            continue
        if number == 0:
            prefill(stage, session)
        cases = [(d,) for d in size.depths] if setup.shape.slots == 1 else list(size.shared)
        for depths in cases:
            label = " + ".join(f"{d:,}" for d in depths)
            kind = f"decode {setup.shape.draft > 0}"
            stage.run(f"{name}: decode at {label}", lambda: session.decode(depths), kind=kind, guess=5)
        memory(stage, name, session, before, before := peak())
        session = None


def prefill(stage: Stage, session: Session) -> None:
    """One prompt of the longest mark; the time to each mark is the time of a prompt of that length."""
    marks, chunk = session.size.marks, session.programs.chunk
    session.admit((marks[-1],), chunk)
    session.prefill(chunk, 0)  # first launches load kernels
    session.admit((marks[-1],), chunk)
    total, at, rate = 0.0, 0, 0.0
    for mark in marks:
        need = 1.5 * (mark - at) / rate if rate else 5.0  # chunks grow dearer with depth

        def segment() -> Mapping[str, Any]:
            nonlocal total, at, rate
            seconds = session.prefill(mark, at)
            total, rate, at = total + seconds, (mark - at) / seconds, mark
            return {"tokens": mark, "prefill_s": total, "tokens_per_s": mark / total, "tokens_per_s_since_last_mark": rate}

        if stage.run(f"prefill of {mark:,}", segment, kind=f"prefill {mark}", guess=need) is None:
            for later in marks[marks.index(mark) + 1 :]:
                stage.leave_out(f"prefill of {later:,}", "the one before it was left out")
            return


def memory(stage: Stage, name: str, session: Session, before: int | None, now: int | None) -> None:
    plan = session.planned
    entry: dict[str, Any] = {f"planned_{k}_bytes": v for k, v in plan.items()}
    if now is None:
        stage.leave_out(f"{name}: peak memory", "this device does not tell (GPU only)")
    else:
        # The process's peak: of this configuration only where it rose.
        entry |= {"peak_bytes": now, "rose_here": before is None or now > before, "peak_over_plan": now / plan["total"]}
    stage.record(f"{name}: memory", entry)
