"""Times on the GPU that is here, beside the speed at which the same GPU copies memory in the same run; without a GPU,
times of CPU kernels beside the speed at which all cores read.

One program makes many calls of a case, so that starting programs costs nothing. The calls go round several copies of
the arguments that together exceed the L2 cache, as the layers of a model do: no call finds its weights there.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import targets
from pallas_kernels.lab.registry import Case

RUNS = 20  # timed runs of a program
PROGRAM_SECONDS = 4e-3  # about what a program should take, so that its start is a small part
MOST_CALLS, MOST_COPIES = 256, 64
UNKNOWN_L2 = 128 * 2**20  # of a card without a description: as much as any has


@dataclasses.dataclass(frozen=True)
class Timing:
    """Measured. bytes: the case's ideal ones; median_us: of a call; spread: (90th percentile - 10th) / median over runs;
    gb_s: those bytes over the median; copy_gb_s: bytes read and written by a large copy, the same way (on a CPU: read by a
    sum on all cores); fraction: of the two."""

    op: str
    case: str
    device: str
    jax: str
    backend: str
    date: str
    calls: int
    copies: int
    bytes: int
    median_us: float
    spread: float
    gb_s: float
    copy_gb_s: float
    fraction: float

    def json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def require_gpu(command: str, instead: str = "") -> None:
    """RuntimeError where JAX sees no GPU; `instead` ends its line."""
    if jax.default_backend() != "gpu":
        raise RuntimeError(f"{command} needs a GPU, and JAX sees none here (its backend is {jax.default_backend()}){instead}")


def run(case: Case, copy_speed: float, config: Any = None) -> Timing:
    """Time a case; `copy_speed` in bytes/s, see `copy_bytes_per_second`."""
    device = jax.devices()[0]
    arguments = getattr(case, "fill", case.sample)(jax.random.key(0))
    copies = copies_needed(sum(leaf.nbytes for leaf in jax.tree.leaves(arguments)), case.ideal_bytes, l2_bytes())
    calls = calls_needed(case.ideal_bytes / copy_speed, copies)
    call = functools.partial(case.call, config=config) if config is not None else case.call
    program = Program.of(call, arguments, getattr(case, "donate", ()), calls // copies)
    changing, fixed, shared = program.split(arguments)
    copied = lambda tree: [tree] + [jax.tree.map(jnp.copy, tree) for _ in range(copies - 1)]  # noqa: E731
    median, spread = timed(program, copied(changing), copied(fixed), shared)
    speed = case.ideal_bytes / (median / calls)
    return Timing(
        op=case.op,
        case=case.name,
        device=device.device_kind,
        jax=jax.__version__,
        backend=device.client.platform_version.splitlines()[0],
        date=datetime.date.today().isoformat(),
        calls=calls,
        copies=copies,
        bytes=case.ideal_bytes,
        median_us=median / calls * 1e6,
        spread=spread,
        gb_s=speed / 1e9,
        copy_gb_s=copy_speed / 1e9,
        fraction=speed / copy_speed,
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """A case as a program: `rounds` times a call for every copy of the arguments.

    A compiler would merge equal calls and leave out those without use. So one small argument, which the copies share,
    becomes in each round a sum with something that depends on all results before, and is zero: one or two small launches a round.
    """

    call: Callable[..., Any]
    tree: Any  # of the argument list
    donated: tuple[int, ...]  # leaves updated in place
    shared: int  # the leaf that carries the dependence
    rounds: int

    @classmethod
    def of(cls, call: Callable[..., Any], arguments: Sequence[Any], donate: Sequence[int], rounds: int) -> Program:
        numbers = iter(range(len(jax.tree.leaves(arguments))))
        parts = [[next(numbers) for _ in jax.tree.leaves(a)] for a in arguments]
        leaves, tree = jax.tree.flatten(list(arguments))
        donated = tuple(i for position in donate for i in parts[position])
        floats = [i for i, a in enumerate(leaves) if i not in donated and jnp.issubdtype(a.dtype, jnp.floating)]
        return cls(call, tree, donated, min(floats, key=lambda i: math.prod(leaves[i].shape)), rounds)

    def split(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
        """One copy's leaves: updated in place; the others, None where they are not one of them; the shared one."""
        leaves = jax.tree.leaves(list(arguments))
        other = [None if i in (*self.donated, self.shared) else a for i, a in enumerate(leaves)]
        return [leaves[i] for i in self.donated], other, leaves[self.shared]

    def __call__(self, changing: list[list[Any]], fixed: list[list[Any]], shared: Any) -> tuple[Any, Any]:
        """The last round's results, and `changing` as the calls left it; `changing` and `fixed` as from `split`, of every
        copy."""
        changing = list(changing)
        for number in range(self.rounds):
            results = []
            for copy, others in enumerate(fixed):
                leaves = list(others)
                leaves[self.shared] = shared
                for i, value in zip(self.donated, changing[copy], strict=True):
                    leaves[i] = value
                out = jax.tree.leaves(self.call(*self.tree.unflatten(leaves)))
                # The first results of the right shapes and types are the arguments updated in place.
                changing[copy] = [_take(out, like) for like in changing[copy]]
                results += out
            if number + 1 < self.rounds and results:
                hits = [jnp.where(_first(r) == 77, 1, 0) for r in results]
                shared = shared + (functools.reduce(operator.add, hits) // (1 + len(hits))).astype(shared.dtype)
        return results, changing


def _take(results: list[Any], like: Any) -> Any:
    return results.pop(next(i for i, r in enumerate(results) if (r.shape, r.dtype) == (like.shape, like.dtype)))


def _first(x: jax.Array) -> jax.Array:
    return jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())


def copies_needed(argument_bytes: int, touched_bytes: int, l2: int) -> int:
    """Copies of the arguments so that a round touches three times the L2 cache, as far as 64 copies or 4 GB go."""
    return max(1, min(math.ceil(3 * l2 / touched_bytes), MOST_COPIES, 4 * 10**9 // argument_bytes))


def calls_needed(seconds: float, copies: int) -> int:
    """Whole rounds of calls of at least `seconds` each that fill a program."""
    return copies * math.ceil(min(PROGRAM_SECONDS / seconds, MOST_CALLS) / copies)


def l2_bytes() -> int:
    """Bytes of the L2 cache of the device that is there; a guess for an unknown one."""
    known = targets.of_device(jax.devices()[0].device_kind)
    return targets.get(known).l2_bytes if known else UNKNOWN_L2


def timed(program: Program, changing: Any, fixed: Any, shared: Any) -> tuple[float, float]:
    """Median seconds of a run, and (90th percentile - 10th) / median."""
    run = jax.jit(program.__call__, donate_argnums=0)
    for _ in range(3):  # compiles, then lets the clocks rise
        _, changing = jax.block_until_ready(run(changing, fixed, shared))
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        _, changing = jax.block_until_ready(run(changing, fixed, shared))
        seconds.append(time.perf_counter() - start)
    deciles = statistics.quantiles(seconds, n=10)
    median = statistics.median(seconds)
    return median, (deciles[-1] - deciles[0]) / median


def copy_bytes_per_second(size: int = 2**30) -> float:
    """Bytes read and written a second by rewriting `size` bytes on the device: what memory gives the simplest kernel."""
    x, one = jnp.zeros(size // 4, jnp.uint32), jnp.ones((), jnp.float32)
    program = copy_program(x, one)
    changing, fixed, shared = program.split([x, one])
    median, _ = timed(program, [changing], [fixed], shared)
    return 2 * size * program.rounds / median


def read_bytes_per_second(size: int = 2**28) -> float:
    """Bytes read a second by a sum over `size` bytes on all cores of a CPU: what memory gives the simplest kernel."""
    from pallas_kernels import cpu

    parts, line = 64, 64
    x = jnp.zeros(size // 4, jnp.float32)

    def total(c: Any, x: Any, out: Any) -> None:
        first, last = c.share(x.shape[0] // line, parts)

        def add(i: Any, *sums: Any) -> list[Any]:
            return [s + x.load(i * line + 16 * n, lanes=16) for n, s in enumerate(sums)]

        sums = c.loop(first, last, c.zeros(4), add)
        added: Any = functools.reduce(operator.add, sums)
        out.store(added.sum(), c.part)

    call = jax.jit(cpu.kernel("plain_sum", total, [x], [jax.ShapeDtypeStruct((parts,), jnp.float32)], parts=parts))
    seconds = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        jax.block_until_ready(call(x))
        seconds.append(time.perf_counter() - start)
    return size / statistics.median(seconds[1:])


def copy_program(x: Any, one: Any) -> Program:
    """Reads and writes all of x eight times. One is added each time, so that the compiler can leave none out."""
    return Program.of(lambda x, one: jax.lax.optimization_barrier(x + one.astype(x.dtype)), [x, one], (0,), rounds=8)


def table(found: list[Timing]) -> str:
    """Timings as lines of text, a header above."""
    of = "of sum" if found and found[0].device == "cpu" else "of copy"
    lines = [f"{'case':42} {'MB':>8} {'us':>9} {'spread':>7} {'GB/s':>7} {of:>7}"]
    for t in found:
        lines.append(
            f"{t.op + '/' + t.case:42.42} {t.bytes / 1e6:8.2f} {t.median_us:9.1f} {t.spread:7.1%} {t.gb_s:7.1f} {t.fraction:7.1%}"
        )
    return "\n".join(lines)
