"""Where prompts are cut: the promises of `next_chunk`, over every prompt and every place it may have been interrupted at."""

from __future__ import annotations

import pytest

from ninfer_jax.engine.chunks import next_chunk

SIZES = [(512, 128), (1024, 128), (192, 128), (64, None), (128, None)]


def cuts(start: int, end: int, chunk: int, short: int | None) -> list[tuple[int, int, int]]:
    """(start, stop, rows) of every call."""
    found = []
    while start < end:
        rows, count = next_chunk(start, end, chunk, short)
        assert 0 < count <= rows
        found.append((start, start + count, rows))
        start += count
    return found


@pytest.mark.parametrize("chunk, short", SIZES)
def test_calls_fit_and_cross_no_line(chunk: int, short: int | None) -> None:
    for end in range(1, 3 * chunk, 7):
        for start in range(0, end, 5):
            for at, stop, rows in cuts(start, end, chunk, short):
                assert rows in (chunk, short) and at // chunk == (stop - 1) // chunk


@pytest.mark.parametrize("chunk, short", SIZES)
def test_the_program_of_a_token_depends_on_the_prompt_alone(chunk: int, short: int | None) -> None:
    """Not on where the prompt was interrupted."""
    for end in range(1, 3 * chunk, 31):
        whole = {t: rows for at, stop, rows in cuts(0, end, chunk, short) for t in range(at, stop)}
        for start in range(0, end, 64):
            again = {t: rows for at, stop, rows in cuts(start, end, chunk, short) for t in range(at, stop)}
            assert again == {t: rows for t, rows in whole.items() if t >= start}


@pytest.mark.parametrize("chunk, short", SIZES)
def test_prompts_with_the_same_beginning_agree_up_to_the_last_line(chunk: int, short: int | None) -> None:
    longest = cuts(0, 4 * chunk, chunk, short)
    for end in range(1, 4 * chunk, 3):
        full = [cut for cut in cuts(0, end, chunk, short) if cut[1] <= end - end % chunk]
        assert full == longest[: len(full)] and sum(stop - at for at, stop, _ in full) == end - end % chunk


def test_few_tokens_take_few_rows() -> None:
    def rows(start: int, end: int) -> int:
        return sum(rows for _, _, rows in cuts(start, end, 512, 128))

    assert [rows(0, n) for n in (1, 128, 129, 256, 257, 512, 513, 1024 + 100)] == [128, 128, 256, 256, 512, 512, 640, 1152]
    assert rows(100, 130) == 256  # back to the grid first
