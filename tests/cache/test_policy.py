"""Where checkpoints are taken and which of them stay, by examples with their numbers written out."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer_jax.cache.policy import Mark, eviction_order, planned, superfluous


def test_a_prompt_has_checkpoints_at_system_last_two_users_and_its_end():
    marks = [Mark(1000, "system"), Mark(1000, "user"), Mark(2000, "user"), Mark(3000, "user"), Mark(3500, "end")]
    assert planned(3510, marks, grid=64) == [Mark(960, "system"), Mark(1984, "user"), Mark(2944, "user"), Mark(3456, "end")]


def test_on_a_coarse_grid_the_strongest_reason_names_a_length():
    marks = [Mark(1000, "system"), Mark(1010, "user"), Mark(1100, "user"), Mark(1200, "end")]
    assert planned(1300, marks, grid=512) == [Mark(512, "system"), Mark(1024, "user")]


def test_what_is_there_already_is_not_taken_again():
    assert planned(3000, [Mark(1000, "system")], grid=64, have=2944) == []
    assert planned(3000, [Mark(1000, "system")], grid=64, have=960) == [Mark(2944, "end")]


def test_a_branch_point_is_taken_and_a_prompt_shorter_than_the_grid_has_none():
    assert planned(3000, grid=64, have=64, branch=1920) == [Mark(1920, "branch"), Mark(2944, "end")]
    assert planned(63, grid=64) == []


def test_long_prompts_have_steps_that_thin_out_behind_the_last_32k():
    lengths = [m.length // 8192 for m in planned(200_000, grid=64) if m.kind == "step"]
    assert lengths == [1, 2, 4, 8, 16, 21, 22, 23, 24]
    assert planned(200_001, grid=64)[-1] == Mark(200_000, "end")


def test_a_conversation_keeps_a_dozen_and_never_loses_its_last():
    way = [Mark(500, "system")] + [Mark(1000 * turn, kind) for turn in range(1, 30) for kind in ("user", "end")]
    gone = superfluous(way)
    assert [m for m in way if m not in gone] == [
        Mark(500, "system"),
        Mark(28_000, "user"),
        Mark(28_000, "end"),
        Mark(29_000, "user"),
        Mark(29_000, "end"),
    ]
    long = (
        [Mark(500, "system"), Mark(700, "branch")] + [Mark(8192 * step, "step") for step in range(1, 33)] + [Mark(262_144, "end")]
    )
    left = [m for m in long if m not in superfluous(long)]
    assert len(left) == 12 and left[-1] == long[-1] and left[:2] == long[:2]


@dataclass
class Used:
    name: str
    used: int


def test_the_longest_unused_goes_first_and_live_frontiers_last():
    a, b, c, d = Used("a", 1), Used("b", 2), Used("c", 3), Used("d", 4)
    assert eviction_order([a, b, c, d], [a, b], live=2) == [c, d, a, b]
    assert eviction_order([a, b, c, d], [a, b], live=1) == [a, c, d, b]
    assert eviction_order([a, b, c, d], [], live=8) == [a, b, c, d]
