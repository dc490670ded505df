"""The threads that run handlers, without a database."""

from __future__ import annotations

import threading
import time
import types
import typing as t
import uuid

import pytest

from venturi.context import RunSignal
from venturi.registry import Bound
from venturi.store.claiming import Claim, Ending
from venturi.values import Priority
from venturi.worker import flight, slots
from venturi.worker.flight import Inbox, Run
from venturi.worker.slots import Slots


class Late(BaseException):
    """What another thread raises in a slot's, as libraries for timeouts do."""


def a_run() -> Run:
    """A run that no handler is called for."""
    claim = Claim(str(uuid.uuid4()), "slots.step", Priority.NORMAL, 1, 0, None, 0.0, 0.0, "{}", None)
    return Run(claim, t.cast(Bound, None), RunSignal(float("inf")))


def an_ending(run: Run) -> Ending:
    """The end of every run."""
    return Ending(run.claim.key, run.claim.kind, 1, uuid.uuid4(), "completed")


class Striker:
    """Raises in a slot's thread at the n-th opcode of what the slots do between the runs."""

    def __init__(self, point: int) -> None:
        self.left = point

    def __call__(self, frame: types.FrameType, event: str, arg: object) -> t.Any:
        if frame.f_code.co_filename not in (slots.__file__, flight.__file__):
            return None
        if frame.f_code.co_name == "_loop":
            return self  # a second one, while the first is dealt with, is beyond all care
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise Late
        return self


def received(inbox: Inbox, run: Run) -> int:
    """How often the run comes out of the inbox, within a moment after the first time."""
    times, end = 0, time.monotonic() + 5
    while time.monotonic() < end:
        times += inbox.take(0.002)[0].count(run)
        if times:
            return times + inbox.take(0.002)[0].count(run)
    return times


def struck(point: int) -> bool:
    """Strike at that point, if there are so many; the run in hand and the next one are handed over all the same."""
    inbox = Inbox()
    made = Slots(2, "struck", an_ending, an_ending, inbox)
    striker = Striker(point)
    before = threading.gettrace()
    threading.settrace(striker)
    try:
        made.start()
        first, second = a_run(), a_run()
        made.hand([first])
        assert received(inbox, first) == 1, point
    finally:
        threading.settrace(t.cast(t.Any, before))
    made.hand([second])
    assert received(inbox, second) == 1, point
    made.close(wait=True)
    return striker.left <= 0


def test_an_exception_from_without_loses_no_run_and_no_slot_wherever_it_strikes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At every step between taking a run and waiting for the next: none is lost, none comes twice (case 025)."""
    points = 0
    while struck(points + 1):
        points += 1
    assert points > 150
    assert len([record for record in caplog.records if "has met no handler" in record.getMessage()]) > 100
