"""No program ever reads, copies or converts a whole page pool: a step costs what its tokens cost, whatever the context.

A pool gets a number of pages that no other array has as a dimension. In the optimised HLO, everything of that size must then
be handed through untouched or be written in place.
"""

import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.config import FULL, LINEAR, EngineConfig, ModelConfig
from ninfer_jax.model import TextModel
from ninfer_jax.programs import Programs
from ninfer_jax.state import state_shape, state_struct
from pallas_kernels.decode_attention import reference as decode_reference
from pallas_kernels.kv_codecs import FORMATS
from pallas_kernels.kv_pages import PAGE, append, pages_struct
from pallas_kernels.prefill_attention import reference as prefill_reference

PAGES = 1009
# What may have a pool as its result. A fusion counts by what is inside it, which is listed in the same text.
HARMLESS = {"parameter", "get-tuple-element", "bitcast", "fusion", "scatter", "dynamic-update-slice"}


def of_pool_size(hlo: str) -> Iterator[tuple[str, str]]:
    """(opcode, line) of every instruction whose result is one array with PAGES among its dimensions."""
    for line in hlo.splitlines():
        found = re.match(r"\s*(?:ROOT )?%?[\w.\-]+ = (\w+\[[\d,]*\])(?:\{[^}]*\})? ([\w\-]+)\(", line)
        if found and str(PAGES) in re.split(r"[\[\],]", found.group(1)):
            yield found.group(2), line.strip()


def check(compiled: jax.stages.Compiled, state: object) -> None:
    """`state` was donated: all of it is reused, nothing of a pool's size is made, and the temporaries hold no part of one."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if PAGES in leaf.shape]
    instructions = list(of_pool_size(compiled.as_text()))
    assert sum(opcode == "parameter" for opcode, _ in instructions) >= len(leaves)  # the text was understood
    assert [line for opcode, line in instructions if opcode not in HARMLESS] == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(nbytes(leaf) for leaf in jax.tree.leaves(state))
    assert memory.temp_size_in_bytes < max(nbytes(leaf) for leaf in leaves)


def nbytes(leaf: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize


def tiny_model() -> ModelConfig:
    return ModelConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        layer_types=(LINEAR, FULL),
        query_heads=2,
        kv_heads=2,
        head_dim=64,
        rotary_dim=16,
        rope_theta=1e4,
        mrope_section=(3, 3, 2),
        gdn_key_heads=1,
        gdn_value_heads=2,
        gdn_key_dim=16,
        gdn_value_dim=16,
        conv_width=4,
        rms_norm_eps=1e-6,
        max_positions=262_144,
        tied_embeddings=True,
        mtp_layers=1,
    )


@pytest.mark.parametrize("kernels", ["cpu", None])
def test_programs_copy_no_pool(kernels: str | None) -> None:
    """In the format that is the hardest for a CPU; the other formats' reads and writes are compiled one by one below."""
    model = tiny_model()
    shape = state_shape(model, EngineConfig(context=256, draft=1, pool=(PAGES - 1) * PAGE), "bf16", jnp.float32)
    assert shape.pages == PAGES
    programs = Programs(TextModel(model, jnp.float32, mtp=True), shape, 64, 96, "cpu", kernels)
    for name in ["prefill", "begin", "decode_round", "snapshot", "restore", "write_page", "copy_page"]:
        check(programs.compiled(name), state_struct(model, shape))
    read = programs.compiled("read_page")
    assert {opcode for opcode, _ in of_pool_size(read.as_text())} == {"parameter"}
    assert read.memory_analysis().temp_size_in_bytes < PAGES


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_append_writes_in_place(format: str, tokens: int) -> None:
    """At one token XLA makes a dynamic-update-slice of it, at several a scatter."""
    pool = pages_struct(format, PAGES, 2, 128)
    rows = jax.ShapeDtypeStruct((tokens, 2, 128), jnp.float32)
    table, positions = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((tokens, 4), (tokens,)))
    function = jax.jit(append, static_argnames="format", donate_argnums=0)
    check(function.lower(pool, rows, rows, table, positions, format).compile(), pool)


@pytest.mark.parametrize("format", ["f32", "int8", "rk4v4-e8"])
def test_attention_decodes_no_pool(format: str) -> None:
    pool = pages_struct(format, PAGES, 2, 128)

    def both(pool, q, table, number):
        decoded = decode_reference.attend(
            q[None], pool, table[None], jnp.stack([number, number + 1])[None], number[None] + 2, format
        )
        return pool, decoded, prefill_reference.attend(q, pool, table, number, number, format)

    q, table, number = (jax.ShapeDtypeStruct(*x) for x in (((2, 4, 128), jnp.float32), ((7,), jnp.int32), ((), jnp.int32)))
    check(jax.jit(both, donate_argnums=0).lower(pool, q, table, number).compile(), pool)


def test_the_check_sees_a_copy() -> None:
    """What it is there to find, in forms that no compiler can do in place: a pool kept beside the new one, and one moved."""
    pool = jax.ShapeDtypeStruct((PAGES, 64), jnp.bfloat16)
    for spoiled in (lambda pool: (pool.at[5].set(0), pool), lambda pool: pool[::-1].at[5].set(0)):
        with pytest.raises(AssertionError):
            check(jax.jit(spoiled, donate_argnums=0).lower(pool).compile(), pool)
