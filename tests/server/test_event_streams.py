"""Streams of the server, apart from it."""

from __future__ import annotations

import asyncio
import gc

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
