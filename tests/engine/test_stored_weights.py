"""Engines of a CPU over artifacts: codes as they are stored, against the float64 model of the numbers that they stand for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.checkpoints import Artifact, ArtifactError, artifact
from ninfer_jax.config import ModelConfig, recipe
from ninfer_jax.engine.convert import convert
from ninfer_jax.engine.weights_in import ArtifactWeights
from ninfer_jax.evaluate.drift import state_drift
from ninfer_jax.model import TextModel

pytestmark = [pytest.mark.engine, pytest.mark.bits]

PROMPT = [5, 900, 33, 17, 256, 80, 2] * 10
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=7, top_p=0.95, frequency_penalty=0.2)
SHAPES = dict(context=256, prefill_chunk=64, kv="f32", draft=0, kernels="cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory, micro_path):
    """Name of a recipe -> the micro checkpoint in its formats."""
    folder = tmp_path_factory.mktemp("artifacts")
    return {name: convert(micro_path, folder / name, recipe(name)) for name in ("q4", "w8", "q4-quality")}


@pytest.fixture(scope="module")
def engine_of(made, engine_for):
    return lambda name, **more: engine_for(made[name].path, quickly=not more, **SHAPES | more)


@pytest.mark.parametrize("name", ["q4", "w8", "q4-quality"])
def test_logits_are_those_of_the_numbers_that_codes_stand_for(engine_of, name):
    points = state_drift(engine_of(name), np.array(PROMPT[:64]), 64, 64, "float64")
    errors = {p.path: max(p.logits_error, *p.state_error) for p in points}
    # Prefill multiplies the numbers themselves: float32 roundings alone. A step's activations are rounded to 2^-16 of their
    # group's largest, 3 times the usual one, a dozen times one after another: 2e-4 (modelled).
    assert errors["prefill"] < 1e-5 and 1e-6 < errors["decode"] < 2e-4


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_with_drafts_and_beside_others_the_answer_is_that_without(engine_of, params):
    plain, drafting = engine_of("q4", draft=0), engine_of("q4", draft=1, slots=2)
    alone = [plain.generate(PROMPT[n:], params).tokens for n in range(3)]
    stats = drafting.generate(PROMPT, GREEDY).stats
    assert 0 < stats.accepted < stats.drafted  # otherwise the comparison would mean little
    assert [answer.tokens for answer in drafting.generate_many([PROMPT[n:] for n in range(3)], params)] == alone


def test_no_byte_more_is_held_than_is_stored(made, engine_of):
    drafting = engine_of("q4", draft=1, slots=2)
    assert sum(x.nbytes for x in drafting.runner.pool.parameters) == made["q4"].nbytes


def test_large_arrays_are_the_files_themselves(made, monkeypatch):
    monkeypatch.setattr(artifact, "MAPPED_BYTES", 4096)
    path, weights = made["q4"].path, ArtifactWeights(made["q4"].path)
    model = TextModel(ModelConfig.from_hf(path), jnp.float32, mtp=True, recipe=weights.recipe)
    parameters = jax.tree.leaves(weights.parameters(model, lambda *_: None))
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f"{path}/parameters" in line]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    for leaf in parameters:
        at = leaf.unsafe_buffer_pointer()
        assert any(start <= at < end for start, end in ranges) == (leaf.nbytes >= 4096), leaf.shape
    assert sum(leaf.nbytes >= 4096 for leaf in parameters) > 5


def test_memory_that_does_not_suffice_is_refused_by_the_bytes_as_stored(made, monkeypatch):
    stored = sum(a.nbytes for name, group in made["q4"].groups.items() if name != "mtp" for a in group)
    free = stored  # and nothing for pages and states
    monkeypatch.setattr(sys.modules[Engine.__module__], "free_bytes", lambda device: free)
    monkeypatch.setattr(Artifact, "read_groups", lambda *a, **k: pytest.fail("read"))
    with pytest.raises(ValueError, match=r"memory: ([\d,]+) bytes are needed") as refused:
        Engine.load(made["q4"].path, EngineConfig(**SHAPES | dict(slots=1, draft=0)))  # nothing open: no bound is asked
    need = int(str(refused.value).split()[1].replace(",", ""))
    assert stored < need < stored + 500_000 and f"{free:,} are free" in str(refused.value)


def test_a_file_in_another_layout_is_not_mapped(made, tmp_path):
    group = "layers.0"
    array = made["q4"].groups[group][0]
    folder = tmp_path / "parameters" / group / array.name
    folder.mkdir(parents=True)
    there = made["q4"].path / "parameters" / group / array.name
    for file in there.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert artifact.map_group(tmp_path, group, [array], True)[array.name].shape == array.shape
    about = (folder / ".zarray").read_text()
    (folder / ".zarray").write_text(about.replace('"compressor":null', '"compressor":{"id":"zstd"}'))
    with pytest.raises(ArtifactError, match="is not one uncompressed file; convert again"):
        artifact.map_group(tmp_path, group, [array], True)
