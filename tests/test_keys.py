"""Dedup keys: what can be one, how it is stored, and who asks for it."""

from __future__ import annotations

import random
import string
import threading
import typing as t
import uuid

import pytest

import venturi


@venturi.task("keyed")
class Keyed:
    key: t.Any

    def dedup_key(self) -> t.Any:
        return self.key


INCOMPRESSIBLE = "".join(random.Random(57).choices(string.ascii_letters + string.punctuation, k=1000))
KEYS: list[tuple[t.Any, str | None]] = [
    ("a", "a"),
    (42, "42"),
    (-7, "-7"),
    (0, "0"),
    ("", ""),
    (" ", " "),
    ("🎉", "🎉"),
    ("{a,b}", "{a,b}"),
    ('\\"', '\\"'),
    ("NULL", "NULL"),
    ("x" * 1000, "x" * 1000),
    (INCOMPRESSIBLE, INCOMPRESSIBLE),
    (10**400, "1" + "0" * 400),
    (uuid.UUID("01890A5D-AC96-774B-BCCE-B302099A8057"), "01890a5d-ac96-774b-bcce-b302099a8057"),
]


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(5)
@pytest.mark.parametrize(("key", "stored"), KEYS)
def test_keys_are_stored_as_text_and_merge(queue: venturi.Queue, key: t.Any, stored: str) -> None:
    """Texts, ints and UUIDs; an empty text is a key like any other (case 057)."""

    @venturi.task("keyed")
    class Given:
        def dedup_key(self) -> t.Any:
            return key

    first = queue.enqueue(Given())
    job = queue.job(first.id)
    assert job is not None
    assert job.dedup_key == stored
    assert queue.enqueue(Given()).id == queue.enqueue_many([Given()])[0].id == first.id


@pytest.mark.conformance(5)
def test_none_is_no_key(queue: venturi.Queue) -> None:
    """Two tasks whose dedup_key() is None are two jobs (case 057)."""
    first, second = queue.enqueue(Keyed(None)), queue.enqueue(Keyed(None))
    assert first.id != second.id
    assert [job.dedup_key for job in queue.jobs()] == [None, None]


@pytest.mark.conformance(6)
@pytest.mark.parametrize(
    "key",
    [
        *("x" * 1001, "ü" * 501, "x" * 10**6, "a\0", "\ud800"),
        *(10**1000, -(10**5000), True, False, 1.5, b"a", ("a", 1), ["a"], object()),
    ],
    ids=lambda key: type(key).__name__,
)
def test_an_impossible_key_is_refused_before_any_sql(key: t.Any) -> None:
    """The error says that it is the key, and not what it was (case 057)."""

    @venturi.task("keyed")
    class Given:
        def dedup_key(self) -> t.Any:
            return key

    queue = venturi.Queue(dsn="host=127.0.0.1 port=1")
    for call in (lambda: queue.enqueue(Given()), lambda: queue.enqueue_many([Given()])):
        with pytest.raises(venturi.PayloadError) as caught:
            call()
        assert caught.value.path == "dedup_key()"
        assert "xxxx" not in str(caught.value)


@pytest.mark.conformance(7)
def test_the_key_is_asked_once_in_the_callers_thread(queue: venturi.Queue) -> None:
    """For one task and for each of many; what it raises reaches the caller, and nothing is written."""
    threads: list[int] = []

    @venturi.task("asked")
    class Asked:
        fails: bool = False

        def dedup_key(self) -> str:
            threads.append(threading.get_ident())
            if self.fails:
                raise LookupError("no key")
            return "a"

    queue.enqueue(Asked())
    queue.enqueue(Asked())
    queue.enqueue_many([Asked(), Asked()])
    assert threads == [threading.get_ident()] * 4
    for call in (lambda: queue.enqueue(Asked(True)), lambda: queue.enqueue_many([Keyed("b"), Asked(True)])):
        with pytest.raises(LookupError):
            call()
    assert len(queue.jobs()) == 1
