"""Tests of an application that enqueues: run it with `pytest test_app.py`.

The plugin starts a private PostgreSQL, or uses the one that VENTURI_TEST_DATABASE_URL names. What a test does is rolled
back, so that tests neither see nor wait for each other.
"""

import datetime as dt

import attrs
import psycopg
import pytest

import venturi
import venturi.testing

pytest_plugins = ["venturi.testing.plugin"]

# --- The application, which would be modules of its own


@attrs.define
class Sent:
    reminders: int = 0


@venturi.task("user.welcome")
class Welcome:
    name: str


@venturi.task("user.remind", carry=Sent)
class Remind:
    name: str


def sign_up(name: str) -> None:
    """Knows no connection: each job is committed at once."""
    venturi.enqueue(Welcome(name))
    venturi.enqueue(Remind(name), delay=dt.timedelta(days=1))


@venturi.handler
def welcome(task: Welcome) -> None:
    if not task.name:
        raise venturi.PermanentError("nobody")


@venturi.handler
def remind(task: Remind, ctx: venturi.Context[Sent]) -> venturi.Outcome:
    ctx.carry.reminders += 1
    return venturi.Pause(dt.timedelta(days=1)) if ctx.carry.reminders < 2 else None


# --- Its tests


def test_one_handler_without_a_database() -> None:
    assert venturi.testing.call(remind, Remind("ada")).carry == Sent(1)
    assert venturi.testing.call(remind, Remind("ada"), carry=Sent(1)).outcome is None
    with pytest.raises(venturi.PermanentError):
        venturi.testing.call(welcome, Welcome(""))


def test_who_signs_up_is_welcomed_and_reminded_twice(venturi_conn: psycopg.Connection) -> None:
    sign_up("ada")
    assert venturi.testing.queued(venturi_conn) == [Welcome("ada"), Remind("ada")]
    for days, expected in enumerate([[Welcome], [Remind], [Remind], []]):
        runs = venturi.testing.drain(venturi_conn, now=dt.timedelta(days=days, minutes=days))
        assert [type(run.task) for run in runs] == expected
    assert venturi.testing.queued(venturi_conn) == []
