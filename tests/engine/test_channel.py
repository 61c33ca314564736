"""From the writer's thread to one reader: nothing is lost or told twice, and the writer never waits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ninfer_jax.engine.channel import Channel
from ninfer_jax.engine.results import Delta, TokenLogprob


def piece(at: int) -> Delta:
    return Delta(f"t{at}", f"r{at}", [at], [TokenLogprob(at, -1.0)])


def test_what_comes_unread_becomes_one_piece():
    channel = Channel()
    assert channel.take() is None
    assert all(channel.put(piece(at)) for at in range(3))
    assert channel.wait(0)
    assert channel.take() == Delta("t0t1t2", "r0r1r2", [0, 1, 2], [TokenLogprob(at, -1.0) for at in range(3)])
    assert channel.take() is None and not channel.wait(0)


def test_an_error_comes_after_what_was_said():
    channel = Channel()
    channel.put(piece(0))
    channel.fail(KeyError("gone"))
    assert channel.take() == piece(0)
    for _ in range(2):
        assert channel.wait(0)
        with pytest.raises(KeyError, match="gone"):
            channel.take()


def test_a_thread_that_waits_gets_everything_in_order():
    channel, got = Channel(), []

    def read() -> None:
        while len(got) < 1000:
            channel.wait()
            taken = channel.take()
            got.extend(taken.tokens if taken else [])

    reader = threading.Thread(target=read)
    reader.start()
    for at in range(1000):
        channel.put(piece(at))
    reader.join(60)
    assert got == list(range(1000))


def test_an_event_loop_is_woken_once_for_all_that_has_come():
    async def main() -> None:
        channel, loop, woken = Channel(), asyncio.get_running_loop(), 0
        wake = loop.call_soon_threadsafe

        def counted(*arguments):
            nonlocal woken
            woken += 1
            return wake(*arguments)

        loop.call_soon_threadsafe = counted
        waiting = asyncio.ensure_future(channel.wait_async())
        await asyncio.sleep(0)
        writer = threading.Thread(target=lambda: [channel.put(piece(at)) for at in range(100)])
        writer.start()
        writer.join()
        assert woken == 1
        await waiting
        assert channel.take().tokens == list(range(100))
        waiting = asyncio.ensure_future(channel.wait_async())
        await asyncio.sleep(0)
        waiting.cancel()  # a reader that gave up, and comes back
        await asyncio.gather(waiting, return_exceptions=True)
        channel.put(piece(7))
        assert woken == 1
        await channel.wait_async()
        assert channel.take().tokens == [7]

    asyncio.run(main())


def test_a_reader_whose_event_loop_is_gone_is_reported():
    channel, loop = Channel(), asyncio.new_event_loop()
    waiting = loop.create_task(channel.wait_async())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert not channel.put(piece(0))
    waiting.get_coro().close()


def test_a_second_reader_is_refused():
    channel = Channel()

    async def main() -> None:
        first = asyncio.ensure_future(channel.wait_async())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="has another already"):
            channel.wait(0)
        channel.put(piece(1))
        await first

    asyncio.run(main())
    assert channel.take().tokens == [1]
