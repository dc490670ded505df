"""When a failed job is tried again."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import time
import typing as t
import uuid

import pytest
from fixtures.work import until, working
from hypothesis import given
from hypothesis import strategies as st

import venturi
from venturi import Backoff
from venturi.backoff import jittered

A = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")
B = uuid.UUID("018f3f1e-7c00-7000-8000-000000000001")
SECOND = 1_000_000_000

# (n, delay before jitter, of A, of B), in nanoseconds
GOLDEN = {
    (Backoff(), 0.5): [
        (1, 1000000000, 661444080, 764618895),
        (2, 1000000000, 528616289, 870795416),
        (3, 2000000000, 1649305222, 1440396494),
        (4, 3000000000, 1523396719, 2726348709),
        (5, 5000000000, 3214234804, 4531273600),
        (6, 8000000000, 4314717959, 6224656767),
        (7, 13000000000, 7526887451, 9429138919),
        (10, 55000000000, 41305704721, 43419107489),
        (13, 233000000000, 180654166953, 125644242633),
        (17, 1597000000000, 1257112093176, 812330353494),
        (20, 3600000000000, 2282759795452, 1848000517443),
        (25, 3600000000000, 3025935940793, 3570048691164),
    ],
    (Backoff(dt.timedelta(milliseconds=500), 120), 0.3): [
        (1, 500000000, 398433224, 429385668),
        (3, 1000000000, 894791566, 832118948),
        (4, 1500000000, 1057019015, 1417904612),
        (14, 120000000000, 102829056404, 88799246579),
        (20, 120000000000, 93655195909, 84960010348),
    ],
}
ROWS = [(backoff, jitter, *row) for (backoff, jitter), rows in GOLDEN.items() for row in rows]


@venturi.task("failing")
class Failing:
    key: int = 0


@venturi.task("failing.fast", backoff=Backoff(1, 3))
class Fast:
    pass


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(150)
@pytest.mark.parametrize(("backoff", "jitter", "n", "base", "of_a", "of_b"), ROWS)
def test_golden_values_reproduce_to_the_nanosecond(
    backoff: Backoff, jitter: float, n: int, base: int, of_a: int, of_b: int
) -> None:
    """The delay depends on curve, jitter, job and number of the failure, and on nothing else."""
    assert backoff.nanoseconds(n) == base
    assert (jittered(backoff, A, n, jitter), jittered(backoff, B, n, jitter)) == (of_a, of_b)


@pytest.mark.conformance(150)
def test_another_process_computes_the_same() -> None:
    """No seed of a process goes into the jitter."""
    script = f"import uuid; from venturi.backoff import *; print(jittered(Backoff(), uuid.UUID('{A}'), 3, 0.5))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 1649305222


@pytest.mark.conformance(148)
def test_delays_grow_by_fibonacci_numbers() -> None:
    """1, 1, 2, 3, 5, 8, 13, 21 times the base, however it is given."""
    for base in (2, 2.0, dt.timedelta(seconds=2)):
        delays = [Backoff(base, 3600).nanoseconds(n) // (2 * SECOND) for n in range(1, 9)]
        assert delays == [1, 1, 2, 3, 5, 8, 13, 21]


@pytest.mark.conformance(149)
def test_late_failures_wait_for_the_cap_and_cost_nothing() -> None:
    """n = 40 gives the cap without jitter; n = 1,000,000 is computed within 1 ms, inside the jitter's range of it.

    Case 079.
    """
    assert jittered(Backoff(), A, 40, 0) == 3600 * SECOND
    before = time.perf_counter()
    delay = jittered(Backoff(), A, 1_000_000, 0.5)
    assert time.perf_counter() - before < 0.001
    assert 1800 * SECOND <= delay <= 3600 * SECOND


@pytest.mark.conformance(149)
def test_jobs_that_fail_together_come_back_apart() -> None:
    """A thousand first failures are spread evenly over half of the base (case 082)."""
    delays = [jittered(Backoff(), venturi_id, 1, 0.5) for venturi_id in _ids(1000)]
    tenths = [0] * 10
    for delay in delays:
        assert SECOND // 2 <= delay <= SECOND
        tenths[min(9, (delay - SECOND // 2) * 10 // (SECOND // 2))] += 1
    assert min(tenths) > 50


@pytest.mark.conformance(151)
@given(id_=st.uuids(), n=st.integers(1, 79), share=st.floats(0, 1))
def test_jitter_takes_off_no_more_than_its_share(id_: uuid.UUID, n: int, share: float) -> None:
    """For any job, failure and jitter the delay lies between base x (1 - jitter) and base (case 081)."""
    backoff = Backoff(1, 365 * 86400)
    base = backoff.nanoseconds(n)
    # From some 10^16 ns on, which is 104 days, a double holds only every second nanosecond.
    slack = 1 + base * 2**-52
    assert base * (1 - share) - slack <= jittered(backoff, id_, n, share) <= base + slack


@pytest.mark.conformance(150, 152)
def test_the_third_failure_at_base_100_s_waits_200_s_exactly(queue: venturi.Queue) -> None:
    """Without jitter the time between entry and next run is the curve's, to the microsecond."""
    _fails(queue, Failing)
    entries = _fail(queue, Failing(), 3, backoff=Backoff(100, 1000), jitter=0)
    assert entries == [dt.timedelta(seconds=100), dt.timedelta(seconds=100), dt.timedelta(seconds=200)]


@pytest.mark.conformance(150)
def test_the_delay_is_floored_to_the_microsecond(queue: venturi.Queue) -> None:
    """What the database gets is the computed delay without its last three digits."""
    _fails(queue, Failing)
    receipt = queue.enqueue(Failing())
    with working(queue, jitter=0.5):
        until(queue, receipt.id, "retried")
    expected = jittered(Backoff(), receipt.id, 1, 0.5) // 1000
    assert _wait(queue, receipt.id) == dt.timedelta(microseconds=expected)


@pytest.mark.conformance(153)
def test_a_task_with_a_curve_of_its_own_uses_it(queue: venturi.Queue) -> None:
    """Its base and cap hold for its retries; the worker's jitter stays."""
    _fails(queue, Fast)
    waits = _fail(queue, Fast(), 6, backoff=Backoff(100, 1000), jitter=0)
    assert waits == [dt.timedelta(seconds=n) for n in (1, 1, 2, 3, 3, 3)]
    receipt = queue.enqueue(Fast())
    with working(queue, backoff=Backoff(100, 1000), jitter=1):
        until(queue, receipt.id, "retried")
    expected = jittered(Backoff(1, 3), receipt.id, 1, 1) // 1000
    assert _wait(queue, receipt.id) == dt.timedelta(microseconds=expected)


def test_pauses_take_no_step_of_the_curve(queue: venturi.Queue) -> None:
    """After 100 pauses the first failure waits as the first one does, and the third would be the last (case 083)."""

    @queue.handler(task=Failing)
    def handle(_: Failing, ctx: venturi.Context) -> venturi.Outcome:
        if ctx.run_count <= 100:
            return venturi.Pause()
        if ctx.failure_count < 2:
            raise venturi.RetryLater(dt.timedelta(0)) if ctx.failure_count else ValueError("no")
        return None

    receipt = queue.enqueue(Failing())
    with working(queue, concurrency=1, backstop=3, backoff=Backoff(0.25, 100), jitter=0):
        entries = until(queue, receipt.id, *["paused"] * 100, "retried", "retried", "completed", timeout=20)
    assert [entry.failure_count for entry in entries[99:]] == [0, 1, 2, 2]
    between = entries[101].recorded_at - entries[100].recorded_at
    assert dt.timedelta(seconds=0.25) <= between < dt.timedelta(seconds=1)


def _ids(number: int) -> list[uuid.UUID]:
    from venturi.ids import uuid7

    return [uuid7() for _ in range(number)]


def _fails(queue: venturi.Queue, task: type[t.Any]) -> None:
    @queue.handler(task=task)
    def fail(_: t.Any) -> None:
        raise ValueError("no")


def test_a_backoff_is_never_code_of_the_users() -> None:
    """It is evaluated where nothing may fail, so that a class with a curve of its own is refused (case 082)."""
    with pytest.raises(TypeError, match="cannot be subclassed"):
        type("Steep", (venturi.Backoff,), {})


def _wait(queue: venturi.Queue, id_: uuid.UUID) -> dt.timedelta:
    """The time between a job's last entry and its next run."""
    job = queue.job(id_)
    assert job is not None
    assert job.visible_at is not None
    return job.visible_at - queue.journal(id_)[-1].recorded_at


def _fail(queue: venturi.Queue, task: object, times: int, **options: t.Any) -> list[dt.timedelta]:
    """Let a job fail so often, each time as soon as it is known how long it would wait; these waits."""
    import psycopg
    from psycopg import sql

    waits: list[dt.timedelta] = []
    receipt = queue.enqueue(task)
    due = sql.SQL("UPDATE {} SET visible_at = now() - interval '1 ms'").format(sql.Identifier(queue.schema, "live"))
    with working(queue, poll=0.02, **options), psycopg.connect(queue.store.dsn, autocommit=True) as connection:
        for n in range(1, times + 1):
            until(queue, receipt.id, *["retried"] * n)
            waits.append(_wait(queue, receipt.id))
            connection.execute(due)
    return waits
