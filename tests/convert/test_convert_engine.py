"""An engine over an artifact against an engine over a checkpoint of the numbers that the artifact stands for; the command."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys

import formats
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.cli.main import app
from ninfer_jax.config import ModelConfig
from ninfer_jax.engine.convert import convert
from ninfer_jax.engine.weights_in import stored_recipe
from ninfer_jax.model import TextModel, parameters_of
from pallas_kernels.embedding import QuantisedRows, lookup
from pallas_kernels.matmul import QuantisedWeight, dequantise
from weights.convert import parameter_key

ENGINE = EngineConfig(context=256, prefill_chunk=64, kv="f32", draft=2)
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
            shape = (spec.tensors[0].shape[1], rows)
            values = np.asarray(dequantise(QuantisedWeight(arrays[f"{key}.words"], arrays[f"{key}.scales"], s.bits, s.group, shape))).T
        for tensor in spec.tensors:
            found[tensor.name], values = values[: tensor.shape[0]], values[tensor.shape[0] :]
    return found


@pytest.mark.parametrize("form", ["plain", "gptq"])
def test_same_tokens_and_logits(tmp_path, tensors, recipe, form):
    if form == "plain":
        folder = formats.plain(tmp_path / "source", tensors)
    else:
        folder, *_ = formats.gptq(tmp_path / "source", tensors, group=32)
    artifact = convert(folder, tmp_path / "made", recipe)
    assert set(formats.shapes()) == set(meaning(artifact))
    plain = formats.plain(tmp_path / "plain", {n: np.ascontiguousarray(t) for n, t in meaning(artifact).items()}, torch.float32)
    told = []
    ours = Engine.load(artifact.path, ENGINE, progress=lambda *said: told.append(said))
    theirs = Engine.load(plain, ENGINE)
    assert ("weights", artifact.nbytes, artifact.nbytes) in told
    params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    a, b = (e.generate(PROMPT, params) for e in (ours, theirs))
    assert a.tokens == b.tokens and len(a.tokens) == 24 and a.stats.drafted > 0
    ids = theirs.tokenizer.encode(PROMPT)
    np.testing.assert_array_equal(ours.score(ids), theirs.score(ids))


def test_engine_refuses_a_config_of_another_model(tmp_path, tensors, recipe, refused):
    artifact = convert(formats.plain(tmp_path / "source", tensors), tmp_path / "made", recipe)
    manifest = json.loads((artifact.path / "manifest.json").read_text())
    del manifest["files"]["config.json"]
    (artifact.path / "manifest.json").write_text(json.dumps(manifest))
    (artifact.path / "config.json").write_text(json.dumps(formats.CONFIG | {"intermediate_size": 128}))
    refused(lambda: Engine.load(artifact.path, ENGINE), "mlp", "the model has")


def test_drafting_needs_the_mtp_layer(tmp_path, tensors, recipe, refused):
    folder = formats.plain(tmp_path / "source", {n: t for n, t in tensors.items() if not n.startswith("mtp.")})
    convert(folder, tmp_path / "made", recipe)
    refused(lambda: Engine.load(tmp_path / "made", ENGINE), "draft is 2", "MTP")


def test_command(tmp_path, tensors):
    folder = formats.plain(tmp_path / "source", tensors)
    done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "made"), "--recipe", "w8"])
    assert done.exit_code == 0 and done.stdout == "", done.output
    assert "recipe w8, from safetensors BF16" in done.stderr
    for arguments, said in (
        ([str(folder), str(tmp_path / "other"), "--recipe", "q3"], "recipe 'q3' is unknown"),
        ([str(tmp_path / "nothing"), str(tmp_path / "other")], "does not exist"),
        ([str(folder), str(tmp_path / "made")], "another source or recipe"),
    ):
        failed = CliRunner().invoke(app, ["convert", *arguments])
        assert failed.exit_code == 1 and failed.stdout == ""
        (line,) = failed.stderr.splitlines()
        assert line.startswith("error: ") and said in line


def test_a_full_disk_is_one_line(tmp_path, tensors):
    """A limit on the size of files stands in for it: the write fails all the same."""
    folder = formats.plain(tmp_path / "source", tensors)

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    command = [sys.executable, "-m", "ninfer_jax.cli.main", "convert", str(folder), str(tmp_path / "made")]
    failed = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert failed.returncode == 1 and failed.stdout == ""
    assert len(failed.stderr.splitlines()) == 1 and "File too large" in failed.stderr, failed.stderr
    assert not (tmp_path / "made" / "manifest.json").exists()
