"""What a conversion writes, what it keeps of a source's own codes, and which damage is found."""

from __future__ import annotations

import hashlib
import json
import shutil

import formats
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.checkpoints import Artifact, join, quantise_tensors
from ninfer_jax.checkpoints.convert import parameter_key
from ninfer_jax.config import ModelConfig
from ninfer_jax.engine.convert import convert
from ninfer_jax.engine.weights_in import ArtifactWeights, stored_recipe
from ninfer_jax.model import TextModel, fill_arrays, parameters_of, split_model
from pallas_kernels.matmul import QuantisedWeight
from pallas_kernels.matmul.quantised import unpack

DOWN = "layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory, tensors):
    return formats.plain(tmp_path_factory.mktemp("plain") / "source", tensors)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, source, recipe):
    seen = []
    path = tmp_path_factory.mktemp("artifact") / "made"
    made = convert(source, path, recipe, progress=lambda *said: seen.append(said))
    for stage in ("digests", "weights", "verify"):
        done = [(d, n) for s, d, n in seen if s == stage]
        assert done == sorted(done) and done[-1][0] == done[-1][1] > 0
    return made


def specs_of(artifact):
    model = TextModel(ModelConfig.from_hf(artifact.manifest["config"]), jnp.bfloat16, mtp=True, recipe=stored_recipe(artifact))
    return parameters_of(model)


def test_arrays_are_those_of_the_quantiser(artifact, tensors):
    loaded = artifact.load()
    for spec in specs_of(artifact):
        parts = [tensors[t.name] for t in spec.tensors]
        key = parameter_key(spec)
        if spec.stored is None:
            ((_, described),) = spec.arrays.items()
            expected = {key: parts[0].astype(described.dtype)}
        else:
            arrays = join(spec.stored, [block for _, block in quantise_tensors(spec.stored, parts)])
            expected = {f"{key}.{field}": array for field, array in arrays.items()}
        for name, array in expected.items():
            ours = np.asarray(loaded.pop(name))
            assert ours.dtype == array.dtype
            np.testing.assert_array_equal(ours, array, err_msg=name)
    assert not loaded
    assert {p.made for p in artifact.parameters.values()} == {"kept", "quantised"}


def test_the_quantised_model_takes_them(artifact):
    weights = ArtifactWeights(artifact.path)
    model = TextModel(ModelConfig.from_hf(artifact.path), jnp.bfloat16, mtp=True, recipe=weights.recipe)
    told = []
    filled = weights.parameters(model, lambda done, total: told.append((done, total)))
    assert told[-1] == (artifact.nbytes, artifact.nbytes)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(filled))
    without = TextModel(ModelConfig.from_hf(artifact.path), jnp.bfloat16, mtp=False, recipe=weights.recipe)
    assert len(jax.tree.leaves(weights.parameters(without, lambda *_: None))) < len(jax.tree.leaves(filled))


def test_manifest(artifact, source, recipe):
    manifest = json.loads((artifact.path / "manifest.json").read_text())
    assert manifest["config"] == formats.CONFIG and manifest["complete"] is True and manifest["version"] == 2
    file = source / "model.safetensors"
    assert manifest["source"]["files"] == {
        "model.safetensors": {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    }
    assert manifest["recipe"] == recipe.as_json() and {"jax", "orbax-checkpoint", "python"} <= manifest["packages"].keys()
    about = manifest["parameters"]["layers.1.self_attn.qkv_proj"]
    assert (about["role"], about["kind"], about["bits"], about["group_size"], about["group"]) == (
        "attention",
        "matrix",
        4,
        64,
        "layers.1",
    )
    words = (artifact.path / "parameters/layers.1/layers.1.self_attn.qkv_proj.words/0.0").read_bytes()
    assert hashlib.sha256(words).hexdigest() == about["arrays"]["words"]["sha256"]
    for name in formats.COPIED:
        assert (artifact.path / name).read_bytes() == (source / name).read_bytes()
    assert set(artifact.groups) == {"embedding", "layers.0", "layers.1", "head", "mtp"}


def test_codes_of_gptq_are_kept(tmp_path, tensors, recipe):
    folder, _, codes = formats.gptq(tmp_path / "source", tensors, group=32)
    made = convert(folder, tmp_path / "made", recipe)
    arrays = made.load()
    parameter = made.parameters[DOWN]
    assert (parameter.made, parameter.stored.bits, parameter.stored.group) == ("repacked", 4, 32)
    stored = (arrays[f"{DOWN}.{field}"] for field in ("words", "scales", "unit"))
    weight = QuantisedWeight(*stored, 4, 32, tensors[f"{DOWN}.weight"].shape[::-1])
    ours, scales = (np.asarray(a) for a in unpack(weight))
    expected, theirs = codes[f"{DOWN}.weight"]
    np.testing.assert_array_equal(ours[:192, :256].T, expected)
    # To the nearest of 127 steps up to the row's largest scale.
    theirs = theirs.astype(np.float64)
    step = theirs.max(axis=1, keepdims=True) / 127
    np.testing.assert_allclose(scales[:6, :256].T / step, np.rint(theirs / step), rtol=1e-6)
    # The recipe wants 8 bits of the MTP layer: codes of 4 bits are no use there.
    assert made.parameters["mtp.fc"].made == "quantised" and made.parameters["mtp.fc"].stored.bits == 8
    assert made.parameters["layers.0.mlp.gate_up_proj"].made == "repacked" and not made.manifest["notes"]
    model = TextModel(ModelConfig.from_hf(made.path), jnp.bfloat16, mtp=True, recipe=stored_recipe(made))
    assert model.layers[0].mlp.down_proj.format.group == 32 and model.embed_tokens.format.group == 64
    fill_arrays(split_model(model)[1], arrays)


def test_tensors_that_differ_are_quantised_again(tmp_path, tensors, recipe):
    def unquantise(stored):
        for field in ("qweight", "qzeros", "scales", "g_idx"):
            del stored[f"layers.0.mlp.up_proj.{field}"]
        stored["layers.0.mlp.up_proj.weight"] = formats.as_bfloat16(tensors)["layers.0.mlp.up_proj.weight"]

    folder, *_ = formats.gptq(tmp_path / "source", tensors, change=unquantise)
    made = convert(folder, tmp_path / "made", recipe)
    (note,) = made.manifest["notes"]
    assert (
        note.startswith("layers.0.mlp.gate_up_proj: ")
        and "up_proj.weight not quantised" in note
        and "gate_proj.weight group 64" in note
    )
    assert made.parameters["layers.0.mlp.gate_up_proj"].made == "quantised"
    assert made.parameters[DOWN].made == "repacked"


def flip(file, at=-1):
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


WORDS = f"parameters/layers.0/{DOWN}.words"


def edit(path, change):
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: flip(p / WORDS / "0.0"), (WORDS, f"{DOWN}.words is damaged", "SHA-256")),
        (lambda p: (p / WORDS / "0.0").write_bytes((p / WORDS / "0.0").read_bytes()[:-2]), (WORDS, "bytes")),
        (lambda p: (p / WORDS / "0.0").unlink(), (WORDS, "0 bytes")),
        (lambda p: shutil.rmtree(p / WORDS), ("layers.0", f"lacks {DOWN}.words")),
        (lambda p: shutil.copytree(p / WORDS, p / WORDS / "../more"), ("layers.0", "more is not in the manifest")),
        (lambda p: (p / "parameters/layers.0/_METADATA").unlink(), ("layers.0 is damaged",)),
        (lambda p: shutil.rmtree(p / "parameters/head"), ("lacks head",)),
        (lambda p: (p / "parameters/layers.9").mkdir(), ("layers.9 is not in the manifest",)),
        (lambda p: flip(p / "tokenizer.json"), ("tokenizer.json has been changed or damaged",)),
        (lambda p: (p / "chat_template.jinja").unlink(), ("lacks chat_template.jinja",)),
        (lambda p: (p / "manifest.json").write_text('{"format": '), ("manifest.json is not JSON",)),
        (lambda p: edit(p, lambda m: m.update(version=1)), ("version 1 of the format", "reads 2", "convert again")),
        (lambda p: edit(p, lambda m: m.update(complete=False)), ("was not finished",)),
        (lambda p: edit(p, lambda m: m["parameters"][DOWN].pop("role")), ("manifest.json is damaged", "role")),
        (lambda p: edit(p, lambda m: m["parameters"][DOWN]["arrays"]["words"].update(shape=[2, 2])), (WORDS, "8")),
        (lambda p: edit(p, lambda m: m["parameters"].pop(DOWN)), ("not in the manifest",)),
    ],
)
def test_damage_is_found(tmp_path, artifact, refused, damage, said):
    path = shutil.copytree(artifact.path, tmp_path / "copy")
    damage(path)
    refused(lambda: Artifact.open(path).load(), *said)


def test_digests_can_be_left_unchecked(tmp_path, artifact):
    path = shutil.copytree(artifact.path, tmp_path / "copy")
    flip(path / WORDS / "0.0")
    assert f"{DOWN}.words" in Artifact.open(path).load(verify=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm.weight": None}, ("lacks 1 of", "norm.weight")),
        ({"layers.0.extra.weight": np.zeros(3, np.float32)}, ("holds 1 tensors the model does not have", "extra")),
        ({"norm.weight": np.zeros(5, np.float32)}, ("norm.weight", "[5]", "[256]")),
        ({f"{DOWN}.weight": np.full((256, 192), np.nan, np.float32)}, (f"{DOWN}.weight", "nan", "[0, 0]")),
        ({"layers.1.self_attn.q_norm.weight": np.full(64, np.inf, np.float32)}, ("q_norm", "inf")),
    ],
)
def test_bad_tensors(tmp_path, tensors, recipe, refused, change, said):
    folder = formats.plain(tmp_path / "source", {n: t for n, t in (tensors | change).items() if t is not None})
    refused(lambda: convert(folder, tmp_path / "made", recipe), *said)
    assert not (tmp_path / "made" / "manifest.json").exists()


def test_destinations(tmp_path, source, artifact, tensors, recipe, refused):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("all of it")
    refused(lambda: convert(source, other, recipe), other, "something else")
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]
    refused(lambda: convert(source, other / "thesis.txt", recipe), "thesis.txt", "is a file, a directory is needed")
    refused(lambda: convert(source, other / "thesis.txt" / "below", recipe), "thesis.txt", "Not a directory")
    refused(lambda: convert(source, artifact.path, "q4"), artifact.path, "another source or recipe")
    refused(lambda: convert(artifact.path, tmp_path / "again", recipe), "an artifact already")
    assert convert(source, artifact.path, recipe).manifest == artifact.manifest  # done already: nothing to do


def test_missing_mtp_is_noted(tmp_path, tensors, recipe):
    folder = formats.plain(tmp_path / "source", {n: t for n, t in tensors.items() if not n.startswith("mtp.")})
    made = convert(folder, tmp_path / "made", recipe)
    assert not made.has_mtp and "no MTP" in made.manifest["notes"][0]
