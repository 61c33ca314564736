"""What the cache finds, against a list of all that was kept, and what it holds, against its budget."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ninfer_jax.cache import Mark, Media
from ninfer_jax.cache.tree import Tree
from tests.cache.conftest import PAGE, PAGE_BYTES, STATE_BYTES, assert_image, keep


def conversations(rng, count):
    """Prompts that share beginnings: forks of one another at any token, from two ids so that they collide often."""
    known = [[]]
    for _ in range(count):
        base = rng.choice(known)
        base = base[: rng.randint(0, len(base))]
        # Whole pages of one id, so that different conversations meet again.
        more = [t for _ in range(rng.randint(0, 4)) for t in [rng.randint(0, 1)] * PAGE] + [rng.randint(0, 1)] * rng.choice(
            [0, 1, 63]
        )
        known.append(base + more)
        yield known[-1] or [0]


def longest(kept, prompt):
    """By definition: the longest of the kept sequences that the prompt begins with."""
    return max((len(tokens) for tokens in kept if prompt[: len(tokens)] == tokens), default=0)


@pytest.mark.parametrize("seed", range(8))
def test_the_deepest_checkpoint_on_the_way_is_found(seed, make):
    rng, cache, kept = random.Random(seed), make(), []
    for prompt in conversations(rng, 60):
        with cache.find(prompt) as hit:
            assert hit.length == longest(kept, prompt)
            if hit.length:
                assert_image(hit.load(), prompt[: hit.length])
        # A kind that is never thinned: the list above knows nothing of thinning.
        if rng.random() < 0.6 and keep(cache, prompt, "branch") and len(kept) < 12:
            kept.append(prompt)
        kept = [t for t in kept if Mark(len(t), "branch") in cache.checkpoints]
        cache.check()
        if len(kept) >= 12:
            break


@pytest.mark.parametrize("seed", range(8))
def test_pages_that_were_seen_are_those_that_any_prompt_had(seed, make):
    rng, cache, prompts = random.Random(seed), make(), []
    for prompt in conversations(rng, 40):
        with cache.find(prompt) as hit:
            shared = (
                next((i for i, (a, b) in enumerate(zip(p[:-1], prompt, strict=False)) if a != b), min(len(p) - 1, len(prompt)))
                for p in prompts
            )
            assert hit.seen == max((s // PAGE * PAGE for s in shared), default=0)  # a prompt's last token only ends its last page
        cache.seen(prompt)
        prompts.append(prompt)
        cache.check()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("on_disk", [False, True])
def test_random_use_never_exceeds_a_budget_nor_loses_count(seed, on_disk, make, tmp_path):
    rng = random.Random(seed)
    host, disk = rng.choice([500, 2000, 6000]), rng.choice([3000, 20_000])
    cache = make(host, tmp_path / "c" if on_disk else None, disk)
    prompts, pinned = list(conversations(rng, 80)), []
    for step, prompt in enumerate(prompts):
        kind = rng.choice(["system", "user", "end", "turn", "step"])
        action = rng.random()
        if action < 0.5:
            keep(cache, prompt, kind)
        elif action < 0.8:
            hit = cache.find(prompt)
            if (image := hit.load()) is not None:
                assert_image(image, prompt[: hit.length])
            pinned.append(hit)
        elif action < 0.9 and pinned:
            pinned.pop(rng.randrange(len(pinned))).end()
        elif step % 7 == 0 and on_disk:
            cache.close()
            pinned.clear()
            cache = make(host, tmp_path / "c", disk)
        else:
            cache.idle()
        cache.check()  # asserts both budgets too, and that the files are as long as is counted
        assert cache.counters.host_bytes <= host and cache.counters.disk_bytes <= disk
    assert not cache.told


def test_what_a_hit_relies_on_stays_whatever_else_is_kept(make):
    cache = make(2 * (STATE_BYTES + PAGE_BYTES))
    assert keep(cache, [1] * PAGE) and keep(cache, [2] * PAGE)
    first, second = cache.find([1] * 100), cache.find([2] * 100)
    assert not keep(cache, [3] * PAGE) and cache.counters.refused == 1
    assert_image(first.load(), [1] * PAGE)
    first.end()
    assert keep(cache, [3] * PAGE)
    assert_image(second.load(), [2] * PAGE)
    assert first.load() is None and cache.find([1] * 100).length == 0
    cache.check()


def test_a_refused_checkpoint_costs_nobody_anything(make):
    cache = make(STATE_BYTES + 3 * PAGE_BYTES)
    assert keep(cache, [1] * PAGE)
    assert not keep(cache, [2] * (PAGE * 4)) and cache.find([1] * 65).length == PAGE
    cache.check()
    cache = make(2 * STATE_BYTES + 4 * PAGE_BYTES)
    assert keep(cache, [1] * PAGE) and keep(cache, [2] * PAGE)
    with cache.find([1] * PAGE):
        assert not keep(cache, [3] * (PAGE * 4))  # not even without the second
    assert cache.find([2] * PAGE).length == PAGE
    cache.check()


def test_an_error_while_bytes_are_fetched_leaves_nothing_behind(make):
    cache = make()

    def fail(_):
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        cache.keep([1] * 200, "end", lambda: np.zeros(STATE_BYTES, np.uint8), fail)
    cache.check()
    assert cache.counters.host_bytes == 0 and cache.find([1] * 200).length == 0


def test_an_interrupt_in_the_middle_begins_afresh(make):
    cache = make()
    keep(cache, [1] * PAGE)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.keep([2] * 200, "end", lambda: np.zeros(STATE_BYTES, np.uint8), interrupt)
    assert cache.find([1] * 100).length == 0
    cache.check()
    assert keep(cache, [1] * PAGE) and cache.find([1] * 100).length == PAGE


def test_the_same_placeholders_before_another_picture_are_another_prompt(make):
    cache = make()
    cat, pizza = [Media(70, 90, b"cat")], [Media(70, 90, b"pizza")]
    prompt = [5] * 200
    keep(cache, prompt[:128], media=cat)
    keep(cache, prompt[:80], media=cat)
    assert cache.find(prompt, media=cat).length == 128
    assert cache.find(prompt, media=pizza).length == 0
    assert cache.find(prompt, media=pizza).seen == PAGE  # the page before the picture is the same
    assert cache.find(prompt).length == 0
    cache.check()


def test_a_page_is_another_one_where_another_token_follows(make):
    """The entries of the MTP layer in it are."""
    cache, one, other = make(), [5] * 64 + [1] * 70, [5] * 64 + [2] * 70
    for tokens in (one[:64], one, other):
        assert keep(cache, tokens, "branch")
    for tokens in (one, other, one[:64]):
        with cache.find(tokens) as hit:
            assert_image(hit.load(), tokens)
    cache.check()


def test_a_deeper_checkpoint_that_is_lost_leaves_the_one_before(make, tmp_path):
    cache = make(folder=tmp_path / "c")
    keep(cache, [1] * 100, "system")
    keep(cache, [1] * 300, "branch")
    cache.close()
    again = make(folder=tmp_path / "c")
    next((tmp_path / "c").glob("*-300.state")).write_bytes(b"")
    with again.find([1] * 400) as hit:
        assert hit.length == 300
        assert_image(hit.load(), [1] * 100)
        assert (hit.length, hit.tier) == (100, "disk")
    assert (again.counters.hits_disk, again.counters.failed, again.counters.cached_tokens) == (1, 1, 100)
    again.check()


def test_the_newest_checkpoints_of_live_conversations_go_last(make):
    room = 6 * STATE_BYTES + 12 * PAGE_BYTES
    cache = make(room)
    # Conversations of two checkpoints each: the inner ones were used later than the first conversation's frontier.
    for who in (1, 2, 3):
        keep(cache, [who] * PAGE, "system")
        keep(cache, [who] * (2 * PAGE), "end")
    for who in (1, 2, 3):
        cache.find([who] * PAGE).end()
    keep(cache, [9] * PAGE * 3, "end")
    keep(cache, [8] * PAGE * 3, "end")
    assert [cache.find([who] * 300).length for who in (1, 2, 3)] == [128, 128, 128]
    assert [cache.find([who] * 64).length for who in (1, 2)] == [0, 0]
    cache.check()


def test_pages_merely_seen_are_forgotten_first_seen_first():
    tree = Tree(max_seen=10)
    for who in range(5):
        tree.extend(np.full(3 * PAGE + 1, who, np.int32))
    assert [tree.match(np.full(3 * PAGE + 1, who, np.int32)).pages for who in range(5)] == [0, 1, 3, 3, 3]
    assert tree.pages == 10
