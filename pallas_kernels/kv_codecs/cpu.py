"""The KV codecs as words for CPU kernels: a vector into its codes and scales, a stored row back into float32.

The bits are those of `encode` and `decode_stored`: the rotation adds in the same order, scales are divided and rounded as
there, and what follows them is integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.cpu.emit import F32, I8, I32, LANES, Code, Value, View
from pallas_kernels.kv_codecs.constants import FREE_BIT, LARGEST_FP16, LIMIT, ONE
from pallas_kernels.kv_codecs.formats import ROTATION_GROUP, SCALE_GROUP, WORD_DIMS, layout_of
from pallas_kernels.kv_codecs.scale_byte import REBIAS

_LINE = 64  # bytes of a cache line
_TWENTY_FOUR = 0x41800000  # bits of 16.0; with a nibble 16 up: 24 + code


class Part:
    """K or V of a pool inside a kernel: views of its codes `[pages, kv_heads, 64, ...]`, and scales where the format has them."""

    def __init__(self, c: Code, format: str, part: str, leaves: Sequence[View]):
        layout = layout_of(format, part)
        self.c, self.kind, self.dims = c, layout.kind, leaves[0].shape[-1] * layout.dims_per_code
        self.codes = leaves[0]
        self.scales: Any = leaves[1] if len(leaves) > 1 else None

    @property
    def plain(self) -> bool:
        """Whether rows can be read as they are stored."""
        return self.codes.dtype == "float32"

    def ask(self, page: Value, head: Value, row: Value, dim: int | Value = 0, dims: int = LANES) -> None:
        """Asks, into the second cache, for the codes of `dims` dims of a row, from `dim` on (0 where they are not float32)."""
        size = dims * self.codes.itemsize * self.codes.shape[-1] // self.dims
        for at in range(0, max(size, 1), _LINE):
            self.c.prefetch(self.codes.at(page, head, row, dim + at // self.codes.itemsize), level=2)

    def load(self, page: Value, head: Value, row: Value, to: View, at: Value) -> None:
        """The stored row as float32 into row `at` of `to` `[..., head_dim]`, in the stored basis."""
        index = (page, head, row)
        if self.kind == "float":
            self._load_float(index, to, at)
        elif self.kind == "int8":
            self._load_int8(index, to, at)
        else:
            self._load_four_bit(index, to, at)

    def _load_float(self, index: tuple[Value, ...], to: View, at: Value) -> None:
        c = self.c

        def body(i: Value) -> None:
            x = self.codes.load(*index, i, lanes=LANES)
            to.store(x if self.plain else c.from_bf16(x), at, i)

        c.loop(0, to.shape[-1], [], body, step=LANES)

    def _load_int8(self, index: tuple[Value, ...], to: View, at: Value) -> None:
        for group in range(to.shape[-1] // ROTATION_GROUP):
            scale = self.scales.load(*index, group)
            for i in range(group * ROTATION_GROUP, (group + 1) * ROTATION_GROUP, LANES):
                to.store(self.codes.load(*index, i, lanes=LANES).to(I32).to(F32) * scale, at, i)

    def _load_four_bit(self, index: tuple[Value, ...], to: View, at: Value) -> None:
        """s (24 + n) - 24 s: exact, and without a conversion from integers (docs/kv_formats.md)."""
        c = self.c
        words_in_group = ROTATION_GROUP // WORD_DIMS
        shifts = c.constant([4 * i for i in range(WORD_DIMS)] * 2, I32)
        for group in range(to.shape[-1] // ROTATION_GROUP):
            words = self.codes.load(*index, group * words_in_group, lanes=words_in_group)
            scales = decoded_scales(self.scales.load(*index, 2 * group, lanes=2).to(I32, signed=False))
            offsets = scales * -24.0
            base: Any = _TWENTY_FOUR
            if self.kind == "e8":
                base = (words.shr(10) & 1 << 18) | _TWENTY_FOUR  # the half bit, below the code's lowest
                words = (words & ~(1 << FREE_BIT)) | _parity(words) << FREE_BIT
            for i in range(ROTATION_GROUP // LANES):
                octets = [2 * i] * WORD_DIMS + [2 * i + 1] * WORD_DIMS
                nibbles = (words.take(octets).shr(shifts) & 15) << 19
                value = (nibbles | (base if self.kind == "int4" else base.take(octets))).bits(F32)
                own = [i * LANES // SCALE_GROUP] * LANES
                to.store(c.fma(value, scales.take(own), offsets.take(own)), at, group * ROTATION_GROUP + i * LANES)

    def store(self, x: View, page: Value, head: Value, row: Value) -> None:
        """Encodes float32 `[head_dim]`, in the stored basis, into a row."""
        index = (page, head, row)
        if self.kind == "float":
            self._store_float(x, index)
        elif self.kind == "int8":
            self.c.loop(0, x.shape[-1] // ROTATION_GROUP, [], lambda group: self._store_int8(x, index, group))
        else:
            self.c.loop(0, x.shape[-1] // SCALE_GROUP, [], lambda group: self._store_four_bit(x, index, group))

    def _store_float(self, x: View, index: tuple[Value, ...]) -> None:
        def body(i: Value) -> None:
            value = x.load(i, lanes=LANES)
            self.codes.store(value if self.plain else self.c.to_bf16(value), *index, i)

        self.c.loop(0, x.shape[-1], [], body, step=LANES)

    def _store_int8(self, x: View, index: tuple[Value, ...], group: Value) -> None:
        c, start = self.c, group * ROTATION_GROUP
        values = [x.load(start + i, lanes=LANES) for i in range(0, ROTATION_GROUP, LANES)]
        a, b, d, e = (c.abs(v) for v in values)
        largest = c.maximum(c.maximum(a, b), c.maximum(d, e)).max()
        self.scales.store(c.minimum(largest * (1 / 127), LARGEST_FP16), *index, group)
        scale = self.scales.load(*index, group)  # as stored
        inverse = c.select(scale > 0.0, 1.0 / c.select(scale > 0.0, scale, 1.0), 0.0)
        for i, v in enumerate(values):
            code = c.minimum(c.maximum(c.round(v * inverse), -127.0), 127.0)
            self.codes.store(code.to(I32).to(I8), *index, start + i * LANES)

    def _store_four_bit(self, x: View, index: tuple[Value, ...], group: Value) -> None:
        """Stores a group under that of three neighbouring scales which has the smallest squared error, the smallest on a tie."""
        c = self.c
        values = [x.load(group * SCALE_GROUP + i, lanes=LANES) for i in range(0, SCALE_GROUP, LANES)]
        high, low = c.maximum(*values).max(), c.minimum(*values).min()
        sign = c.select(high > -low, c.constant(0x80, I32), 0)
        size = c.maximum(high, -low) * 0.125
        nearest = ((size.bits(I32) + (1 << 19)) >> 20) - (REBIAS >> 20)
        find = _nearest_e8 if self.kind == "e8" else _nearest_int4
        best: tuple[Value, ...] | None = None
        for neighbour in (-1, 0, 1):
            byte = c.minimum(c.maximum(nearest + neighbour, 0), 127) | sign
            scale = decoded_scales(byte)
            inverse = c.constant(float(ONE)) / scale
            found = [find(c, _fixed_point(c, v * inverse)) for v in values]
            cost = found[0][1] + found[1][1]
            new = (cost.lane(0) + cost.lane(WORD_DIMS)).to(F32) * (scale * scale), byte, *(words for words, _ in found)
            if best is None:
                best = new
            else:
                better = new[0] < best[0]
                best = tuple(c.select(better, a, b) for a, b in zip(new, best, strict=True))
        _, byte, *words = best
        self.scales.store(byte, *index, group)
        for i, w in enumerate(words):
            for half in (0, 1):
                self.codes.store(w.lane(half * WORD_DIMS), *index, group * (SCALE_GROUP // WORD_DIMS) + 2 * i + half)


def rotate(c: Code, x: View) -> None:
    """H64 on every 64 of float32 `[head_dim]`, in place: butterflies over neighbours first, as `kv_codecs.rotate`."""

    def body(at: Value) -> None:
        v = [x.load(at + i, lanes=LANES) for i in range(0, ROTATION_GROUP, LANES)]
        for step in (1, 2, 4, 8):
            signs = c.constant([-(1 << 31) if i & step else 0 for i in range(LANES)], I32)
            v = [y.take([i ^ step for i in range(LANES)]) + (y.bits(I32) ^ signs).bits(F32) for y in v]
        for step in (1, 2):
            v = [v[i - step] - v[i] if i & step else v[i] + v[i + step] for i in range(len(v))]
        for i, y in enumerate(v):
            x.store(y * 0.125, at + i * LANES)

    c.loop(0, x.shape[-1], [], body, step=ROTATION_GROUP)


def decoded_scales(byte: Value) -> Value:
    """float32 of scale bytes in int32."""
    return (((byte & 0x7F) << 20) + REBIAS | (byte & 0x80) << 24).bits(F32)


def _fixed_point(c: Code, steps: Value) -> Value:
    return c.round(c.minimum(c.maximum(steps, -LIMIT), LIMIT)).to(I32)


def _parity(words: Value) -> Value:
    """Parity of the lowest bits of nibbles 0..6."""
    low = words & 0x01111111
    for shift in (16, 8, 4):
        low = low ^ low.shr(shift)
    return low & 1


def _octet(x: Value, join: Callable[[Value, Value], Value]) -> Value:
    """Every lane becomes what its octet folds to."""
    for step in (1, 2, 4):
        x = join(x, x.take([i ^ step for i in range(LANES)]))
    return x


def _round_codes(c: Code, target: Value) -> tuple[Value, Value, Value]:
    """Nearest codes in [-8, 7] of fixed-point values, what they miss, and their octets' words."""
    codes = c.minimum(c.maximum((target + ONE // 2) >> 12, -8), 7)
    shifts = c.constant([4 * i for i in range(WORD_DIMS)] * 2, I32)
    words = _octet((codes + 8) << shifts, lambda a, b: a | b)
    return codes, target - (codes << 12), words


def _nearest_int4(c: Code, steps: Value) -> tuple[Value, Value]:
    """Words of two octets and their squared errors in 2^-20 squared steps, both in all lanes of an octet."""
    _, miss, words = _round_codes(c, steps)
    return words, _octet(miss * miss >> 4, lambda a, b: a + b)


def _nearest_e8(c: Code, steps: Value) -> tuple[Value, Value]:
    """Words and costs of the nearest E8 codewords, as `_nearest_int4`; four_bit.py has the search."""
    found = []
    for coset in (0, 1):
        codes, miss, words = _round_codes(c, steps - coset * (ONE // 2))
        one, none = c.spread(1, LANES, I32), c.spread(0, LANES, I32)
        inwards = c.select(codes.equals(7), none, c.select(miss >= 0, one, none))
        up = c.select(codes.equals(-8), one, inwards)
        # What a move by one gains, and below it the dim and the direction: the largest is unique and tells all.
        lane = c.constant([2 * i for i in range(WORD_DIMS)] * 2, I32)
        best = _octet(c.select(up.equals(1), miss, -miss) * 16 + lane + up, c.maximum)
        odd = (_parity(words) ^ words.shr(FREE_BIT)) & 1
        move = ((best & 1) * 2 - 1) << ((best >> 1 & 7) * 4)
        words = (words + odd * move) & ~(1 << FREE_BIT) | coset << FREE_BIT
        error = _octet(miss * miss, lambda a, b: a + b) + odd * (ONE * ONE - (best >> 4) * (2 * ONE))
        found.append((words, error))
    (words, error), (half_words, half_error) = found
    return c.select(half_error < error, half_words, words), c.minimum(error, half_error) >> 4
