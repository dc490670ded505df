"""Worker processes whose clocks are wrong: all that counts is the database's."""

from __future__ import annotations

import collections.abc as cabc
import datetime as dt
import pathlib

import pytest
from faults.accounting import accounted
from faults.crew import Hand, at_work, begun, done
from faults.deeds import Deed, effects

import venturi

pytestmark = pytest.mark.faults

HOUR = 3600


@pytest.mark.conformance(173)
def test_clocks_an_hour_off_in_both_directions_change_nothing(
    queue: venturi.Queue, dsn: str, schema: str, hire: cabc.Callable[..., Hand], log: pathlib.Path
) -> None:
    """Two workers, an hour ahead and behind, take no claim of each other, and run delayed jobs when they are due.

    Case 087.
    """
    ahead, behind = (hire(concurrency=4, lease=1, clock=sign * HOUR) for sign in (1, -1))
    at_work(dsn, schema, ahead, behind)
    long = [queue.enqueue(Deed("sleep", 3.0)).id for _ in range(6)]
    begun(log, 6)
    delayed = [queue.enqueue(Deed(), delay=dt.timedelta(seconds=1)).id for _ in range(6)]
    far = queue.enqueue(Deed(), delay=dt.timedelta(minutes=30)).id
    failing = [queue.enqueue(Deed("fail", once=True)).id for _ in range(4)]
    begun(log, 20)
    assert queue.cancel(far)
    done(dsn, schema)
    fast, slow = ahead.stops(), behind.stops()
    assert fast["clock"] - slow["clock"] > 1.9 * HOUR
    assert fast["released"] == slow["released"] == []
    assert {each.pid for each in effects(log)} == {ahead.pid, behind.pid}
    for id in delayed:
        job = queue.job(id)
        assert job is not None
        assert job.finished_at is not None
        assert dt.timedelta(seconds=1) <= job.finished_at - job.created_at < dt.timedelta(seconds=3.5)
    outcomes = accounted(
        dsn, schema, [*long, *delayed, far, *failing], statuses=("completed", "cancelled"), effects=effects(log)
    )
    assert outcomes == {"completed": 16, "retried": 4, "cancelled": 1}
