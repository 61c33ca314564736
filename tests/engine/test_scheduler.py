"""The order of slots and chunks: the bounds that are promised, against whatever arrives. No device."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from ninfer_jax.engine.scheduler import OVERTAKING, Scheduler

CHUNK = 64


@dataclass(eq=False)
class Request:
    """What a scheduler looks at."""

    tokens: int
    lease: object = None
    begun: bool = False
    finished: bool = False
    prefilled: int = 0
    served: int = 0
    overtaken: int = 0
    admitted_at: int = 0
    gaps: int = 0

    @property
    def prompt(self) -> range:
        return range(self.tokens)

    @property
    def chunks(self) -> int:
        return -(-self.tokens // CHUNK)


class Desk:
    """A scheduler over some slots; every chunk is one step of time."""

    def __init__(self, slots: int):
        self.scheduler, self.slots, self.time, self.served = Scheduler(), slots, 0, []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def admit(self) -> None:
        while sum(r.lease is not None and not r.finished for r in self.scheduler) < self.slots:
            request = self.scheduler.for_a_slot(lambda r: True)
            if request is None:
                return
            request.lease, request.admitted_at = object(), self.time

    def step(self) -> Request | None:
        self.admit()
        request = self.scheduler.for_a_chunk()
        if request is not None:
            self.time += 1
            self.served.append(request)
            request.prefilled = min(request.tokens, request.prefilled + CHUNK)
            if request.prefilled == request.tokens:
                request.begun = request.finished = True
        return request


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_prompt_of_c_chunks_is_through_after_2sc_chunks(slots):
    """With slots and queue always full, of prompts that are shorter, longer, and mixed."""
    rng = random.Random(slots)
    for lengths in ((1,), (60, 70), (1, 64, 65, 700, 5000)):
        desk, done = Desk(slots), []
        watched = [Request(rng.choice((64, 640, 6400))) for _ in range(6)]
        desk.add(*watched)
        while not all(r.finished for r in watched):
            while len(desk.scheduler.waiting) < 2 * slots:
                desk.add(Request(rng.choice(lengths)))
            request = desk.step()
            done += [request] if request.finished else []
            for one in (*desk.scheduler, request):
                if one.lease is not None and (one is request or not one.finished):
                    assert desk.time - one.admitted_at <= 2 * slots * one.chunks
        assert len(done) >= 6


def test_a_short_prompt_beside_long_ones_takes_every_other_chunk():
    desk, short = Desk(4), Request(3 * CHUNK)
    desk.add(*(Request(100_000) for _ in range(3)))
    for _ in range(7):
        desk.step()
    desk.add(short)
    start = desk.time
    while not short.finished:
        desk.step()
    assert desk.time - start <= 2 * short.chunks


def test_long_prompts_take_turns():
    """None of equal ones is more than a turn of all ahead, and each goes on all the time."""
    desk, long = Desk(4), [Request(50 * CHUNK) for _ in range(4)]
    desk.add(*long)
    for _ in range(120):
        desk.step()
    for request in long:
        times = [at for at, served in enumerate(desk.served) if served is request]
        assert max(b - a for a, b in pairwise([0, *times])) <= 8 and len(times) >= 12


def test_what_fits_goes_ahead_of_what_does_not_and_not_for_ever():
    scheduler = Scheduler()
    first, *later = large = Request(1000), *(Request(1) for _ in range(OVERTAKING + 5))
    for request in large:
        scheduler.add(request)

    def fits(request: Request) -> bool:
        return request is not first

    for expected in later[:OVERTAKING]:
        assert scheduler.for_a_slot(fits) is expected
        expected.lease = object()
    assert scheduler.for_a_slot(fits) is None
    assert scheduler.for_a_slot(lambda request: True) is first  # there is room
    first.lease = object()
    assert scheduler.for_a_slot(fits) is later[OVERTAKING]


def test_order_of_arrival_where_all_fit():
    desk = Desk(2)
    requests = [Request(5), Request(5), Request(1)]
    desk.add(*requests)
    desk.admit()
    assert [r.lease is not None for r in requests] == [True, True, False] and desk.scheduler.waiting == [requests[2]]


def test_an_empty_scheduler_has_forgotten_what_was():
    """Whose turn it is does not depend on requests that are gone."""
    orders = []
    for before in (0, 1):
        desk = Desk(2)
        for _ in range(before):
            desk.add(Request(1))
            desk.step()
        long, short = Request(640), Request(64)
        desk.add(long, short)
        desk.step()
        orders.append(desk.served[-1] is short)
    assert orders == [True, True]
