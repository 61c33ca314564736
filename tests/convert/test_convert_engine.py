"""An engine over an artifact against an engine over a checkpoint of the numbers that the artifact stands for, by XLA's operations,
for which its weights are expanded; the command."""

from __future__ import annotations

import json
import resource
import shutil
import sys

import formats
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.checkpoints import Artifact, tiny_path
from ninfer_jax.checkpoints.convert import parameter_key
from ninfer_jax.cli.main import app
from ninfer_jax.config import ModelConfig
from ninfer_jax.engine.convert import convert
from ninfer_jax.engine.runner import Runner
from ninfer_jax.engine.weights_in import ArtifactWeights, CheckpointWeights, stored_recipe
from ninfer_jax.model import TextModel, parameters_of
from ninfer_jax.planning.known import known_of
from ninfer_jax.programs import Programs
from ninfer_jax.programs.setup import resolve
from ninfer_jax.text import Tokenizer
from pallas_kernels.embedding import QuantisedRows, lookup
from pallas_kernels.matmul import QuantisedWeight, dequantise

ENGINE = EngineConfig(context=256, prefill_chunk=64, kv="f32", draft=2, kernels="xla")
PROMPT = "Romeo. What lady is that, "


def meaning(artifact):
    """Canonical name -> the float32 tensor that the artifact's arrays stand for."""
    arrays, found = artifact.load(), {}
    model = TextModel(ModelConfig.from_hf(artifact.manifest["config"]), jnp.bfloat16, mtp=True, recipe=stored_recipe(artifact))
    for spec in parameters_of(model):
        key, s, rows = parameter_key(spec), spec.stored, sum(t.shape[0] for t in spec.tensors)
        if s is None:
            values = np.asarray(arrays[key], np.float32)
        elif s.kind == "rows":
            table = QuantisedRows(arrays[f"{key}.codes"], arrays[f"{key}.scales"], s.bits, s.group)
            values = np.asarray(lookup(table, jnp.arange(rows), jnp.float32))
        else:
            own, shape = (arrays[f"{key}.{field}"] for field in s.fields), (spec.tensors[0].shape[1], rows)
            values = np.asarray(dequantise(QuantisedWeight(*own, s.bits, s.group, shape))).T
        for tensor in spec.tensors:
            found[tensor.name], values = values[: tensor.shape[0]], values[tensor.shape[0] :]
    return found


@pytest.fixture(scope="module")
def gptq(tmp_path_factory, tensors, recipe):
    """An artifact with quantised, repacked and plain parameters, and a checkpoint of the numbers that it stands for."""
    where = tmp_path_factory.mktemp("gptq")
    folder, *_ = formats.gptq(where / "source", tensors, group=32)
    artifact = convert(folder, where / "made", recipe)
    values = meaning(artifact)
    assert values.keys() == tensors.keys()
    return artifact, formats.plain(where / "plain", {n: values[n].copy() for n in tensors}, torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_expanded_weights(gptq, dtype):
    artifact, plain = gptq
    model = TextModel(ModelConfig.from_hf(plain), jnp.dtype(dtype), mtp=True)
    told = []
    ours = ArtifactWeights(artifact.path).parameters(model, lambda done, total: told.append((done, total)))
    theirs = CheckpointWeights(plain).parameters(model, lambda done, total: None)
    assert told[-1] == (artifact.nbytes, artifact.nbytes)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_same_tokens_and_logits(gptq):
    artifact, plain = gptq
    ours = Engine.load(artifact.path, ENGINE)
    # The plain model's programs are the same: they need not be compiled again.
    model = TextModel(ours.model_config, jnp.float32, mtp=True)
    runner = Runner(ours.programs, CheckpointWeights(plain).parameters(model, lambda *_: None), ours.programs.allocate())
    theirs = Engine(runner, ours.programs, ours.tokenizer, ours.template, ours.defaults, ours.model_config, (), 0)
    params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    a, b = (e.generate(PROMPT, params) for e in (ours, theirs))
    assert a.tokens == b.tokens and len(a.tokens) == 24 and a.stats.drafted > 0
    ids = ours.tokenizer.encode(PROMPT)
    np.testing.assert_array_equal(ours.score(ids), theirs.score(ids))


def test_a_config_of_another_model(tmp_path, gptq, refused):
    path = shutil.copytree(gptq[0].path, tmp_path / "copy")
    config = ModelConfig.from_hf(formats.CONFIG | {"intermediate_size": 128})
    model = TextModel(config, jnp.float32, mtp=True)
    refused(lambda: ArtifactWeights(path).parameters(model, lambda *_: None), "mlp", "the model has")
    (path / "config.json").write_text(json.dumps(formats.CONFIG | {"intermediate_size": 128}))
    refused(lambda: Engine.load(path, ENGINE), "config.json has been changed")


def test_plan_takes_the_formats_of_an_artifact(gptq):
    path = gptq[0].path
    known = known_of(path)
    assert known.recipe == stored_recipe(gptq[0]) and known.recipe.overrides["layers.0.mlp.down_proj"].group == 32
    assert known.asked(None, "cuda") == known.asked(None, "cpu") == known.recipe

    def recipe_on(platform: str, **fields: str):
        return resolve(known.model, 100, EngineConfig(**fields), platform, known.recipe).recipe

    assert recipe_on("cuda") == recipe_on("cpu", kernels="cpu") == known.recipe and recipe_on("cpu", kernels="xla") is None

    def said(*words: str) -> str:
        done = CliRunner().invoke(app, ["plan", *words])
        assert done.exit_code == 1 and done.stderr.count("\n") == 1
        return done.stderr

    expanded = "--recipe q4: XLA's operations on a CPU have their weights expanded to --dtype"
    assert expanded in said("qwen3_8_27b", "--recipe", "q4", "--target", "cpu", "--kernels", "xla", "--context", "8192")
    assert "is an artifact" in said(str(path), "--recipe", "q4", "--target", "rtx4090")


def test_drafting_needs_the_mtp_layer(tmp_path, tensors, recipe, refused):
    folder = formats.plain(tmp_path / "source", {n: t for n, t in tensors.items() if not n.startswith("mtp.")})
    convert(folder, tmp_path / "made", recipe)
    refused(lambda: Engine.load(tmp_path / "made", ENGINE), "draft is 2", "MTP")


def test_command(tmp_path, tensors):
    folder = formats.plain(tmp_path / "source", tensors)
    done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "made"), "--recipe", "w8"])
    assert done.exit_code == 0 and done.stdout == "", done.output
    assert f": {Artifact.open(tmp_path / 'made').nbytes / 1e6:.1f} MB, recipe w8, from safetensors BF16" in done.stderr
    for arguments, said in (
        ([str(folder), str(tmp_path / "other"), "--recipe", "q3"], "recipe 'q3' is unknown"),
        ([str(tmp_path / "nothing"), str(tmp_path / "other")], "No such file"),
        ([str(folder), str(tmp_path / "made")], "another source or recipe"),
    ):
        failed = CliRunner().invoke(app, ["convert", *arguments])
        assert failed.exit_code == 1 and failed.stdout == ""
        (line,) = failed.stderr.splitlines()
        assert line.startswith("error: ") and said in line


def test_a_damaged_array_is_refused_unless_nobody_wants_to_know(tmp_path, gptq, monkeypatch):
    """One bit of a stored array: refused by name, before anything is compiled; with `--no-verify` it is one other number."""
    path = shutil.copytree(gptq[0].path, tmp_path / "copy")
    file = path / "parameters/layers.0/layers.0.mlp.down_proj.words/0.0"
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)
    command = [
        "generate",
        str(path),
        "--prompt",
        "x",
        "--greedy",
        "--max-new",
        "2",
        "--context",
        "64",
        "--prefill-chunk",
        "64",
        "--json",
    ]
    with monkeypatch.context() as patch:  # minutes of compiling come after
        patch.setattr(Programs, "compile_all", lambda *arguments: pytest.fail("compiled"))
        refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1 and refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert "layers.0.mlp.down_proj.words is damaged" in line and "SHA-256" in line
    done = CliRunner().invoke(app, [*command, "--no-verify"])
    assert done.exit_code == 0 and len(json.loads(done.stdout)["tokens"]) == 2, done.stderr
    model = TextModel(ModelConfig.from_hf(path), jnp.float32, mtp=True)
    sound, damaged = (ArtifactWeights(p, verify=False).parameters(model, lambda *_: None) for p in (gptq[0].path, path))
    differ = [
        int((np.asarray(a) != np.asarray(b)).sum()) for a, b in zip(jax.tree.leaves(sound), jax.tree.leaves(damaged), strict=True)
    ]
    assert sum(differ) == 1


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, tensors):
    """A limit on the size of files stands in for it: the write fails all the same."""
    folder = formats.plain(tmp_path / "source", tensors)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # the command has its own
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        failed = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "made")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert failed.exit_code == 1 and failed.stdout == ""
    (line,) = failed.stderr.splitlines()
    assert "embedding" in line and line.endswith(": File too large"), line
    assert not (tmp_path / "made" / "manifest.json").exists()
    done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "made")])  # there is room again
    assert done.exit_code == 0, done.stderr


def test_a_draft_head_holds_the_rows_that_its_ids_say(tmp_path, tensors, recipe):
    """Special tokens and what the text uses are in; the rows are the head's own, quantised."""
    folder = formats.plain(tmp_path / "source", tensors)
    tokenizer = Tokenizer.from_dir(folder)
    text = "Romeo, Romeo! " * 5
    count = len(tokenizer.special_ids) + 12
    artifact = convert(folder, tmp_path / "made", recipe, draft_head=count, draft_text=text)
    ids = np.asarray(artifact.load()["mtp.draft_ids"])
    assert len(set(ids.tolist())) == count and (np.diff(ids) > 0).all()
    assert set(tokenizer.special_ids) <= set(ids.tolist()) and set(tokenizer.encode(text)) <= set(ids.tolist())
    values = meaning(artifact)
    kept, head = values["mtp.draft_head.weight"], np.asarray(tensors["lm_head.weight"], np.float32)[ids]
    assert np.linalg.norm(kept - head) < 0.02 * np.linalg.norm(head)
    loaded = Engine.load(artifact.path, ENGINE).generate(PROMPT, SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True))
    assert len(loaded.tokens) == 8 and loaded.stats.drafted > 0


@pytest.mark.parametrize("count", [1, 10**6])
def test_a_draft_head_of_an_impossible_size(tmp_path, tensors, recipe, count):
    folder = formats.plain(tmp_path / "source", tensors)
    with pytest.raises(ValueError, match=f"draft head: {count} rows"):
        convert(folder, tmp_path / "made", recipe, draft_head=count, draft_text="x")
    done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "made"), "--draft-head", "64"])
    assert done.exit_code == 1 and "go together" in done.stderr


@pytest.mark.long
def test_the_bundled_model_in_the_finer_recipe(tmp_path):
    """`convert tiny`, then `generate`: the Gated DeltaNet projections and the embedding have 8 bits and lie accordingly close to
    the checkpoint's numbers, attention and MLP have 4."""
    made = tmp_path / "made"
    done = CliRunner().invoke(app, ["convert", "tiny", str(made), "--recipe", "q4-quality"])
    assert done.exit_code == 0 and "recipe q4-quality, from safetensors BF16" in done.stderr, done.output
    artifact = Artifact.open(made)
    bits = {(p.role, p.stored.bits) for p in artifact.parameters.values() if p.stored}
    assert bits == {("embed", 8), ("gdn", 8), ("gdn_gate", 8), ("head", 8), ("mtp", 8), ("attention", 4), ("mlp", 4)}
    values = meaning(artifact)
    with safe_open(tiny_path() / "model.safetensors", "pt") as file:
        for name, fine in (
            ("embed_tokens", True),
            ("layers.0.linear_attn.out_proj", True),
            ("layers.1.linear_attn.in_proj_z", True),
            ("layers.3.self_attn.o_proj", False),
            ("layers.3.mlp.down_proj", False),
        ):
            (own,) = (n for n in file.keys() if n.endswith(f"{name}.weight") and "mtp" not in n)  # noqa: SIM118 (no dict)
            expected = file.get_tensor(own).float().numpy()
            error = np.linalg.norm(values[f"{name}.weight"] - expected) / np.linalg.norm(expected)
            assert (error < 0.02) == fine and error < 0.15, (name, error)
    answer = CliRunner().invoke(app, ["generate", str(made), "--prompt", "ROMEO.\n", "--max-new", "12", "--greedy", "--draft", "2"])
    assert answer.exit_code == 0 and len(answer.stdout.strip()) > 5, answer.output
