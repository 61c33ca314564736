"""Streams of the server, apart from it."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest

from ninfer_jax.server.events import Chunks, as_event
from ninfer_jax.server.streams import with_heartbeat


async def left_at_the_end() -> list[str]:
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))

    async def source():
        yield 1
        await asyncio.sleep(0.02)

    stream = with_heartbeat(source(), 0.01)
    assert await anext(stream) == 1
    assert await anext(stream) is None  # silence
    await asyncio.sleep(0.05)  # and the end comes while nobody looks
    await stream.aclose()
    del stream
    gc.collect()
    await asyncio.sleep(0)
    return complaints


def test_a_reader_who_leaves_at_the_end_leaves_no_complaint():
    assert asyncio.run(left_at_the_end()) == []


def test_items_and_the_error_behind_them_come_in_order():
    async def source():
        for item in range(5):
            yield item
        raise KeyError("torn")

    async def main() -> list[int | None]:
        got = []
        with pytest.raises(KeyError, match="torn"):
            async for item in with_heartbeat(source(), 60):
                got.append(item)
        return got

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_a_slow_reader_has_the_source_wait_and_hears_of_no_silence_that_was_its_own():
    """Of items that wait nobody is told that there are none; the source is at most two ahead: one handed over, one in hand."""
    made = []

    async def source():
        for item in range(6):
            made.append(item)
            yield item

    async def main() -> None:
        got = []
        async for item in with_heartbeat(source(), 0.001):
            for _ in range(20):
                await asyncio.sleep(0.001)
            got.append(item)
            assert len(made) <= len(got) + 2
        assert got == list(range(6))

    asyncio.run(main())


def test_a_reader_who_leaves_ends_the_source():
    ended = []

    async def source():
        try:
            while True:
                yield 1
                await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def main() -> None:
        stream = with_heartbeat(source(), 60)
        await anext(stream)
        await asyncio.sleep(0)
        await stream.aclose()
        assert ended == [True]

    asyncio.run(main())


def test_an_event_is_what_json_says_of_all_of_it():
    head, choices = {"id": 'a\u2028"', "n": 1}, [{"text": "x\n\r\u00e9\U0001f600"}]
    for tail in ({}, {"usage": None}):
        for other in ({}, {"usage": {"total": 3}}):
            said = Chunks(head, tail)(choices, **other)
            assert said.startswith(b"data: ") and said.endswith(b"\n\n") and said.count(b"\n") == 2 and b"\r" not in said
            assert json.loads(said[6:]) == head | {"choices": choices} | tail | other
    assert as_event({"type": "ping"}, "ping") == b'event: ping\ndata: {"type": "ping"}\n\n'
