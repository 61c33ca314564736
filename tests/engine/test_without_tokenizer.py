"""A checkpoint without a tokenizer: token ids in, token ids out, and one line for every text."""

from __future__ import annotations

import json
from pathlib import Path

import micro
import numpy as np
import pytest
from typer.testing import CliRunner

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.checkpoints import save_checkpoint
from ninfer_jax.cli.main import app
from ninfer_jax.config import ModelConfig
from ninfer_jax.engine.convert import convert
from ninfer_jax.programs.setup import model_of
from ninfer_jax.text import open_text

pytestmark = pytest.mark.engine
IDS = [5, 1087, 3, 1030]  # beyond the bundled tokenizer's 1,024 too: every row of the head is an id here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, random_tensors: dict[str, np.ndarray]) -> Path:
    """Weights and config.json alone; no end token is named. Two settings are to be noted."""
    path = tmp_path_factory.mktemp("bare")
    save_checkpoint(path, random_tensors, {**micro.CONFIG, "unsloth_fixed_mtp": True})
    (path / "generation_config.json").write_text('{"max_length": 64}')
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, EngineConfig(context=256, prefill_chunk=64, kv="f32", draft=0, tokenizer=None))


def test_ids_give_the_ids_that_the_logits_say(engine):
    answer = engine.generate(IDS, SamplingParams(temperature=0, max_new_tokens=6))
    assert len(answer.tokens) == 6 and answer.finish_reason == "length" and answer.text == answer.reasoning == ""
    logits = engine.score([*IDS, *answer.tokens])
    assert logits.shape[1] == engine.tokenizer.vocab_size == 1088
    assert answer.tokens == np.argmax(logits[len(IDS) - 1 : -1], axis=1).tolist()
    *pieces, last = engine.stream(IDS, SamplingParams(temperature=0, max_new_tokens=6))
    assert [token for piece in (*pieces, last) for token in piece.tokens] == answer.tokens
    assert engine.default_params() == SamplingParams()
    of_the_config, of_the_defaults = engine.notes
    assert "unsloth_fixed_mtp" in of_the_config and "max_length=64 is not used" in of_the_defaults


def test_any_row_may_be_drawn_and_stop_ids_end_it(engine):
    answer = engine.generate(IDS, SamplingParams(logit_bias={1087: 1e4}, max_new_tokens=4))
    assert answer.tokens == [1087] * 4
    answer = engine.generate(IDS, SamplingParams(logit_bias={1087: 1e4}, max_new_tokens=4, stop_ids=(1087,)))
    assert answer.tokens == [1087] and answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda engine: engine.generate("text"), "prompt is text, but the engine was loaded without a tokenizer"),
        (lambda engine: engine.generate([{"role": "user", "content": "x"}]), "prompt is text, but the engine was loaded without"),
        (lambda engine: engine.generate(IDS, SamplingParams(stop=("x",))), "stop: texts end nothing without a tokenizer"),
        (lambda engine: engine.generate([1088]), "prompt holds token id 1088, the vocabulary has 0 to 1087"),
        (lambda engine: engine.generate([]), "prompt is empty"),
        (lambda engine: engine.tokenizer.encode("x"), "text: there is no tokenizer"),
        (lambda engine: engine.tokenizer.decode([1]), "decode: there is no tokenizer"),
        (lambda engine: engine.tokenizer.token_id("x"), "token 'x': there is no tokenizer"),
    ],
)
def test_texts_are_refused(engine, call, said):
    with pytest.raises(ValueError, match=rf"\A{said}.*\Z"):
        call(engine)
    assert engine.generate(IDS, SamplingParams(temperature=0, max_new_tokens=1)).tokens  # the engine goes on


def test_the_command(engine, folder, monkeypatch):
    asked = {}

    def load(path, config, **_):
        asked.update(path=path, tokenizer=config.tokenizer)
        return engine

    monkeypatch.setattr(Engine, "load", load)
    flags = ["--tokens", ",".join(map(str, IDS)), "--no-tokenizer", "--greedy", "--max-new", "6"]
    done = CliRunner().invoke(app, ["generate", str(folder), *flags])
    expected = engine.generate(IDS, SamplingParams(temperature=0, max_new_tokens=6)).tokens
    assert done.exit_code == 0 and done.stdout == ",".join(map(str, expected)) + "\n"
    assert asked == {"path": str(folder), "tokenizer": None}


def test_it_must_be_asked_for(folder):
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read"):
        Engine.load(folder)
    with pytest.raises(ValueError, match=r"no tokenizer\.json beside the weights.*--no-tokenizer"):
        convert(folder, folder / "x")


def test_end_tokens_that_the_files_name_count(folder, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1087, "stop_strings": ["x"], "top_k": 3}))
    found = open_text(tmp_path, 1088, None)
    assert (found.defaults.eos_ids, found.defaults.stop, found.defaults.top_k) == ((1087,), (), 3)
    with pytest.raises(ValueError, match=r"eos_token_id 1087 is no token, config\.json has 1000 ids"):
        open_text(tmp_path, 1000, None)


def test_plans_count_the_rows_of_the_head(folder):
    assert model_of(str(folder), None) == (ModelConfig.from_hf(folder), 1088)
    assert model_of("qwen3_8_27b", None)[1] == 248_320 and model_of("qwen3_8_27b")[1] == 248_077
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read"):
        model_of(str(folder))


def test_an_artifact_for_token_ids_alone(folder, tmp_path):
    artifact = convert(folder, tmp_path / "x", tokenizer=None)
    assert "tokenizer.json" not in artifact.manifest["files"]
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read"):
        Engine.load(tmp_path / "x")
