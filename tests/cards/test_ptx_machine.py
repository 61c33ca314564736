"""The PTX machine finds what a card would not report: stray accesses, warps that do not wait, blocks that collide."""

import numpy as np
import ptx_machine
import pytest

# 64 threads; element i of x to element i + SHIFT of y by way of shared memory, where thread t reads what t ^ OTHER wrote.
COPY = """
.visible .entry copy(.param .u64 copy_param_0, .param .u64 copy_param_1)
.reqntid 64, 1, 1
{
    .reg .b32 %r<9>;
    ld.param.b64 %rd1, [copy_param_0];
    ld.param.b64 %rd2, [copy_param_1];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, STRIDE, %r1;
    mul.wide.s32 %rd3, %r3, 4;
    add.s64 %rd4, %rd1, %rd3;
    mov.u32 %r4, 0x0; ld.global.b32 { %r4 }, [ %rd4 + 0 ];
    mov.b64 %rd5, global_smem;
    mul.wide.u32 %rd6, %r1, 4;
    add.s64 %rd7, %rd5, %rd6;
    st.shared.b32 [%rd7], {%r4};
    BARRIER
    xor.b32 %r5, %r1, OTHER;
    mul.wide.u32 %rd8, %r5, 4;
    add.s64 %rd9, %rd5, %rd8;
    ld.shared.b32 {%r6}, [%rd9];
    add.s64 %rd10, %rd2, %rd3;
    setp.lt.s32 %p1, %r3, COUNT;
    @%p1 st.global.b32 [ %rd10 + SHIFT ], { %r6 };
    ret;
}
"""


def copy(stride=64, barrier="bar.sync 0;", other=63, count=128, shift=0):
    text = COPY
    for name, value in dict(STRIDE=stride, BARRIER=barrier, OTHER=other, COUNT=count, SHIFT=shift).items():
        text = text.replace(name, str(value))
    x = np.arange(128, dtype=np.float32)
    return x, ptx_machine.run(text, [x, np.zeros(128, np.float32)], grid=(2, 1))[1]


def test_results_and_masks():
    x, y = copy(count=70)
    want = x.reshape(2, 64)[:, ::-1].reshape(-1)
    np.testing.assert_array_equal(y, np.where(np.arange(128) < 70, want, 0))


def test_a_warp_may_read_its_own_words_without_a_barrier():
    copy(other=31, barrier="")
    with pytest.raises(AssertionError, match="a warp or block reads what another wrote"):
        copy(other=63, barrier="")


@pytest.mark.parametrize("change", [dict(shift=4), dict(stride=96)])
def test_stray_accesses_are_found(change):
    with pytest.raises(AssertionError, match="access outside every array"):
        copy(**change)


def test_blocks_that_write_the_same_words_are_found():
    with pytest.raises(AssertionError, match="a warp or block writes what another wrote"):
        copy(stride=32)


def test_approximate_and_directed_roundings():
    half = np.float64(2.0) ** -25
    for suffix, exact, want in (("rm", 1 - half, 1 - 2.0**-24), ("rz", -1 - half, -1), ("rn", 1 + half, 1)):
        assert ptx_machine._round(np.array([exact]), (suffix, "f32"))[0] == np.float32(want)
