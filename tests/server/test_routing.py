"""Where requests go: homes, what moves them, and names of conversations. No Ray, no engine."""

from __future__ import annotations

import collections
import random

import pytest

from ninfer_jax.fleet.affinity import MAX_LINKS, Answered, affinity_of
from ninfer_jax.fleet.policy import WAITING_AT_HOME, Replica, by_home, ranked

NAMES = [f"replica-{number}" for number in range(5)]
KEYS = [f"conversation {number}" for number in range(2000)]


def idle(names=NAMES):
    return [Replica(name) for name in names]


def with_waiting(names, waiting):
    return [Replica(name, slots=2, requests=2 + waiting.get(name, 0)) for name in names]


def test_conversations_spread_evenly_over_replicas():
    homes = collections.Counter(by_home(key, NAMES)[0] for key in KEYS)
    # Binomial: 400 expected, standard deviation 17.9; five of them either way.
    assert set(homes) == set(NAMES) and all(310 < count < 490 for count in homes.values())


def test_the_order_of_replicas_does_not_matter():
    for key in KEYS[:50]:
        shuffled = random.Random(key).sample(NAMES, len(NAMES))
        assert ranked(key, (), idle(shuffled)) == ranked(key, (), idle())


def test_a_replica_that_goes_moves_only_its_own_conversations():
    for key in KEYS:
        before, after = by_home(key, NAMES)[0], by_home(key, NAMES[1:])[0]
        assert after == before if before != NAMES[0] else after != NAMES[0]


def test_a_replica_that_comes_takes_conversations_only_for_itself():
    moved = [key for key in KEYS if by_home(key, NAMES)[0] != by_home(key, [*NAMES, "new"])[0]]
    assert all(by_home(key, [*NAMES, "new"])[0] == "new" for key in moved)
    assert 240 < len(moved) < 430  # a sixth of them is 333, standard deviation 16.7


@pytest.mark.parametrize("waiting", range(WAITING_AT_HOME + 2))
def test_a_conversation_stays_at_home_until_three_wait_there(waiting):
    home = by_home("a", NAMES)[0]
    chosen = ranked("a", (), with_waiting(NAMES, {home: waiting}))[0]
    assert (chosen == home) == (waiting < 3)


def test_from_a_busy_home_it_goes_where_its_prefix_is_deepest():
    home, near, deep, *_ = by_home("a", NAMES)
    chain = [("one", 500), ("two", 20), ("three", 20)]
    seen = {near: {"one"}, deep: {"one", "two"}, home: {"one", "two", "three"}}
    replicas = [Replica(name, 2, 6 if name == home else 3, seen.get(name, ())) for name in NAMES]
    order = ranked("a", chain, replicas)
    assert order[:2] == [deep, near] and set(order) == set(NAMES)


def test_a_prefix_counts_only_from_its_beginning():
    home, other, *_ = by_home("a", NAMES)
    replicas = [
        Replica(name, 1, 4 if name == home else 1 if name == other else 0, {"two"} if name == other else ()) for name in NAMES
    ]
    assert ranked("a", [("one", 5), ("two", 500)], replicas)[0] not in (home, other)


def test_without_a_prefix_anywhere_it_goes_to_the_least_loaded():
    home = by_home("a", NAMES)[0]
    load = dict.fromkeys(NAMES, 3) | {home: 9, NAMES[2] if NAMES[2] != home else NAMES[3]: 1}
    least = min(load, key=lambda name: load[name])
    assert ranked("a", (), [Replica(name, 2, load[name]) for name in NAMES])[0] == least


def test_where_all_are_as_busy_it_waits_at_home():
    home = by_home("a", NAMES)[0]
    assert ranked("a", [("one", 9)], [Replica(name, 2, 8, {"one"}) for name in NAMES])[0] == home


def test_a_prefix_on_a_replica_as_busy_as_home_does_not_count():
    home, other, *_ = by_home("a", NAMES)
    replicas = [Replica(name, 1, 7 if name in (home, other) else 2, {"one"} if name == other else ()) for name in NAMES]
    assert ranked("a", [("one", 9)], replicas)[0] not in (home, other)


def test_load_is_by_slots():
    small, large = Replica("small", 1, 3), Replica("large", 8, 6)
    assert ranked(None, (), [small, large])[0] == "large"


def test_a_request_of_no_conversation_goes_to_the_least_loaded():
    assert ranked(None, (), [Replica(name, 1, number) for number, name in enumerate(reversed(NAMES))])[0] == NAMES[-1]
    assert ranked(None, (), []) == [] == ranked("a", (), [])


def chat(*messages, **more):
    return {"messages": [{"role": role, "content": content} for role, content in messages], **more}


TURN = chat(("system", "You help."), ("user", "Hello"))


def test_a_header_names_the_conversation_before_anything_in_the_body():
    body = TURN | {"prompt_cache_key": "key", "metadata": {"user_id": "user"}}
    keys = [
        affinity_of(headers, given).key
        for headers, given in (
            ({"x-claude-code-session-id": "s"}, body),
            ({"x-claude-code-session-id": "t"}, body),
            ({}, body),
            ({}, TURN | {"conversation": {"id": "conv"}}),
            ({}, TURN | {"metadata": {"user_id": "user"}}),
            ({}, TURN),
            ({}, chat(("system", "You help."), ("user", "Hullo"))),
            ({}, chat(("system", "You help!"), ("user", "Hello"))),
        )
    ]
    assert None not in keys and len(set(keys)) == len(keys)
    assert affinity_of({"x-claude-code-session-id": "s"}, TURN).key == keys[0]
    assert affinity_of({}, chat(("user", "x"), prompt_cache_key="key")).key == keys[2]
    assert affinity_of({}, TURN | {"conversation": "conv"}).key == keys[3]


@pytest.mark.parametrize(
    "first, later",
    [
        (TURN, chat(("system", "You help."), ("user", "Hello"), ("assistant", "Hi."), ("user", "And?"))),
        ({"instructions": "x", "input": "Hello"}, {"instructions": "x", "input": "Hello", "temperature": 1}),
        (
            {"instructions": "x", "input": [{"role": "user", "content": "Hello"}]},
            {"instructions": "x", "input": [{"role": "user", "content": "Hello"}, {"type": "function_call", "name": "f"}]},
        ),
        ({"prompt": "a" * 5000}, {"prompt": "a" * 5000 + "b"}),
        (
            {"system": "x-anthropic-billing-header: cch=1;\nYou code.", "messages": [{"role": "user", "content": "Hello"}]},
            {"system": "x-anthropic-billing-header: cch=2;\nYou code.", "messages": [{"role": "user", "content": "Hello"}]},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        ),
    ],
)
def test_later_turns_have_the_key_of_the_first(first, later):
    one, two = affinity_of({}, first), affinity_of({}, later)
    assert one.key is not None and one.key == two.key


def test_a_later_turn_begins_with_the_links_of_the_one_before():
    first = affinity_of({}, TURN).chain
    second = affinity_of({}, chat(("system", "You help."), ("user", "Hello"), ("assistant", "Hi."), ("user", "And?"))).chain
    other = affinity_of({}, chat(("system", "You help."), ("user", "Hullo"), ("assistant", "Hi."), ("user", "And?"))).chain
    assert second[: len(first)] == first and len(second) == len(first) + 2
    assert other[:2] == first[:2] and not {digest for digest, _ in other[2:]} & {digest for digest, _ in second}


@pytest.mark.parametrize(
    "body", [None, {}, {"prompt": [1, 2]}, {"messages": []}, {"messages": [None, 3]}, {"messages": [{"role": "system"}]}]
)
def test_what_no_conversation_can_be_made_of_has_none(body):
    assert affinity_of({}, body).key is None


def test_a_prompt_of_very_many_messages_has_a_bounded_chain():
    assert len(affinity_of({}, chat(*[("user", str(number)) for number in range(3000)])).chain) == MAX_LINKS


def test_a_replica_remembers_the_latest_prompts_and_of_one_the_beginning_longest():
    answered = Answered(most=4)
    answered.add([("a", 1), ("b", 1), ("c", 1)])
    answered.add([("a", 1), ("x", 1)])
    assert set(answered.digests()) == {"a", "b", "c", "x"}
    answered.add([("new", 1)])
    assert set(answered.digests()) == {"a", "b", "x", "new"}
