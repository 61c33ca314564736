"""The cuts of a prompt: on an absolute grid, so that what is computed of a token depends on the prompt and not on who cut it."""

from __future__ import annotations


def next_chunk(start: int, end: int, chunk: int, short: int | None) -> tuple[int, int]:
    """(rows of the program, tokens) of the next prefill call for a prompt of `end` tokens of which `start` are appended.

    The grid has a line every `chunk` tokens, and no call crosses one. Between two lines the program of `chunk` rows takes all in
    one call, unless the prompt ends in the first half: then the program of `short` rows takes it in calls of as many tokens.
    Which one it is depends on `end` alone, so two prompts with the same beginning agree, in every bit, up to the last line that
    both reach, wherever either was interrupted at a multiple of 64. short None: there is no such program.
    """
    line = start - start % chunk
    stop = min(end, line + chunk)
    if short is None or 2 * (stop - line) > chunk:
        return chunk, stop - start
    return short, min(stop, start - (start - line) % short + short) - start
