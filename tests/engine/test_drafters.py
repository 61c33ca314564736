"""Who drafts changes the number of rounds and nothing else; what is looked up is a sequence's own, however it came there."""

from __future__ import annotations

import re
from dataclasses import replace

import micro
import numpy as np
import pytest
from looking import searched, walked
from typer.testing import CliRunner

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.cli.main import app
from ninfer_jax.engine.slot_pool import Lease
from ninfer_jax.programs.lookup import LONGEST, SHORTEST
from ninfer_jax.text.grammar import regex

pytestmark = pytest.mark.micro
SHAPES = dict(context=256, prefill_chunk=64, kv="f32", slots=2)

GREEDY = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=7, top_k=3, frequency_penalty=-0.5)
PATTERN = [5, 900, 33, 17, 256, 80, 2, 41, 7]
PROMPTS = (PATTERN * 8, [*range(100, 130), *range(100, 120)], [11] * 3, [*PATTERN, 1, *PATTERN, 2, *PATTERN])


@pytest.fixture(scope="module")
def headless(tmp_path_factory, random_tensors):
    """The same checkpoint without its MTP head: its answers are the same."""
    tensors = {name: array for name, array in random_tensors.items() if not name.startswith("mtp.")}
    return micro.write(tmp_path_factory.mktemp("headless") / "model", tensors, {"mtp_num_hidden_layers": 0})


@pytest.fixture
def looking_up(engine_for, headless):
    """K -> an engine of two slots that looks drafts up, for a model that has no other way to draft."""
    return lambda k: engine_for(headless, quickly=True, **SHAPES, draft=k, drafter="lookup")


# Three is what the other tests use too; the rest is a product.
EVERY_K = [k if k == 3 else pytest.param(k, marks=pytest.mark.full) for k in range(1, 6)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", EVERY_K)
def test_looked_up_drafts_are_those_of_a_search(micro_engine, looking_up, k, params):
    """Tokens are those without drafts; rounds, drafts and accepted ones are what a walk over the answer counts."""
    answers = looking_up(k).generate_many(PROMPTS, params)
    counts = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == micro_engine.generate(prompt, params).tokens
        stats = answer.stats
        counts.append((stats.rounds, stats.drafted, stats.accepted))
        assert counts[-1] == walked(prompt, answer.tokens, k, SHORTEST, LONGEST)
    rounds, drafted, accepted = (sum(each) for each in zip(*counts, strict=True))
    assert 0 < accepted <= drafted < k * rounds
    assert k < 3 or accepted < drafted  # one or two of a greedy answer that repeats itself may all be right


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", EVERY_K)
def test_where_nothing_is_found_the_mtp_head_drafts(engine_for, micro_path, micro_engine, k, params):
    engine = engine_for(micro_path, quickly=True, **SHAPES, draft=k, drafter="mtp+lookup")
    answers = engine.generate_many(PROMPTS, params)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == micro_engine.generate(prompt, params).tokens
        assert answer.stats.drafted == k * answer.stats.rounds
    assert sum(answer.stats.accepted for answer in answers) > 0


def test_grammars_bind_whether_or_not_something_is_found(micro_engine, looking_up):
    params = replace(GREEDY, grammar=regex("(ab|ba){8,20}"), ignore_eos=False)
    answers = looking_up(3).generate_many(PROMPTS, params)
    assert [a.tokens for a in answers] == [micro_engine.generate(prompt, params).tokens for prompt in PROMPTS]
    assert all(re.fullmatch("(ab|ba){8,20}", a.text) for a in answers if a.finish_reason == "stop")
    assert 0 < sum(a.stats.accepted for a in answers) < sum(a.stats.drafted for a in answers)


def append(lease: Lease, tokens: list[int]) -> None:
    for _ in lease.prefill(tokens):
        pass


def own(engine: Engine, lease: Lease, count: int) -> tuple[list[int], list[int]]:
    """The first ids that the device has of a slot, and its drafts."""
    state = engine.runner.pool.state
    return np.asarray(state.history)[lease.slot, :count].tolist(), np.asarray(state.slots.drafts)[lease.slot].tolist()


def test_tokens_are_known_however_they_came_into_the_slot(looking_up):
    """By chunks, by a restored snapshot, by a given token."""
    engine = looking_up(3)
    text = [*PATTERN * 8, 1000]
    with engine.runner.lease(128) as lease, engine.runner.lease(128) as other:
        append(lease, text)
        assert own(engine, lease, len(text))[0] == text
        other.restore(lease.snapshot(), text)  # of its pages nothing is read here
        lease.step(1)
        assert own(engine, lease, len(text) + 1)[0] == [*text, 1]
        assert own(engine, other, len(text) + 1)[0] == [*text, 0]


def test_a_restored_sequence_drafts_from_what_was_before(looking_up):
    """What it looks up stood before the cut, and never went through this slot."""
    engine = looking_up(3)
    pool, text, cut = engine.runner.pool, [*range(300, 308), *PATTERN, *range(200, 247), *PATTERN[:6]], 64
    with pool.transaction():
        leases = [pool.admit(128, 40, GREEDY) for _ in range(2)]
    first, second = leases
    append(first, text[:cut])
    taken = first.snapshot()
    with pool.transaction():
        pool.copy_page(int(first.table[0]), int(second.table[0]))
    second.restore(taken, text[:cut])
    first.end()
    append(second, text[cut:])
    tokens = [*text, int(second.begin().tokens[second.slot, 0])]
    history, drafts = own(engine, second, len(tokens))
    assert history == tokens and drafts == searched(tokens, 3, SHORTEST, LONGEST)
    for _ in range(5):
        with pool.transaction():
            out = pool.round()
        tokens += np.asarray(out.tokens)[second.slot, : int(out.emitted[second.slot])].tolist()
        history, drafts = own(engine, second, len(tokens))
        assert history == tokens and drafts == searched(tokens, 3, SHORTEST, LONGEST)
    second.end()


def test_the_window_of_a_slot_that_is_used_again_has_nothing_of_before(looking_up, micro_engine):
    """A longer sequence was there; its tokens are no matches for the next one."""
    engine = looking_up(3)
    engine.generate(PATTERN * 12, GREEDY)
    prompt = [*range(300, 310), *PATTERN[:4]]
    answer = engine.generate(prompt, GREEDY)
    assert answer.tokens == micro_engine.generate(prompt, GREEDY).tokens
    assert answer.stats.drafted == walked(prompt, answer.tokens, 3, SHORTEST, LONGEST)[1]


def test_no_drafter_is_no_drafts(micro_path):
    """And no memory for any."""
    from ninfer_jax.programs.setup import model_of, resolve

    shape = resolve(*model_of(str(micro_path)), EngineConfig(draft=3, drafter="none"), "cpu").shape
    assert (shape.draft, shape.drafter, shape.mtp, shape.lookup) == (0, "none", False, False)


@pytest.mark.parametrize("drafter", ["mtp", "mtp+lookup"])
def test_a_model_without_an_mtp_head_is_told_what_can_draft(headless, drafter):
    with pytest.raises(ValueError, match="draft is 2, .*no MTP head.*use draft 0 or drafter 'lookup'") as caught:
        Engine.load(headless, EngineConfig(draft=2, drafter=drafter))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--draft", "2"], "use draft 0 or drafter 'lookup'"),
        (["--draft", "0", "--drafter", "lookup"], "drafter is 'lookup', but draft is 0"),
        (["--draft", "2", "--drafter", "oracle"], "drafter is 'oracle', known are mtp, lookup, mtp+lookup, none"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "--tokens", "1,2"], ["plan", "--target", "cpu"], ["compile", "--target", "cpu"]])
def test_the_command_line_refuses_in_one_line(headless, tmp_path, command, arguments, message):
    name, *rest = command
    out = ["--out", str(tmp_path / "out")] if name == "compile" else []
    done = CliRunner().invoke(app, [name, str(headless), *rest, *arguments, *out])
    (line,) = done.stderr.strip().splitlines()
    assert done.exit_code == 1 and message in line
