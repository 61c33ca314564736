"""On a CPU's kernels a row of a round has the same bits whatever the number of rows and slots: why, and that it is so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import micro
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from ninfer_jax import EngineConfig, ModelConfig, SamplingParams
from ninfer_jax.checkpoints import Checkpoint, load_parameters
from ninfer_jax.config import PAGE
from ninfer_jax.model import TextModel, fill, parameter_specs, split_model
from ninfer_jax.programs import Programs, admission
from ninfer_jax.programs.setup import resolve
from ninfer_jax.state import State, state_shape, state_struct
from pallas_kernels.launch import lowering_for

MODEL = ModelConfig.from_hf(micro.CONFIG)
# What XLA may be left with: moves, comparisons, conversions, and arithmetic that is rounded once. The rest is in kernels.
MOVES = {"broadcast_in_dim", "reshape", "squeeze", "gather", "transpose", "concatenate", "slice", "stack", "select_n", "copy"}
EXACT = {"gt", "lt", "le", "ge", "eq", "ne", "neg", "max", "min", "reduce_max", "top_k", "sort", "bitcast_convert_type"}
ROUNDED_ONCE = {"convert_element_type", "sub", "add", "mul", "div"}
CALLS = {"jit", "cond", "ffi_call"}


def equations(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """(jaxpr, equation) of all that is computed."""
    for equation in jaxpr.eqns:
        yield jaxpr, equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def of_floats(equation: Any) -> bool:
    return any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (*equation.invars, *equation.outvars))


def readers(jaxpr: Any, variable: Any) -> set[str]:
    """What reads a variable, moves aside."""
    found = {"result"} if variable in jaxpr.outvars else set()
    for equation in jaxpr.eqns:
        if any(v is variable for v in equation.invars):
            name = equation.primitive.name
            found |= readers(jaxpr, equation.outvars[0]) if name in MOVES else {name}
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["begin", "decode_round"])
def test_between_kernels_no_compiler_has_a_choice(name: str, dtype: str) -> None:
    """No sum, no function, no product that something is added to: whatever the shapes, nothing is there to round otherwise."""
    config = EngineConfig(context=256, slots=2, draft=3, prefill_chunk=64, kv="rk4v4", dtype=dtype)
    function, arguments, _ = resolve(MODEL, 1024, config, "cpu").programs().source(name)
    with lowering_for("cpu", "cpu"):
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    floats = [(where, equation) for where, equation in equations(jaxpr) if of_floats(equation)]
    assert {equation.primitive.name for _, equation in floats} <= MOVES | EXACT | ROUNDED_ONCE | CALLS
    products = [(where, equation) for where, equation in floats if equation.primitive.name == "mul"]
    assert products
    for where, equation in products:
        assert readers(where, equation.outvars[0]) <= {"bitcast_convert_type", "ffi_call"}


ROUNDS = 7
GREEDY = SamplingParams(temperature=0)
# What is asked of four sequences, and the tokens that they have behind them.
ASKED = (
    (GREEDY, 5),
    (SamplingParams(temperature=0.9, top_k=20, seed=3), 70),
    (SamplingParams(temperature=1.2, top_p=0.9, seed=4, frequency_penalty=0.3, repetition_penalty=1.1, logprobs=20), 63),
    (replace(GREEDY, logprobs=20, logit_bias={7: 2.0, 900: -1.0}), 130),
)
PER_SLOT = 4  # pages
CHAIN = np.arange(-1, 5)  # each row comes after the one before it


@dataclass
class Run:
    """A sequence: its tokens, their log-probabilities, and after so many tokens its states and pages."""

    tokens: list[int]
    logprobs: list[np.ndarray] = field(default_factory=list)
    left: dict[int, list[np.ndarray]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def parameters(micro_path) -> list[jax.Array]:
    model = TextModel(MODEL, jnp.float32, mtp=False)
    specs = parameter_specs(model)
    arrays = load_parameters(Checkpoint.open(micro_path), specs, ignore_prefixes=("mtp.",), device_put=jnp.asarray)
    return jax.tree.leaves(fill(split_model(model)[1], arrays))


def start(programs: Programs, sequences: list[int]) -> tuple[State, np.ndarray]:
    """A state with these sequences in its slots, each as if so many tokens had been read, and the block tables."""
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state_struct(MODEL, programs.shape))
    tables = 1 + np.random.default_rng(9).permutation(len(sequences) * PER_SLOT).reshape(-1, PER_SLOT).astype(np.int32)
    for slot, sequence in enumerate(sequences):
        params, length = ASKED[sequence]
        rng = np.random.default_rng(sequence)
        new = admission(slot, tables[slot], 100, params, params.seed or 0, ())
        for name, array in state.sampling._asdict().items():
            if hasattr(new, name):
                array[slot] = getattr(new, name)
        np.add.at(state.sampling.bias[slot], new.bias_ids, new.bias_values)
        for name, value in dict(
            table=tables[slot], length=length, token=sequence, left=100, active=True, parents=CHAIN[: programs.shape.draft + 1]
        ).items():
            getattr(state.slots, name)[slot] = value
        for recurrent, conv in zip(state.recurrent, state.conv, strict=True):
            recurrent[slot] = rng.normal(0, 0.1, recurrent.shape[1:])
            conv[slot, :3] = rng.normal(0, 1, (3, conv.shape[2]))
        token = np.arange(length)
        for leaf in jax.tree.leaves(state.kv):
            leaf[tables[slot][token // PAGE], :, token % PAGE] = rng.normal(0, 1, (length, *leaf.shape[1:2], *leaf.shape[3:]))
    return state, tables


def run(programs: Programs, parameters: list[jax.Array], sequences: list[int], truths: list[list[int]] | None) -> list[Run]:
    """Rounds until every sequence has `ROUNDS` tokens more. Drafts are right up to a place that moves from round to round."""
    draft = programs.shape.draft
    state, tables = start(programs, sequences)
    runs = [Run([]) for _ in sequences]
    turn = 0
    while min(len(r.tokens) for r in runs) < ROUNDS:
        if draft:
            assert truths is not None
            drafts = np.zeros((len(sequences), draft), np.int32)
            for slot, (truth, r) in enumerate(zip(truths, runs, strict=True)):
                known = [*truth[len(r.tokens) :], *[0] * draft][:draft]
                wrong = (turn + slot) % (draft + 1)
                drafts[slot] = [token + (at == wrong) for at, token in enumerate(known)]
            state = state._replace(slots=state.slots._replace(drafts=jnp.asarray(drafts)))
        state, out = programs.decode_round(parameters, state)
        state = programs.settle(state)
        turn += 1
        for slot, r in enumerate(runs):
            count = int(out.emitted[slot])
            r.tokens += np.asarray(out.tokens[slot, :count]).tolist()
            r.logprobs += [np.append(out.logprob[slot, i], out.top_logprobs[slot, i]) for i in range(count)]
            length = np.arange(int(state.slots.length[slot]))
            pages = [np.asarray(x)[tables[slot][length // PAGE], :, length % PAGE] for x in jax.tree.leaves(state.kv)]
            states = [*(np.asarray(x[slot]) for x in state.recurrent), *(np.asarray(x[slot, :3]) for x in state.conv)]
            r.left[len(r.tokens)] = pages + states
    return runs


def programs_for(draft: int, slots: int) -> Programs:
    config = EngineConfig(context=PER_SLOT * PAGE, slots=slots, draft=draft)
    shape = state_shape(MODEL, config, "f32", jnp.dtype("float32"))
    return Programs(TextModel(MODEL, jnp.float32, mtp=False), shape, 64, 1024, "cpu", "cpu")


@pytest.fixture(scope="module")
def alone(parameters) -> list[Run]:
    """Each sequence by itself, a row a round."""
    programs = programs_for(0, 1)
    return [run(programs, parameters, [sequence], None)[0] for sequence in range(len(ASKED))]


@pytest.mark.bits
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("draft", [0, 1, 3, 5])
def test_rounds_of_any_width_leave_the_bits_of_one_row_alone(parameters, alone, draft: int, slots: int) -> None:
    programs = programs_for(draft, slots)
    for first in range(0, 4, slots):
        sequences = [*range(first, first + slots)][::-1]
        truths = [alone[sequence].tokens for sequence in sequences]
        found = run(programs, parameters, sequences, truths)
        for sequence, got in zip(sequences, found, strict=True):
            want, (params, _) = alone[sequence], ASKED[sequence]
            assert got.tokens[:ROUNDS] == want.tokens[:ROUNDS]
            assert params.logprobs is None or want.logprobs[0].all()
            for ours, theirs in zip(got.logprobs[:ROUNDS] if params.logprobs else (), want.logprobs, strict=False):
                np.testing.assert_array_equal(ours, theirs)
            shared = set(got.left) & set(want.left)
            assert shared
            for emitted in shared:
                for ours, theirs in zip(got.left[emitted], want.left[emitted], strict=True):
                    np.testing.assert_array_equal(ours, theirs)
