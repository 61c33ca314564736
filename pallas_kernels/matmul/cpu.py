"""Projections of a few rows on a CPU, over float32 or bfloat16 weights `[out, in]` as checkpoints store them.

Lane l of 8 sums the k = l, l + 8, ... in rising order, the lanes are added by halves, what 8 does not divide comes last: so
for every row and column, whatever stands beside them and whoever computes them. Tiles of columns and rows only decide
which sums are in registers together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cpu

ROWS = 64
LANES = 8
_COLUMNS = 8  # that share a horizontal sum
# Columns whose sums are in registers together, by how many rows are; more rows than that go one such lot after another, over
# columns that are in the cache by then. AVX2 has 16 registers, AVX-512 32.
_FEW, _MANY = (8, 4, 4, 2), (8, 4, 4, 4, 4, 4, 2, 2)
_AHEAD_BYTES = 8192  # of weights, asked for this long before they are multiplied: what comes from memory in 64 ns meanwhile
_PART_BYTES = 1 << 17  # of weights: less is not worth another thread's attention
_PARTS = 32


@dataclasses.dataclass(frozen=True)
class _Shape:
    """rows, k, columns n of the weight; out: of the result (half of them for swiglu)."""

    rows: int
    k: int
    n: int
    out: int
    eps: float
    normed: bool
    swiglu: bool
    added: bool

    @property
    def units(self) -> int:
        return -(-self.out // _COLUMNS)


def linear(
    x: jax.Array,
    w: jax.Array,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    swiglu: bool = False,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """`matmul.linear` on a CPU with the parts around it; x `[1..64, in]` and w `[out, in]` float32 or bfloat16 each."""
    (rows, k), n = x.shape, w.shape[0]
    shape = _Shape(rows, k, n, n // 2 if swiglu else n, eps, norm is not None, swiglu, residual is not None)
    operands = [a for a in (x, w, norm, residual) if a is not None]
    out = jax.ShapeDtypeStruct((rows, shape.out), out_dtype)
    prepared = shape.normed or x.dtype != jnp.float32
    call = cpu.kernel(
        "linear" + "_norm" * shape.normed + "_swiglu" * swiglu + "_add" * shape.added,
        functools.partial(_columns, shape=shape, prepared=prepared),
        operands,
        [out],
        parts=parts_for(w.size * w.dtype.itemsize, shape.units),
        before=functools.partial(_prepare, shape=shape) if prepared else None,
        workspace=[jax.ShapeDtypeStruct((rows, k), jnp.float32)] if prepared else [],
    )
    return call(*operands)[0]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normed rows, as `norms.rms_norm`, of x `[rows, size]`: with the bits of the norm before a product."""
    rows, size = x.shape
    return cpu.kernel("rms_norm", functools.partial(normalise, rows=rows, k=size, eps=eps), [x, weight], [x])(x, weight)[0]


def parts_for(nbytes: int, units: int) -> int:
    """Parts that a product over `nbytes` of weights in so many units of columns is cut into. No result depends on it."""
    return max(1, min(units, _PARTS, nbytes // _PART_BYTES))


def normalise(c: Any, x: Any, norm: Any, out: Any, rows: int, k: int, eps: float) -> None:
    """out float32 `[rows, k]`: x, or its zero-centred RMS norm where `norm` is there, rounded to x's dtype as the model's norm
    is."""
    whole = k - k % 16

    def row(r: Any) -> None:
        scale = inverse_rms(c, x, r, k, eps) if norm is not None else None

        def write(i: Any, lanes: int) -> None:
            v = normed(c, x, norm, scale, r, i, lanes)
            out.store(c.round_bf16(v) if norm is not None and x.dtype == "bfloat16" else v, r, i)

        c.loop(0, whole, [], lambda i: write(i, 16), step=16)
        for i in range(whole, k):
            write(i, 0)

    c.loop(0, rows, [], row)


def inverse_rms(c: Any, x: Any, r: Any, k: int, eps: float) -> Any:
    """1 / sqrt(mean(x^2) + eps) of row r. The squares are summed in 16 lanes, what 16 does not divide after them."""
    whole = k - k % 16

    def square(i: Any, total: Any) -> list[Any]:
        v = x.load(r, i, lanes=16)
        return [c.fma(v, v, total)]

    [total] = c.loop(0, whole, c.zeros(1), square, step=16)
    total = total.sum()
    for i in range(whole, k):
        v = x.load(r, i)
        total = c.fma(v, v, total)
    return c.rsqrt(total / float(k) + eps)


def normed(c: Any, x: Any, norm: Any, scale: Any, r: Any, i: Any, lanes: int) -> Any:
    """x[r, i ...], times `scale` (1 + norm[i ...]) where there is a norm."""
    v = x.load(r, i, lanes=lanes)
    return v if norm is None else v * scale * (norm.load(i, lanes=lanes) + 1.0)


def _prepare(c: Any, *views: Any, shape: _Shape) -> None:
    normalise(c, views[0], views[2] if shape.normed else None, views[-1], shape.rows, shape.k, shape.eps)


def _columns(c: Any, *views: Any, shape: _Shape, prepared: bool) -> None:
    x, w, *left = views
    if shape.normed:
        left.pop(0)
    residual = left.pop(0) if shape.added else None
    out = left.pop(0)
    x = left.pop(0) if prepared else x
    whole = shape.out // _COLUMNS
    rest = shape.out % _COLUMNS
    fitting = _MANY if cpu.here().has("avx512vl") else _FEW
    together = len(fitting)

    def unit(n: Any, columns: int) -> None:
        for first in range(0, shape.rows, together):
            rows = min(together, shape.rows - first)
            tile = functools.partial(_sums, c, x, w, first, rows, wide=fitting[rows - 1], columns=columns, k=shape.k)
            sums = tile(n)
            if shape.swiglu:
                up = tile(n + shape.out)
                sums = [c.silu(g) * u for g, u in zip(sums, up, strict=True)]
            for r, y in enumerate(sums):
                if residual is not None:
                    y = y + _some(c, residual, first + r, n, columns)
                _store(c, out, y, first + r, n, columns)

    if whole:
        start, stop = c.share(whole, max(1, _parts(shape, w)))
        c.loop(start, stop, [], lambda i: unit(i * _COLUMNS, _COLUMNS))
    if rest:
        with c.when(c.part.equals(0)):
            unit(c.value(whole * _COLUMNS), rest)


def _parts(shape: _Shape, w: Any) -> int:
    return parts_for(w.shape[0] * w.shape[1] * w.itemsize, shape.units)


def _some(c: Any, view: Any, row: int, at: Any, columns: int) -> Any:
    """8 lanes, of which the first `columns` are there."""
    if columns == _COLUMNS:
        return view.load(row, at, lanes=_COLUMNS)
    return c.vector([view.load(row, at + i) for i in range(columns)] + c.zeros(_COLUMNS - columns, lanes=0))


def _store(c: Any, out: Any, y: Any, row: int, at: Any, columns: int) -> None:
    if columns == _COLUMNS:
        out.store(y, row, at)
        return
    for i in range(columns):
        out.store(y.lane(i), row, at + i)


def _sums(c: Any, x: Any, w: Any, first: int, rows: int, n: Any, *, wide: int, columns: int, k: int) -> list[Any]:
    """For each of `rows` rows the sums of columns n .. n + 7, 8 lanes, `wide` columns at a time; those beyond `columns` are
    zeros."""
    whole = k - k % LANES
    asked = max(wide, -(-_AHEAD_BYTES // (k * w.itemsize)))
    found: list[list[Any]] = [[] for _ in range(rows)]
    for at in range(0, columns, wide):
        here = min(wide, columns - at)

        def step(i: Any, *sums: Any, at: int = at, here: int = here) -> list[Any]:
            if first == 0:
                # The next columns come into L2 meanwhile, in the order of memory: eight short streams are too many for hardware.
                ahead = w.part(n + (at + asked), 0)
                for line in range(0, here * LANES, 64 // w.itemsize):
                    c.prefetch(ahead.pointer_at(i * here + line), level=2)
            xs = [x.load(first + r, i, lanes=LANES) for r in range(rows)]
            new = list(sums)
            for j in range(here):
                v = w.load(n + (at + j), i, lanes=LANES)
                for r in range(rows):
                    new[j * rows + r] = c.fma(v, xs[r], new[j * rows + r])
            return new

        sums = c.loop(0, whole, c.zeros(here * rows, lanes=LANES), step, step=LANES)
        for r in range(rows):
            found[r] += [sums[j * rows + r] for j in range(here)]
    done = []
    for r in range(rows):
        total = sum_each(found[r] + c.zeros(_COLUMNS - columns, lanes=LANES))
        for i in range(whole, k):
            column = c.vector([w.load(n + j, i) for j in range(columns)] + c.zeros(_COLUMNS - columns, lanes=0))
            total = c.fma(column, x.load(first + r, i), total)
        done.append(total)
    return done


def sum_each(vectors: Sequence[Any]) -> Any:
    """The sum of each of 8 vectors of 8 lanes, by halves as `Value.sum` has it, as one vector."""
    vectors, size = list(vectors), _COLUMNS
    while len(vectors) > 1:
        # Each vector holds len(done) sums in runs of `size` lanes; a run's halves are added.
        half, runs = size // 2, _COLUMNS // size
        low = [run * size + i for run in range(runs) for i in range(half)]
        lows, highs = low + [_COLUMNS + i for i in low], [i + half for i in low] + [_COLUMNS + half + i for i in low]
        vectors = [a.take(lows, b) + a.take(highs, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        size = half
    return vectors[0]
