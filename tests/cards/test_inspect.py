"""Compiling for cards that are not there, and reading the machine code: small functions whose facts are known."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import deviceless, inspect, launch, targets

BF16 = jnp.bfloat16


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def _product(a, b):
    """[64, k] @ [k, 32] by one block of 4 warps, 64 deep a step."""

    def kernel(a_ref, b_ref, o_ref):
        def step(i, acc):
            at = pl.ds(i * 64, 64)
            return acc + launch.dot(launch.load(a_ref, (slice(None), at)), launch.load(b_ref, (at, slice(None))))

        o_ref[...] = jax.lax.fori_loop(0, a.shape[1] // 64, step, jnp.zeros((64, 32), jnp.float32))

    out = struct(64, 32, dtype=jnp.float32)
    return launch.launch(
        kernel,
        name="product",
        grid=(1,),
        in_specs=[launch.whole(a), launch.whole(b)],
        out_specs=launch.whole(out),
        out_shape=out,
        num_warps=4,
        num_stages=2,
    )(a, b)


@pytest.mark.parametrize("target", targets.names())
def test_a_kernel_compiles_for_every_card(target):
    report = inspect.report(_product, [struct(64, 512), struct(512, 32)], target)
    assert report.launches == 1 and report.copies == 0 and report.temporary_bytes == 0
    kernel = report.kernels["product"]
    assert (kernel.blocks, kernel.threads, kernel.spill_bytes) == (1, 128, 0)
    assert 16 < kernel.registers <= 255
    assert 0 < kernel.smem_bytes <= report.target.smem_per_block
    assert kernel.tensor_core_instructions > 0
    assert report.argument_bytes == 2 * 2 * 64 * 512 - 2 * 512 * 32


def test_executed_instructions_grow_with_the_loop():
    """m16n8k16 products a warp: (64 / 16)(32 / 8)(k / 16) / 4 warps."""
    short, long = (inspect.report(_product, [struct(64, k), struct(k, 32)]).kernels["product"] for k in (2048, 4096))
    assert long.executed(4096 // 4) - short.executed(2048 // 4) == pytest.approx(
        sum(loop.instructions for loop in long.loops) * (1024 - 512) / sum(loop.tensor_ops for loop in long.loops)
    )
    with pytest.raises(ValueError, match="give tensor_ops or trips"):
        long.executed()


def test_donated_buffers_are_aliased():
    report = inspect.report(lambda x, y: x + y, [struct(4096), struct(4096)], donate=(0,))
    assert report.aliased_bytes == 8192 and report.launches == 1


SASS = """
.text.f:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, [R2.64] ;
.L_x_0:
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0030*/              @!P0 IADD3 R2, R2, 0x10, RZ ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
        /*0050*/                   ISETP.GE.AND P0, PT, R2, R3, PT ;
        /*0060*/              @!P0 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_2:
        /*0080*/                   BRA `(.L_x_2);
        /*0090*/                   NOP;
//--------------------- .nv.info
"""


def test_loops_are_found_in_machine_code():
    straight, loops = inspect._loops(SASS, "f")
    assert dict(straight) == {"MOV": 1, "EXIT": 1}
    assert [loop.instructions for loop in loops] == [3, 3]
    assert [loop.tensor_ops for loop in loops] == [0, 1]
    kernel = inspect.Kernel("f", 1, 1, 32, 16, 0, 0, straight, loops)
    assert kernel.executed(trips=(10, 70)) == 2 + 10 * 3 + 70 * 3


def test_occupancy_by_each_limit():
    card = targets.get("rtx4090")
    kernel = lambda threads, registers, smem: inspect.Kernel("f", 1, 1, threads, registers, 0, smem, {}, ())  # noqa: E731
    assert kernel(256, 32, 0).occupancy(card) == 1.0
    assert kernel(128, 255, 0).blocks_per_sm(card) == 2
    assert kernel(128, 32, 49152).blocks_per_sm(card) == 2
    assert kernel(32, 16, 0).blocks_per_sm(card) == 24


def test_unknown_card_and_missing_wheels_are_said_in_one_line(monkeypatch):
    with pytest.raises(ValueError, match="target: unknown card 'rtx2080'; known: a100, h200, rtx3090, rtx4090, rtx5090"):
        deviceless.compile_for(lambda x: x, [struct(4)], "rtx2080")
    monkeypatch.setattr(deviceless, "_installed", lambda module: module != "triton")
    with pytest.raises(RuntimeError, match=r"needs triton; install the extra: pip install 'ninfer-jax\[aot\]'"):
        deviceless.require_tools()
