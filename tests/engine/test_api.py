"""One completion through the public API: prompt kinds, pieces, ends, limits, seeds and the split into reasoning and answer."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scripted import run

from ninfer_jax import SamplingParams
from ninfer_jax.checkpoints import tiny_path

TEXT = "HAMLET.\nGood night, sweet "
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


@pytest.fixture(params=["plain", "drafting"])
def engine(request, plain_engine, draft_engine):
    """The same expectations without drafts and with them."""
    return {"plain": plain_engine, "drafting": draft_engine}[request.param]


def varied(engine, **changes) -> SamplingParams:
    """Sampling that never ends by itself and, for the sake of plain text, draws no control token."""
    banned = dict.fromkeys(engine.tokenizer.control_tokens.values(), -10000.0)
    return SamplingParams(
        **{"temperature": 1.0, "seed": 4, "max_new_tokens": 48, "ignore_eos": True, "logit_bias": banned, **changes}
    )


def test_text_and_ids_are_the_same_prompt(engine):
    params = varied(engine, max_new_tokens=12)
    ids = engine.tokenizer.encode(TEXT)
    expected = engine.generate(TEXT, params)
    assert expected.prompt_tokens == len(ids)
    assert len(expected.tokens) == 12 and expected.finish_reason == "length" and expected.logprobs is None
    assert expected.text == engine.tokenizer.decode(expected.tokens) and expected.reasoning == ""
    for same in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint16), [np.int64(i) for i in ids]):
        completion = engine.generate(same, params)
        assert (completion.tokens, completion.text) == (expected.tokens, expected.text)


def test_messages_go_through_the_template(engine):
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    ids = engine.tokenizer.encode(rendered, allow_special=True)
    assert engine.prompt_ids(MESSAGES) == ids
    params = varied(engine, max_new_tokens=8)
    assert engine.generate(MESSAGES, params).tokens == engine.generate(ids, params).tokens


@pytest.mark.parametrize("prompt", [TEXT, MESSAGES], ids=["text", "messages"])
def test_pieces_add_up_to_the_completion(engine, prompt):
    *pieces, last = engine.stream(prompt, SamplingParams(temperature=0.7, seed=2, max_new_tokens=60, ignore_eos=True, stop=["xqz"]))
    completion = last.completion
    assert all(piece.completion is None for piece in pieces)
    assert len(pieces) > 3
    for name in ("text", "reasoning"):
        assert "".join(getattr(piece, name) for piece in (*pieces, last)) == getattr(completion, name)
    assert [token for piece in (*pieces, last) for token in piece.tokens] == completion.tokens


def test_prefill_tells_its_progress(engine):
    ids = list(range(150))
    seen = []
    engine.generate(ids, SamplingParams(max_new_tokens=1), on_prefill=lambda done, total: seen.append((done, total)))
    assert seen == [(64, 150), (128, 150), (150, 150)]


def test_a_stop_string_ends_it_wherever_tokens_meet(engine):
    free = engine.generate(TEXT, varied(engine))
    tokens, full = free.tokens, engine.tokenizer.decode(free.tokens)
    lengths = [len(engine.tokenizer.decode(tokens[:n])) for n in range(len(tokens) + 1)]
    borders = [n for n in range(1, len(tokens)) if full[lengths[n] - 1 : lengths[n] + 2].isascii()]
    assert len(borders) > 5
    for border in borders[::3]:
        stop = full[lengths[border] - 1 : lengths[border] + 2]  # begins in one token, ends in another
        found = full.index(stop)
        used = next(n for n, length in enumerate(lengths) if length >= found + len(stop))
        completion = engine.generate(TEXT, varied(engine, stop=["never here", stop]))
        assert completion.finish_reason == "stop"
        assert completion.text == full[:found]
        assert completion.tokens == tokens[:used]
        stats = completion.stats
        # Every round keeps its drafts and one token more, but the last round's may have come after the stop string.
        assert len(tokens[:used]) - 1 - stats.accepted in (stats.rounds - 1, stats.rounds)


def test_drafts_behind_a_stop_string_do_not_count(plain_engine, draft_engine):
    """Every draft is right here, so that each round of four tokens would count three; the last one keeps fewer."""
    prompt, params = draft_engine.tokenizer.encode(TEXT), varied(draft_engine)
    truth = plain_engine.generate(prompt, params).tokens
    decoded = [draft_engine.tokenizer.decode(truth[:n]) for n in range(len(truth) + 1)]
    kept_last = set()
    for used in range(2, len(truth)):
        stop = decoded[used][-4:]
        if next(n for n, text in enumerate(decoded) if stop in text) != used:
            continue  # completed earlier, or cut through a character
        rounds, kept = divmod(used - 2, 4)
        if kept in kept_last:
            continue
        kept_last.add(kept)
        sequence, _ = run(draft_engine, prompt, replace(params, stop=(stop,)), lambda tokens: (truth + [0] * 3)[len(tokens) :][:3])
        assert sequence.tokens == truth[:used]
        assert (sequence.stats.rounds, sequence.stats.accepted) == (rounds + 1, 3 * rounds + min(kept + 1, 3))
    assert kept_last == {0, 1, 2, 3}


def test_a_stop_string_that_never_completes_is_text(engine):
    free = engine.generate(TEXT, varied(engine))
    held = engine.generate(TEXT, varied(engine, stop=[free.text[-3:] + "\0\0"]))
    assert (held.text, held.tokens, held.finish_reason) == (free.text, free.tokens, "length")


def test_end_tokens(engine):
    end = json.loads((tiny_path() / "generation_config.json").read_text("utf-8"))["eos_token_id"]
    for token in end:
        forced = SamplingParams(temperature=0, max_new_tokens=5, logit_bias={token: 1e4})
        completion = engine.generate(TEXT, forced)
        assert (completion.tokens, completion.text, completion.finish_reason) == ([token], "", "stop")
        ignored = engine.generate(TEXT, replace(forced, ignore_eos=True))
        assert (ignored.tokens, ignored.text, ignored.finish_reason) == ([token] * 5, "", "length")


def test_stop_ids_end_it_at_their_first_occurrence(engine):
    tokens = engine.generate(TEXT, varied(engine)).tokens
    for wanted in (tokens[0], tokens[7], tokens[-1]):
        completion = engine.generate(TEXT, varied(engine, stop_ids=[wanted]))
        assert completion.tokens == tokens[: tokens.index(wanted) + 1]
        assert completion.finish_reason == "stop"


@pytest.mark.parametrize("asked", [None, 5, 100])
def test_the_context_clamps_the_answer(engine, asked):
    prompt = engine.tokenizer.encode(TEXT * 100)[:500]
    completion = engine.generate(prompt, varied(engine, max_new_tokens=asked))
    assert len(completion.tokens) == (5 if asked == 5 else 12)
    assert completion.finish_reason == "length"


def test_a_prompt_may_fill_the_context_but_for_one_token(engine):
    prompt = engine.tokenizer.encode(TEXT * 100)
    completion = engine.generate(prompt[:511], varied(engine))
    assert len(completion.tokens) == 1 and completion.finish_reason == "length"
    with pytest.raises(ValueError, match="prompt has 512 tokens, the context holds 512"):
        engine.generate(prompt[:512], varied(engine))


def test_seeds_reproduce_with_drafts_and_without(plain_engine, draft_engine):
    for params in (
        varied(plain_engine, seed=1),
        varied(plain_engine, seed=2),
        varied(plain_engine, seed=2**64 - 1, top_k=30, top_p=0.9),
    ):
        expected = plain_engine.generate(TEXT, params).tokens
        assert plain_engine.generate(TEXT, params).tokens == expected
        assert draft_engine.generate(TEXT, params).tokens == expected
        others = [varied(plain_engine, seed=8), params, varied(plain_engine, temperature=0, frequency_penalty=1.0)]
        assert draft_engine.generate_many(["def f(", TEXT, "KING."], others)[1].tokens == expected


def test_other_seeds_give_other_answers(engine):
    answers = [engine.generate(TEXT, varied(engine, temperature=5.0, seed=seed)).tokens for seed in (0, 1, 2**32, None, None)]
    assert len(set(map(tuple, answers))) == 5


def test_temperature_zero_needs_no_seed(engine):
    answers = {tuple(engine.generate(TEXT, varied(engine, temperature=0, seed=seed)).tokens) for seed in (None, 0, 3)}
    assert len(answers) == 1


def test_defaults_are_the_checkpoints_own(engine):
    own = json.loads((tiny_path() / "generation_config.json").read_text("utf-8"))
    params = engine.default_params(max_new_tokens=9)
    assert (params.temperature, params.top_k, params.top_p) == (own["temperature"], own["top_k"], own["top_p"])
    assert params.max_new_tokens == 9
    assert engine.default_params(temperature=0.1).temperature == 0.1


def test_defaults_have_every_sampling_value_that_a_checkpoint_names(plain_engine, monkeypatch):
    named = {"presence_penalty": 1.5, "frequency_penalty": 0.25, "max_new_tokens": 5, "stop": ("END",), "min_p": 0.1}
    monkeypatch.setattr(plain_engine, "defaults", replace(plain_engine.defaults, **named))
    params = plain_engine.default_params()
    assert {name: getattr(params, name) for name in named} == named
    assert len(plain_engine.generate(TEXT, plain_engine.default_params(stop=(), ignore_eos=True)).tokens) == 5
    # A penalty takes the token that was drawn before out of the running.
    strong = plain_engine.default_params(temperature=0, presence_penalty=100.0, stop=(), ignore_eos=True)
    assert len(set(plain_engine.generate(TEXT, strong).tokens)) == 5


def test_a_prompt_that_ends_inside_a_character(engine):
    """The answer begins with the whole character that it completes, and not with a broken one."""
    first, second = (engine.tokenizer.token_id(chr(byte)) for byte in "é".encode())  # bytes that stand for themselves
    assert engine.tokenizer.decode([first, second]) == "é"
    ids = [*engine.tokenizer.encode("caf"), first]
    for token, text in ((second, "é"), (engine.tokenizer.token_id("x"), "x")):
        params = SamplingParams(temperature=0, max_new_tokens=1, logit_bias={token: 1e4})
        pieces = [piece.text for piece in engine.stream(ids, params)]
        assert "".join(pieces) == engine.generate(ids, params).text == text


def test_stats_add_up(engine):
    config = json.loads((tiny_path() / "config.json").read_text("utf-8"))
    drafts = engine.programs.shape.draft
    for length in (1, 2, 30):
        completion = engine.generate(TEXT, varied(engine, temperature=0, max_new_tokens=length))
        stats = completion.stats
        assert len(completion.tokens) == length
        assert stats.drafted == drafts * stats.rounds
        # The first token comes from the prompt; each round gives its accepted drafts and at most one token more.
        assert length - 1 - stats.accepted in (stats.rounds - 1, stats.rounds) if drafts else length - 1 == stats.rounds
        assert stats.prefill_s > 0 and stats.decode_s >= 0
        assert stats.compilations == engine.compilations
        vectors = 2 * config["num_key_value_heads"] * config["layer_types"].count("full_attention")
        assert stats.kv_bytes_per_token == vectors * config["head_dim"] * 4


def thoughtful(engine, word: str) -> SamplingParams:
    """Greedy: `word` first, then `</think>`, then what the model likes; biases win once, then the penalty beats them."""
    banned = dict.fromkeys(engine.tokenizer.control_tokens.values(), -10000.0)
    (first,) = engine.tokenizer.encode(word)
    bias = banned | {first: 180.0, engine.tokenizer.token_id("</think>"): 90.0}
    return SamplingParams(temperature=0, max_new_tokens=20, presence_penalty=100.0, frequency_penalty=100.0, logit_bias=bias)


def test_thinking_is_told_from_the_answer(engine):
    completion = engine.generate(MESSAGES, thoughtful(engine, " the"))
    close = engine.tokenizer.token_id("</think>")
    assert completion.tokens[:2] == [*engine.tokenizer.encode(" the"), close]
    assert completion.reasoning == " the"
    assert completion.text == engine.tokenizer.decode(completion.tokens[2:]).lstrip("\n")
    assert completion.text


def test_without_thinking_everything_is_answer(engine):
    closed = engine.prompt_ids(MESSAGES, enable_thinking=False)
    assert engine.tokenizer.decode(closed, skip_special=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    params = varied(engine, max_new_tokens=20)
    completion = engine.generate(MESSAGES, params, enable_thinking=False)
    assert completion.prompt_tokens == len(closed)
    assert completion.reasoning == ""
    assert completion.text == engine.tokenizer.decode(completion.tokens)


def test_thinking_that_never_ends_is_no_answer(engine):
    completion = engine.generate(MESSAGES, varied(engine, max_new_tokens=20), enable_thinking=True)
    assert completion.text == ""
    assert completion.reasoning == engine.tokenizer.decode(completion.tokens).lstrip("\n")
