"""The model over quantised weights, as a card runs it, against the plain model over the numbers those weights stand for."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ninfer_jax.checkpoints import join, quantise_tensors
from ninfer_jax.config import FULL, LINEAR, EngineConfig, ModelConfig, Recipe, WeightFormat
from ninfer_jax.decoding import SamplingParams
from ninfer_jax.model import TextModel, fill, fill_arrays, parameters_of, split_model
from ninfer_jax.programs import PrefillInputs, Programs, admission
from ninfer_jax.programs.setup import resolve
from ninfer_jax.state import allocate_state, state_shape
from pallas_kernels import launch
from pallas_kernels.embedding import QuantisedRows, lookup
from pallas_kernels.matmul import QuantisedWeight, dequantise, quantise

CONFIG = ModelConfig(
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
)
BODY, FINE = WeightFormat(4, 64, "bf16"), WeightFormat(8, 32, "bf16")
RECIPE = Recipe("test", {"attention": BODY, "gdn": BODY, "mlp": BODY, "embed": BODY, "gdn_gate": FINE, "head": FINE, "mtp": FINE})
CHUNK, PROMPT = 64, 50


@pytest.fixture(scope="module")
def models():
    """(programs, parameters) of the quantised model and of the plain one with the same numbers."""
    rng = np.random.default_rng(0)
    quantised = TextModel(CONFIG, jnp.bfloat16, mtp=True, recipe=RECIPE)
    arrays, tensors = {}, {}
    for parameter in parameters_of(quantised):
        made = [draw(t.name, t.shape, rng) for t in parameter.tensors]
        if parameter.stored is None:
            (field,) = parameter.arrays
            path = f"{parameter.name}.{field}" if parameter.name else field
            arrays[path] = jnp.asarray(made[0], parameter.arrays[field].dtype)
            tensors[parameter.tensors[0].name] = np.asarray(arrays[path].astype(jnp.float32))
            continue
        stored = join(parameter.stored, [block for _, block in quantise_tensors(parameter.stored, made)])
        arrays |= {f"{parameter.name}.{field}": jnp.asarray(array) for field, array in stored.items()}
        values = meaning(parameter, stored)
        start = 0
        for tensor in parameter.tensors:
            tensors[tensor.name] = values[start : start + tensor.shape[0]]
            start += tensor.shape[0]
    plain = TextModel(CONFIG, jnp.float32, mtp=True)
    engine = EngineConfig(context=256, slots=2, draft=2, kv="bf16", prefill_chunk=CHUNK)
    done = []
    for model, how in ((quantised, "arrays"), (plain, "tensors")):
        _, described = split_model(model)
        filled = (
            fill_arrays(described, arrays) if how == "arrays" else fill(described, {n: jnp.asarray(t) for n, t in tensors.items()})
        )
        shape = state_shape(CONFIG, engine, "bf16", model.dtype)
        done.append((Programs(model, shape, CHUNK, 290, "cpu"), jax.tree.leaves(filled), shape))
    return done


def draw(name, shape, rng):
    if name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight")):
        return rng.normal(0.0 if "linear_attn" not in name else 1.0, 0.1, shape).astype(np.float32)
    if name.endswith(("A_log", "dt_bias")):
        return rng.uniform(-1, 1, shape).astype(np.float32)
    return (rng.normal(size=shape) / np.sqrt(shape[-1] if len(shape) == 2 else 2)).astype(np.float32)


def meaning(parameter, stored):
    columns = parameter.tensors[0].shape[1]
    rows = sum(t.shape[0] for t in parameter.tensors)
    s = parameter.stored
    if s.kind == "rows":
        table = QuantisedRows(jnp.asarray(stored["codes"]), jnp.asarray(stored["scales"]), s.bits, s.group)
        return np.asarray(lookup(table, jnp.arange(rows), jnp.float32))
    weight = QuantisedWeight(*(jnp.asarray(stored[field]) for field in s.fields), s.bits, s.group, (columns, rows))
    return np.asarray(dequantise(weight)).T


def run(programs, parameters, shape, ids):
    """A prompt, its first token and two rounds of the first slot: hidden rows, tokens, and a state."""
    state = programs.admit(
        allocate_state(CONFIG, shape), admission(0, np.array([1, 2, 3, 4], np.int32), 40, SamplingParams(temperature=0), 0, ())
    )
    tokens = np.zeros(CHUNK, np.int32)
    tokens[: len(ids)] = ids
    positions = np.broadcast_to(np.arange(-1, CHUNK, dtype=np.int32), (3, CHUNK + 1)).copy()
    inputs = PrefillInputs(np.int32(0), tokens, np.int32(len(ids)), positions)
    state, hidden = programs.prefill(parameters, state, inputs)
    logits = programs.head(parameters, hidden)
    hidden = np.asarray(hidden, np.float32)[: len(ids)]
    state, out = programs.begin(parameters, state, np.int32(0))
    emitted = [int(out.tokens[0, 0])]
    for _ in range(2):
        state, out = programs.decode_round(parameters, state)
        emitted += np.asarray(out.tokens)[0, : int(out.emitted[0])].tolist()
    state = programs.settle(state)
    return hidden, np.asarray(logits)[: len(ids), :290], emitted, np.asarray(state.recurrent[0][0])


@pytest.mark.long
def test_quantised_weights_change_nothing_but_their_rounding(models):
    ids = np.random.default_rng(1).integers(0, 290, PROMPT)
    ours, theirs = (run(*model, ids) for model in models)
    for name, a, b in zip(
        ("hidden", "logits", "state"), (ours[0], ours[1], ours[3]), (theirs[0], theirs[1], theirs[3]), strict=True
    ):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 3e-2, (name, error)  # bfloat16 activations against float32 ones
    best = np.sort(theirs[1], axis=-1)  # near ties may go either way
    clear = best[:, -1] - best[:, -2] > 0.3
    assert clear.sum() > 10
    np.testing.assert_array_equal(ours[1].argmax(-1)[clear], theirs[1].argmax(-1)[clear])
    assert ours[2][0] == int(ours[1][-1].argmax())  # the head's candidates and its logits agree


@pytest.mark.parametrize(
    ("rows", "launches"),
    [(3, ["w4_w8_pair_norm", "w4_decode_add"]), (20, ["w4_prefill_bf16", "w8_prefill_bf16", "w4_prefill_bf16_add"])],
)
def test_launches_of_a_delta_layer(models, rows, launches):
    """Both input projections of a decode step are one. Around them stands nothing but what the test recurs by."""
    programs, parameters, _ = models[0]
    layer = programs.build(parameters).layers[0]

    def mix(h):
        return layer.linear_attn(h, layer.input_layernorm, lambda projected, ab: projected[:, :128] + ab.sum())

    with launch.lowering_for("cuda"):
        traced = jax.make_jaxpr(mix)(jax.ShapeDtypeStruct((rows, CONFIG.hidden_size), jnp.bfloat16))
    assert re.findall(r"\bname=(w[48]_\w+)", str(traced)) == launches


def test_a_recipe_needs_a_head_of_its_own_and_on_a_card_bfloat16():
    engine = EngineConfig(context=256, draft=0, dtype="float32")
    with pytest.raises(ValueError, match="dtype is float32: weights of 4 and 8 bits need bfloat16 on a card"):
        resolve(CONFIG, 290, engine, "cuda", RECIPE)
    assert resolve(CONFIG, 290, dataclasses.replace(engine, kernels="cpu"), "cpu", RECIPE).recipe == RECIPE
    with pytest.raises(ValueError, match="needs an output head of its own"):
        TextModel(dataclasses.replace(CONFIG, tied_embeddings=True), jnp.bfloat16, mtp=False, recipe=RECIPE)


def test_drafts_from_a_reduced_head_are_ids_of_the_whole_one(models):
    """With all the rows in another order, drafts are those of the whole head; with a few, they are the best among them."""
    rng = np.random.default_rng(2)
    hidden = jnp.asarray(rng.normal(size=(4, CONFIG.hidden_size)), jnp.bfloat16)
    programs, parameters, _ = models[0]
    whole = programs.build(parameters)
    logits = np.asarray(whole.logits(hidden), np.float32)
    for ids in (rng.permutation(290), rng.permutation(290)[:64]):
        model = TextModel(CONFIG, jnp.bfloat16, mtp=True, recipe=dataclasses.replace(RECIPE, draft_head=len(ids)))
        graph, described = split_model(model)
        columns = jnp.asarray(dequantise(whole.lm_head.quantised))[:, jnp.asarray(ids)]
        head = quantise(columns, bits=FINE.bits, group=FINE.group)
        arrays = dict(
            zip([".".join(map(str, path)) for path, _ in nnx.to_flat_state(split_model(whole)[1])], parameters, strict=True)
        )
        arrays |= {f"mtp.draft_head.{field}": getattr(head, field) for field in ("words", "scales", "unit")}
        arrays["mtp.draft_ids"] = jnp.asarray(ids, jnp.int32)
        reduced = nnx.merge(graph, fill_arrays(described, arrays))
        assert reduced.has_draft_head and not whole.has_draft_head
        np.testing.assert_array_equal(reduced.reduced_choice(hidden), ids[logits[:, ids].argmax(1)])
