"""The body of `triton_kernel.decode`, in Triton's language. Imported only where Triton is installed.

It is one function: inside Triton's interpreter, a kernel cannot call others that were not made for it.
"""

# pyright: reportInvalidTypeForm=false
# (Triton reads the annotations of its constants, and its module is a variable here.)

from __future__ import annotations

import importlib

# Not import statements: Triton comes with an extra, never with the plain installation.
triton = importlib.import_module("triton")
tl = importlib.import_module("triton.language")


@triton.jit
def add(a, b):
    """a + b, for reductions."""
    return a + b


@triton.jit
def decode(
    x,
    words,
    scales,
    unit,
    norm,
    residual,
    out,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    PLANES: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SWIGLU: tl.constexpr,
    EPS: tl.constexpr,
    UNPACK: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """x bf16 [ROWS, K], words int16 [TILES * GROUP / 32, PADDED * 32], scales [TILES, PADDED] int32 or int16, unit float32
    [PADDED], norm bf16 [K] or None, residual bf16 [ROWS, N] or None, out [ROWS, N]. PADDED counts columns of gate and up.
    UNPACK: PTX of each plane, ONE_PLUS: PTX of x (1 + w), both on two elements at a time. SCALE: PTX of each plane's scale.
    """
    at = tl.program_id(0) * COLUMNS
    row = tl.arange(0, 16)[:, None]
    column = at + tl.arange(0, COLUMNS)
    k = tl.arange(0, GROUP)
    block = tl.arange(0, GROUP // 32)[:, None] * (PADDED * 32) + at * 32 + tl.arange(0, COLUMNS * 32)[None]
    sums = tl.full((16, COLUMNS), 0, tl.float32)
    up = tl.full((16, COLUMNS), 0, tl.float32)
    products = tl.full((16, 16), 0, tl.float32)
    following = tl.load(scales + column).to(tl.int32)
    for t in range(TILES):
        tile = words + t * (GROUP // 32 * PADDED * 32) + block
        word = tl.load(tile)
        if SWIGLU:
            word_up = tl.load(tile + N * 32)
            packed = tl.load(scales + t * PADDED + column).to(tl.int32)
            packed_up = tl.load(scales + t * PADDED + N + column).to(tl.int32)
        else:
            # A tile ahead, so that nothing waits for it; SwiGLU has no registers left for that.
            packed = following
            following = tl.load(scales + tl.minimum(t + 1, TILES - 1) * PADDED + column).to(tl.int32)
        for j in tl.static_range(PLANES):
            g = t * PLANES + j
            source = x + row * K + g * GROUP + k[None]
            # Masks cost instructions: only where something can be missing.
            if K % (GROUP * PLANES):
                a = tl.load(source, mask=(row < ROWS) & (g * GROUP + k < K)[None], other=0)
            elif ROWS < 16:
                a = tl.load(source, mask=row < ROWS, other=0)
            else:
                a = tl.load(source)
            if norm is not None:
                # The diagonal of x x^T: the sums of squares, at a tensor core's price and without reading x again.
                products = tl.dot(a, tl.trans(a), products)
                if K % (GROUP * PLANES):
                    w = tl.load(norm + g * GROUP + k, mask=g * GROUP + k < K, other=0)
                else:
                    w = tl.load(norm + g * GROUP + k)
                w = tl.broadcast_to(w[None], (16, GROUP))
                a = tl.inline_asm_elementwise(ONE_PLUS, "=r,r,r", [a, w], tl.bfloat16, is_pure=True, pack=2)
            codes = tl.inline_asm_elementwise(UNPACK[j], "=r,r", [word], tl.bfloat16, is_pure=True, pack=2)
            # The order of storage to [GROUP, COLUMNS]: that of a tensor core's operand, so nothing moves.
            codes = tl.permute(tl.reshape(codes, (GROUP // 32, COLUMNS // 8, 8, 4, 2, 2, 2)), (0, 4, 5, 3, 6, 1, 2))
            scale = tl.inline_asm_elementwise(SCALE[j], "=r,r", [packed], tl.float32, is_pure=True, pack=1)
            sums += tl.dot(a, tl.reshape(codes, (GROUP, COLUMNS))) * scale[None]
            if SWIGLU:
                codes = tl.inline_asm_elementwise(UNPACK[j], "=r,r", [word_up], tl.bfloat16, is_pure=True, pack=2)
                codes = tl.permute(tl.reshape(codes, (GROUP // 32, COLUMNS // 8, 8, 4, 2, 2, 2)), (0, 4, 5, 3, 6, 1, 2))
                scale = tl.inline_asm_elementwise(SCALE[j], "=r,r", [packed_up], tl.float32, is_pure=True, pack=1)
                up += tl.dot(a, tl.reshape(codes, (GROUP, COLUMNS))) * scale[None]
    sums *= tl.load(unit + column)[None]
    if SWIGLU:
        up *= tl.load(unit + N + column)[None]
    if norm is not None:
        squares = tl.reduce(tl.where(row == tl.arange(0, 16)[None], products, 0), 1, add)
        factor = tl.rsqrt(squares / K + EPS)[:, None]
        sums *= factor
        up *= factor
    if SWIGLU:
        sums = sums / (1 + tl.exp(-sums)) * up
    inside = (row < ROWS) & (column[None] < N)
    if residual is not None:
        sums += tl.load(residual + row * N + column[None], mask=inside, other=0).to(tl.float32)
    tl.store(out + row * N + column[None], sums.to(out.dtype.element_ty), mask=inside)
