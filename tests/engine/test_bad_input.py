"""Mistakes in files and requests: one clear line, in Python as a ValueError and on the command line as its whole stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from ninfer_jax import Engine, EngineConfig, ModelConfig, SamplingParams
from ninfer_jax.cli.main import app
from ninfer_jax.config import recipe
from ninfer_jax.model import TextModel

USER = {"role": "user", "content": "x"}


def refused(action: Callable[[], object], *parts: str) -> None:
    """`action` must raise ValueError with one line that holds all of `parts`."""
    with pytest.raises(ValueError) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message, message


def refused_by_cli(*arguments: str | Path, parts: tuple[str, ...], stdin: bytes | None = None) -> None:
    """`ninfer-jax generate` must fail with one line on stderr that holds all of `parts`, and print nothing else."""
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)], input=stdin)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1, result.stderr
    for part in parts:
        assert part in result.stderr, result.stderr


def _shards(checkpoint_dir: Callable[..., Path]) -> tuple[Path, Path]:
    folder = checkpoint_dir(shard_bytes=100_000)
    return folder, sorted(folder.glob("model-*.safetensors"))[1]


def missing_shard(checkpoint_dir):
    folder, shard = _shards(checkpoint_dir)
    shard.unlink()
    return folder, {}, (shard.name, "not in the directory")


def truncated_shard(checkpoint_dir):
    folder, shard = _shards(checkpoint_dir)
    shard.write_bytes(shard.read_bytes()[:-6])
    return folder, {}, (shard.name, "cut short")


def extended_shard(checkpoint_dir):
    folder, shard = _shards(checkpoint_dir)
    shard.write_bytes(shard.read_bytes() + bytes(6))
    return folder, {}, (shard.name, "6 bytes after its last tensor")


def index_names_an_absent_file(checkpoint_dir):
    folder, shard = _shards(checkpoint_dir)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text("utf-8").replace(shard.name, "model-00009-of-00009.safetensors"))
    return folder, {}, ("model.safetensors.index.json", "model-00009-of-00009.safetensors", "not in the directory")


def missing_tensor(checkpoint_dir):
    return checkpoint_dir(tensors={"norm.weight": None}), {}, ("lacks 1 of", "norm.weight")


def extra_tensor(checkpoint_dir):
    folder = checkpoint_dir(tensors={"layers.1.self_attn.sinks": np.zeros(1, np.float32)})
    return folder, {}, ("1 tensors the model does not have", "layers.1.self_attn.sinks", "model.safetensors")


def wrong_shape(checkpoint_dir):
    folder = checkpoint_dir(tensors={"norm.weight": np.zeros(65, np.float32)})
    return folder, {}, ("norm.weight", "[65]", "[64]")


def not_a_number(checkpoint_dir):
    return checkpoint_dir(tensors={"norm.weight": np.full(64, np.nan, np.float32)}), {}, ("norm.weight", "nan at [0]")


def no_tensors(checkpoint_dir):
    folder = checkpoint_dir()
    (folder / "model.safetensors").unlink()
    return folder, {}, (str(folder), "no .safetensors file")


def drafts_without_an_mtp_layer(checkpoint_dir):
    said = ("draft is 2", "mtp_num_hidden_layers is 0", "mtp.* tensors are there", "use draft 0")
    return checkpoint_dir(config={"mtp_num_hidden_layers": 0}), {"draft": 2}, said


def drafts_without_mtp_tensors(checkpoint_dir, random_tensors):
    gone = {name: None for name in random_tensors if name.startswith("mtp.")}
    return checkpoint_dir(tensors=gone), {"draft": 1}, ("draft is 1", "no MTP head", "use draft 0")


def drafts_with_half_an_mtp_head(checkpoint_dir):
    folder = checkpoint_dir(tensors={"mtp.fc.weight": None})
    return folder, {"draft": 1}, ("mtp.fc.weight", "speculation must be off")


def more_tokens_than_rows(checkpoint_dir):
    return checkpoint_dir(config={"vocab_size": 1000}), {}, ("tokenizer.json has 1024 ids", "vocab_size of 1000")


def end_token_that_is_none(checkpoint_dir):
    folder = checkpoint_dir()
    (folder / "generation_config.json").write_text('{"eos_token_id": [991, 1024]}')
    return folder, {}, ("eos_token_id 1024", "1024 ids")


def no_end_token(checkpoint_dir):
    folder = checkpoint_dir()
    (folder / "generation_config.json").unlink()
    return folder, {}, ("generation_config.json", "eos_token_id")


def no_config(checkpoint_dir):
    folder = checkpoint_dir()
    (folder / "config.json").unlink()
    return folder, {}, (str(folder / "config.json"), "No such file")


def no_tokenizer(checkpoint_dir):
    folder = checkpoint_dir()
    (folder / "tokenizer.json").unlink()
    return folder, {}, (str(folder / "tokenizer.json"), "cannot be read")


def damaged_tokenizer(checkpoint_dir):
    folder = checkpoint_dir()
    (folder / "tokenizer.json").write_text('{"model": ')
    return folder, {}, ("tokenizer.json", "not JSON")


def another_architecture(checkpoint_dir):
    return checkpoint_dir(config={"model_type": "qwen3_next"}), {}, ("model_type is 'qwen3_next'", "'qwen3_5'")


def a_quantised_checkpoint(checkpoint_dir):
    folder = checkpoint_dir(config={"quantization_config": {"quant_method": "awq"}})
    return folder, {}, ("lm_head.weight", "quantisation awq is not supported")


def context_beyond_the_models(checkpoint_dir):
    return checkpoint_dir(), {"context": 513}, ("context is 513", "max_position_embeddings is 512")


def no_directory(checkpoint_dir):
    folder = checkpoint_dir() / "nowhere"
    return folder, {}, (str(folder), "No such file", "or `tiny`")


def a_truncated_prompt(checkpoint_dir):
    """Settings of whoever saved the tokenizer: what would cut a prompt in silence is no mistake, flags not implemented are."""
    folder = checkpoint_dir()
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    content["added_tokens"][0]["lstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(content | {"truncation": {"max_length": 16}}), "utf-8")
    return folder, {}, ("tokenizer.json", "'<|endoftext|>' has lstrip=true")


def a_config_that_is_no_text(checkpoint_dir):
    folder = checkpoint_dir()
    (folder / "config.json").write_bytes((folder / "model.safetensors").read_bytes())
    return folder, {}, (str(folder / "config.json"), "a safetensors file, not a text")


def a_weight_file_for_the_model(checkpoint_dir):
    file = checkpoint_dir() / "model.safetensors"
    return file, {}, (str(file), "is a safetensors file: name the directory that holds it")


def a_key_twice(checkpoint_dir):
    folder = checkpoint_dir()
    (folder / "generation_config.json").write_text('{"eos_token_id": 991, "top_k": 3, "top_k": 4}')
    return folder, {}, ("generation_config.json lists top_k twice",)


CASES = [
    missing_shard,
    truncated_shard,
    extended_shard,
    index_names_an_absent_file,
    missing_tensor,
    extra_tensor,
    wrong_shape,
    not_a_number,
    no_tensors,
    drafts_without_an_mtp_layer,
    drafts_with_half_an_mtp_head,
    more_tokens_than_rows,
    end_token_that_is_none,
    no_end_token,
    no_config,
    no_tokenizer,
    damaged_tokenizer,
    another_architecture,
    a_quantised_checkpoint,
    context_beyond_the_models,
    no_directory,
    a_truncated_prompt,
    a_config_that_is_no_text,
    a_weight_file_for_the_model,
    a_key_twice,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_checkpoint_that_does_not_fit(case, checkpoint_dir):
    folder, options, parts = case(checkpoint_dir)
    refused(lambda: Engine.load(folder, EngineConfig(**options)), *parts)
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    refused_by_cli(folder, "--prompt", "x", *flags, parts=parts)


def test_drafts_without_mtp_tensors(checkpoint_dir, random_tensors):
    folder, options, parts = drafts_without_mtp_tensors(checkpoint_dir, random_tensors)
    refused(lambda: Engine.load(folder, EngineConfig(**options)), *parts)
    refused_by_cli(folder, "--prompt", "x", "--draft", "1", parts=parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"kv": "q4"}, ("kv format 'q4'", "f32, bf16, int8, rk8v4, rk4v4, rk4v4-e8")),
        ({"draft": 6}, ("draft is 6", "0 to 5")),
        ({"draft": -1}, ("draft is -1", "0 to 5")),
        ({"slots": 0}, ("slots is 0", "1 to 4")),
        ({"context": 0}, ("context is 0", "1 to 262144")),
        ({"context": 262_145}, ("context is 262145", "1 to 262144")),
        ({"dtype": "float16"}, ("dtype is 'float16'", "bfloat16")),
        ({"draft": 10**30}, ("draft is 1000000000", "0 to 5")),
    ],
    ids=str,
)
def test_engine_options(options, parts):
    refused(lambda: EngineConfig(**options), *parts)
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    refused_by_cli("tiny", "--prompt", "x", *flags, parts=parts)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("temperature", -0.5, "--temperature"),
        ("temperature", float("nan"), "--temperature"),
        ("top_k", -2, "--top-k"),
        ("top_p", -0.1, "--top-p"),
        ("top_p", float("nan"), "--top-p"),
        ("top_p", 1.1, "--top-p"),
        ("min_p", -1.0, "--min-p"),
        ("max_new_tokens", 0, "--max-new"),
        ("max_new_tokens", -3, "--max-new"),
        ("seed", -1, "--seed"),
        ("stop", [""], "--stop"),
        ("presence_penalty", float("nan"), None),
        ("frequency_penalty", float("inf"), None),
        ("repetition_penalty", -1.0, None),
        ("repetition_penalty", 0.0, None),
        ("logprobs", 21, None),
        ("logit_bias", {3: float("nan")}, None),
        ("logit_bias", {-3: 1.0}, None),
        ("stop_ids", [-1], None),
        ("stop_ids", list(range(17)), None),
        ("stop", "END", None),
        ("temperature", "hot", None),
        ("temperature", True, None),
        ("top_k", 1.5, None),
        ("ignore_eos", "no", None),
    ],
    ids=str,
)
def test_sampling_values(field, value, flag):
    refused(lambda: SamplingParams(**{field: value}), field)
    if flag:
        given = value[0] if isinstance(value, list) else value
        refused_by_cli("tiny", "--prompt", "x", flag, given, parts=(field,))


@pytest.mark.parametrize("value", [np.float32, float, object(), ("auto",), "float16" * 100], ids=lambda value: type(value).__name__)
def test_types_are_named_as_users_write_them(value):
    refused(lambda: EngineConfig(dtype=value), "dtype is", "known are auto, float32, bfloat16")
    with pytest.raises(ValueError, match=r"^(?!.*<class).{,200}$"):
        EngineConfig(dtype=value)


def test_a_recipe_names_what_does_not_go_with_it(checkpoint_dir):
    tied = ModelConfig.from_hf(checkpoint_dir(config={"tie_word_embeddings": True}))
    refused(lambda: TextModel(tied, jnp.bfloat16, mtp=False, recipe=recipe("q4")), "recipe q4: needs an output head of its own")


@pytest.mark.parametrize("value", ["tokenizer.json", "", False, 3], ids=repr)
def test_the_tokenizer_is_the_checkpoints_or_none(value):
    refused(lambda: EngineConfig(tokenizer=value), "tokenizer is", "'auto'", "None")


def test_huge_numbers_are_named_in_short():
    refused(lambda: SamplingParams(seed=10**5000), "seed is a number of more than 4300 digits", "from 0 to")
    refused(lambda: SamplingParams(top_k=[1] * 10_000), "top_k is [1, 1", "characters")
    refused(lambda: SamplingParams(stop=["a\ud800"]), "stop[0]: character 1 is a lone surrogate")


def test_token_ids_beyond_the_vocabulary(plain_engine):
    for params, parts in (
        (SamplingParams(stop_ids=[1024]), ("stop_ids names token 1024", "1024")),
        (SamplingParams(logit_bias={1030: 1.0}), ("logit_bias names token 1030", "1024")),
        (SamplingParams(stop_ids=list(range(15))), ("stop_ids: 17 end tokens", "16")),
    ):
        refused(lambda params=params: plain_engine.generate("x", params), *parts)
    refused(lambda: plain_engine.generate([5, 1024]), "token id 1024", "0 to 1023")
    refused(lambda: plain_engine.score([5, -1]), "token id -1", "0 to 1023")


def test_prompts(plain_engine):
    for prompt, parts in (
        ("", ("prompt is empty",)),
        ([], ("prompt is empty",)),
        (np.zeros(0, np.int32), ("prompt is empty",)),
        (np.zeros((2, 2), np.int32), ("text, a list of token ids or a list of messages",)),
        ([1.0, 2.0], ("text, a list of token ids or a list of messages",)),
        ([USER, "x"], ("text, a list of token ids or a list of messages",)),
        (b"x", ("text, a list of token ids or a list of messages",)),
        ("a\ud800", ("character 1", "surrogate")),
        ([{"role": "user", "content": "a\ud800"}], ("messages[0].content: character 1", "surrogate")),
        ([{"role": "user", "content": "x", "n": float("nan")}], ("messages[0].n", "nan")),
        ([7] * 600, ("prompt has 600 tokens", "context holds 512")),
    ):
        refused(lambda prompt=prompt: plain_engine.generate(prompt), *parts)


MESSAGES = [
    ([{"content": "x"}], ("messages[0].role", "missing")),
    ([USER, {"role": "cook", "content": "x"}], ("messages[1].role", "'cook'", "user")),
    ([{"role": "user", "content": 5}], ("messages[0].content", "a number")),
    ([{"role": "user"}], ("messages[0].content", "missing")),
    ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], ("messages[0].content[0].type", "'image'")),
    (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{'a': 1}"}}]}],
        ("messages[1].tool_calls[0].function.arguments", "not valid JSON"),
    ),
    (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
        ("messages[1].tool_calls[0].function.arguments", "must be an object"),
    ),
]


@pytest.mark.parametrize(("messages", "parts"), MESSAGES, ids=lambda value: None)
def test_messages(plain_engine, messages, parts):
    refused(lambda: plain_engine.generate(messages), *parts)


def test_template_options(plain_engine):
    refused(lambda: plain_engine.generate([USER], enable_thinking="no"), "enable_thinking", "true or false")
    refused(lambda: plain_engine.generate([USER], enable_thought=False), "enable_thought", "enable_thinking")
    for prompt in ("x", [1, 2]):
        refused(lambda prompt=prompt: plain_engine.generate(prompt, enable_thinking=False), "enable_thinking", "only messages")


def test_messages_without_a_template(plain_engine, monkeypatch):
    monkeypatch.setattr(plain_engine, "template", None)
    refused(lambda: plain_engine.generate([USER]), "no chat template", "text or token ids")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b'[{"role": "user", "content": "caf\xe9"}]', ("not UTF-8", "byte 33")),
        (b"[{'role': 'user'}]", ("not JSON", "line 1")),
        (b"{}", ("must hold a list of messages",)),
        (b"[]", ("must hold a list of messages",)),
        (b'["x"]', ("must hold a list of messages",)),
        (b"[" * 200_000, ("nested too deeply",)),
        (b'[{"role": "user", "role": "system", "content": "x"}]', ("lists role twice",)),
        ("[]".encode("utf-16"), ("UTF-16: save it as UTF-8",)),
        (b"GGUF\3\0\0\0" + b"\0" * 99, ("a GGUF file, not a text",)),
        (None, ("No such file",)),
    ],
    ids=lambda value: None,
)
def test_message_files(tmp_path, content, parts):
    file = tmp_path / "messages.json"
    if content is not None:
        file.write_bytes(content)
    refused_by_cli("tiny", "--messages", file, parts=(str(file), *parts))


def test_stdin_that_is_not_utf8():
    refused_by_cli("tiny", "-", stdin=b"abc\xff", parts=("stdin", "not UTF-8", "byte 3"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ("exactly one of",)),
        (["--prompt", "x", "--tokens", "1"], ("exactly one of",)),
        (["--tokens", "1,x"], ("--tokens", "by commas")),
        (["--tokens", ""], ("--tokens", "by commas")),
        (["--prompt", "x", "--no-tokenizer"], ("--no-tokenizer goes with --tokens",)),
        (["--prompt", "a\udcff"], ("--prompt: character 1", "U+DCFF")),
        (["--prompt", "x", "--programs", "gone"], ("--programs gone: No such file",)),
        (["--prompt", "x", "-"], ("exactly one of",)),
        (["--prompt", "x", "--messages", "m.json"], ("exactly one of",)),
        (["x"], ("unexpected argument 'x'", "--prompt")),
        (["--prompt", "x", "--no-thinking"], ("--no-thinking", "--messages")),
    ],
    ids=str,
)
def test_one_prompt_is_given(arguments, parts):
    refused_by_cli("tiny", *arguments, parts=parts)


@pytest.fixture
def loaded(monkeypatch, plain_engine):
    """The command line finds the engine loaded already."""
    monkeypatch.setattr(Engine, "load", lambda *_, **__: plain_engine)


def test_requests_that_the_loaded_model_refuses(loaded, tmp_path):
    for arguments, stdin, parts in (
        (["-"], b"", ("prompt is empty",)),
        (["--prompt", "word " * 2000], None, ("tokens, the context holds 512",)),
        *((["--messages", _written(tmp_path, i, messages)], None, parts) for i, (messages, parts) in enumerate(MESSAGES)),
    ):
        refused_by_cli("tiny", *arguments, stdin=stdin, parts=parts)


def _written(folder: Path, number: int, messages: list) -> str:
    file = folder / f"{number}.json"
    file.write_text(json.dumps(messages), "utf-8")
    return str(file)
