"""All programs of an engine, as data: each one's function, the shapes it takes, and what it may overwrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.config import ModelConfig
from ninfer_jax.decoding import SamplingParams
from ninfer_jax.model import TextModel
from ninfer_jax.programs.decode import RoundOutput, begin, decode_round
from ninfer_jax.programs.pending import settle
from ninfer_jax.programs.prefill import PrefillInputs, prefill_chunk
from ninfer_jax.programs.slots import admission, admit, constrain, release
from ninfer_jax.programs.snapshots import Snapshot, copy_page, page_bytes, read_page, restore, snapshot, snapshot_struct, write_page
from ninfer_jax.programs.step import step
from ninfer_jax.state import State, StateShape, allocate_state, state_struct

# Rows of the prefill program for few tokens.
SHORT = 128
_integer = jax.ShapeDtypeStruct((), jnp.int32)
# Structures of results: what stands at the leaves does not matter.
_leaf: Any = 0
_round: Any = RoundOutput(*[_leaf] * len(RoundOutput._fields))


@dataclass(frozen=True)
class Given:
    """All that fixes an engine's programs. build: parameters -> the model; parameters: their shapes; chunk: rows of a prefill
    call; short: of one for few tokens, None where `chunk` are few; valid_ids: ids that the tokenizer names."""

    build: Callable[[Sequence[jax.Array]], TextModel]
    parameters: list[jax.ShapeDtypeStruct]
    config: ModelConfig
    shape: StateShape
    chunk: int
    valid_ids: int

    @property
    def short(self) -> int | None:
        return SHORT if self.chunk > SHORT else None

    @cached_property
    def state(self) -> State:
        return state_struct(self.config, self.shape)

    @cached_property
    def snapshot(self) -> Snapshot:
        return snapshot_struct(self.config, self.shape)

    def with_model(self, function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
        """`function(model, ...)` as a function of (parameters, ...)."""
        return lambda parameters, *rest: function(self.build(parameters), *rest, **fixed)


@dataclass(frozen=True)
class Program:
    """function, arguments (shapes) and result (any tree of its structure) are those for a `Given`.

    donated: positions of the arguments that it may overwrite. eager: compiled before the engine serves; the others when first
    asked for. serving: runs beside weights and state while the engine serves, so its workspace counts. staged: its result is a
    snapshot, for which there is room beside the workspace. made: whether there is such a program at all.
    """

    name: str
    function: Callable[[Given], Callable[..., Any]]
    arguments: Callable[[Given], tuple[Any, ...]]
    result: Callable[[Given], Any]
    donated: tuple[int, ...] = ()
    eager: bool = True
    serving: bool = True
    staged: bool = False
    made: Callable[[Given], bool] = lambda given: True


def _state(given: Given) -> Any:
    return given.state


def _prefill(given: Given) -> Callable[..., Any]:
    return given.with_model(prefill_chunk, kv=given.shape.kv)


def _prefill_arguments(given: Given, rows: int | None) -> tuple[Any, ...]:
    assert rows is not None  # there is such a program
    tokens, positions = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows,), (3, rows + 1)))
    return given.parameters, given.state, PrefillInputs(*_any(_integer, tokens, _integer, positions))


def _head(given: Given) -> Callable[..., Any]:
    return given.with_model(lambda model, hidden: model.logits(hidden))


def _head_arguments(given: Given, rows: int | None) -> tuple[Any, ...]:
    assert rows is not None  # there is such a program
    return given.parameters, jax.ShapeDtypeStruct((rows, given.config.hidden_size), given.shape.dtype)


def _admission(given: Given) -> Any:
    example = admission(0, np.zeros(given.shape.pages_per_slot, np.int32), 1, SamplingParams(), 0, ())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), example)


def _masks(given: Given) -> tuple[Any, ...]:
    slots, masks = given.state.slots, given.state.masks
    return jax.ShapeDtypeStruct(masks.words.shape[1:], masks.words.dtype), jax.ShapeDtypeStruct(slots.drafts.shape[1:], jnp.int32)


def _any(*values: Any) -> tuple[Any, ...]:
    return values


CATALOGUE: tuple[Program, ...] = (
    # The state is allocated by a program too: one kernel launch instead of one compilation an array.
    Program("allocate", lambda g: partial(allocate_state, g.config, g.shape), lambda g: (), _state, serving=False),
    Program("admit", lambda g: admit, lambda g: (g.state, _admission(g)), _state, donated=(0,)),
    Program("release", lambda g: release, lambda g: (g.state, _integer), _state, donated=(0,)),
    Program("constrain", lambda g: constrain, lambda g: (g.state, _integer, *_masks(g)), _state, donated=(0,)),
    Program("prefill", _prefill, lambda g: _prefill_arguments(g, g.chunk), lambda g: (g.state, 0), donated=(1,)),
    # For a prompt of few tokens, and what is left of a long one.
    Program(
        "prefill_short",
        _prefill,
        lambda g: _prefill_arguments(g, g.short),
        lambda g: (g.state, 0),
        donated=(1,),
        made=lambda g: g.short is not None,
    ),
    Program(
        "begin",
        lambda g: g.with_model(begin, kv=g.shape.kv, valid_ids=g.valid_ids),
        lambda g: (g.parameters, g.state, _integer),
        lambda g: (g.state, _round),
        donated=(1,),
    ),
    Program(
        "decode_round",
        lambda g: g.with_model(decode_round, kv=g.shape.kv, valid_ids=g.valid_ids),
        lambda g: (g.parameters, g.state),
        lambda g: (g.state, _round),
        donated=(1,),
    ),
    Program(
        "snapshot",
        lambda g: partial(snapshot, width=g.config.conv_width),
        lambda g: (g.state, _integer),
        lambda g: (g.state, g.snapshot),
        donated=(0,),
        staged=True,
    ),
    Program(
        "restore",
        lambda g: restore,
        lambda g: (g.state, _integer, g.snapshot, jax.ShapeDtypeStruct((g.shape.context,), jnp.int32)),
        _state,
        donated=(0,),
    ),
    Program("read_page", lambda g: read_page, lambda g: (g.state, _integer), lambda g: 0),
    Program(
        "write_page",
        lambda g: write_page,
        lambda g: (g.state, _integer, jax.ShapeDtypeStruct((page_bytes(g.state),), jnp.uint8)),
        _state,
        donated=(0,),
    ),
    Program("copy_page", lambda g: copy_page, lambda g: (g.state, _integer, _integer), _state, donated=(0,)),
    # Logits of a whole chunk, for scoring.
    Program("head", _head, lambda g: _head_arguments(g, g.chunk), lambda g: 0, eager=False, serving=False),
    Program(
        "head_short",
        _head,
        lambda g: _head_arguments(g, g.short),
        lambda g: 0,
        eager=False,
        serving=False,
        made=lambda g: g.short is not None,
    ),
    # States that nothing is missing from, to be looked at.
    Program(
        "settle",
        lambda g: partial(settle, width=g.config.conv_width),
        lambda g: (g.state,),
        _state,
        donated=(0,),
        eager=False,
        serving=False,
    ),
    # A decode step with a given token and all logits, for evaluation.
    Program(
        "step",
        lambda g: g.with_model(step, kv=g.shape.kv),
        lambda g: (g.parameters, g.state, _integer, _integer),
        lambda g: (g.state, 0),
        donated=(1,),
        eager=False,
        serving=False,
    ),
)
