"""Task classes: values with a kind, and a policy for their enqueue."""

from __future__ import annotations

import datetime as dt
import enum
import functools
import typing as t
import uuid

import attrs
import pytest
from fixtures.work import ended, until, working

import venturi
from venturi import Backoff, ConfigError, Priority
from venturi.task import dedup_key, task_type


@venturi.task("mail.welcome", priority=Priority.HIGH)
class Welcome:
    user_id: int
    locale: str = "en"


@venturi.task("empty")
class Empty:
    pass


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(1)
def test_a_task_is_a_frozen_slotted_value() -> None:
    """Fields cannot be assigned, equal fields compare equal, and a task may have no fields."""
    welcome = Welcome(7)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        welcome.user_id = 8  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    assert welcome == Welcome(user_id=7, locale="en") != Welcome(8)
    assert hash(welcome) == hash(Welcome(7))
    assert not hasattr(welcome, "__dict__")
    assert Empty() == Empty()


@pytest.mark.conformance(1)
def test_a_class_that_is_attrs_already_is_taken_as_it_is(queue: venturi.Queue) -> None:
    """Its own settings hold: mutable, with a converter, keyword-only."""

    @venturi.task("made")
    @attrs.define(kw_only=True)
    class Made:
        number: int = attrs.field(converter=int)

    made = Made(number=5)
    setattr(made, "number", 6)  # noqa: B010 - checkers take every task for frozen
    job = queue.job(queue.enqueue(made).id)
    assert job is not None
    assert job.payload == {"number": 6}


@pytest.mark.conformance(2)
def test_a_task_without_options_has_the_defaults(queue: venturi.Queue) -> None:
    """Priority NORMAL, no key, no carry, no timeout, and the worker's backoff."""
    seen: list[tuple[object, ...]] = []

    @queue.handler
    def empty(task: Empty, ctx: venturi.Context) -> None:
        seen.append((ctx.carry, ctx.time_remaining))
        raise ValueError("no")

    receipt = queue.enqueue(Empty())
    job = queue.job(receipt.id)
    assert job is not None
    assert (job.priority, job.dedup_key, job.carry) == (Priority.NORMAL, None, None)
    with working(queue, backoff=Backoff(50, 60), jitter=0):
        until(queue, receipt.id, "retried")
    assert seen == [(None, None)]
    assert _wait(queue, receipt.id) == dt.timedelta(seconds=50)


@pytest.mark.conformance(3, 8)
def test_the_priority_of_the_call_wins(queue: venturi.Queue) -> None:
    """Over the kind's own; ints will do; members are read back."""
    assert [Priority.HIGH, Priority.NORMAL, Priority.LOW] == [0, 1, 2]
    asked: list[t.Any] = [None, Priority.LOW, 1]
    jobs = [queue.job(queue.enqueue(Welcome(7), priority=each).id) for each in asked]
    assert [job.priority for job in jobs if job] == [Priority.HIGH, Priority.LOW, Priority.NORMAL]
    assert all(isinstance(job.priority, Priority) for job in jobs if job)


@pytest.mark.conformance(3)
@pytest.mark.parametrize("priority", [-1, 3, 32767, "high", 1.0, True])
def test_another_priority_is_refused(priority: t.Any) -> None:
    """The error holds the value, and nothing is sent: this queue leads nowhere."""
    queue = venturi.Queue(dsn="host=127.0.0.1 port=1")
    for call in (lambda: queue.enqueue(Empty(), priority=priority), lambda: venturi.task("x", priority=priority)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert repr(priority) in str(caught.value)


@pytest.mark.conformance(4)
@pytest.mark.parametrize("kind", ["", "x" * 201, "ü" * 101, "a\nb", "a\0", "\x85", "\ud800", None, 5, b"kind"])
def test_an_impossible_kind_is_refused_when_declared(kind: t.Any) -> None:
    """As a kind and as an alias."""
    with pytest.raises(ConfigError, match="kind="):
        venturi.task(kind)
    with pytest.raises(ConfigError, match="alias="):
        venturi.task("fine", aliases=[kind])


@pytest.mark.conformance(4)
def test_a_decorator_without_a_kind_is_refused() -> None:
    """@venturi.task needs a kind, and aliases are a sequence of them."""
    with pytest.raises(ConfigError, match="needs a kind"):
        venturi.task(t.cast(str, Empty))

    for aliases in ("text", 5, None):
        with pytest.raises(ConfigError, match=f"aliases={aliases!r}"):
            venturi.task("fine", aliases=t.cast(t.Any, aliases))
    with pytest.raises(ConfigError, match="decorates a class"):
        venturi.task("fine")(t.cast(t.Any, 5))


class Named(t.NamedTuple):
    number: int


class Typed(t.TypedDict):
    number: int


class Color(enum.Enum):
    RED = 1


class Disordered:
    first: int = 0
    second: int


@pytest.mark.parametrize("cls", [int, bool, Named, Typed, Color, Disordered])
def test_a_class_that_attrs_cannot_take_is_refused_by_name(cls: type) -> None:
    """What attrs has to say about it is told, and kept as the cause."""
    with pytest.raises(ConfigError, match=f"^{cls.__qualname__} cannot be made an attrs class") as caught:
        venturi.task("fine")(cls)
    assert str(caught.value.__cause__) in str(caught.value)


def bare(cls: type) -> type:
    return cls


PREPARED: list[t.Any] = [bare, attrs.define, attrs.define(slots=False)]


class Inherited:
    @property
    def merge(self) -> str:
        return "a"


def policy(task: object) -> str:
    return "a"


@pytest.mark.parametrize("name", ["dedup_key", "merge"])
@pytest.mark.parametrize("wrapper", [property, functools.cached_property, str])
@pytest.mark.parametrize("prepare", PREPARED)
def test_a_policy_that_is_no_method_is_refused(name: str, wrapper: t.Any, prepare: t.Any) -> None:
    """It would never be asked; the error names class and attribute."""
    made = type("Odd", (), {name: wrapper(policy), "__annotations__": {}})
    with pytest.raises(ConfigError, match=rf"^Odd\.{name}: must be a method"):
        venturi.task("fine")(prepare(made))


def test_a_policy_may_be_inherited_or_absent() -> None:
    """Any method will do; a property of a base will not."""

    class Base:
        @classmethod
        def dedup_key(cls) -> str:
            return cls.__name__

        @staticmethod
        def merge(existing: object) -> venturi.Keep:
            return venturi.Keep()

    @venturi.task("fine")
    class Fine(Base):
        pass

    assert dedup_key(Fine()) == "Fine"
    assert dedup_key(Empty()) is None
    with pytest.raises(ConfigError, match=r"^Odd\.merge: must be a method, not property"):
        venturi.task("fine")(type("Odd", (Inherited,), {}))


@attrs.define
class Unhashable:
    pass


@pytest.mark.parametrize("default", [[], {}, set[int](), bytearray(), Unhashable()])
@pytest.mark.parametrize("prepare", PREPARED)
def test_a_mutable_default_is_refused(default: object, prepare: t.Any) -> None:
    """All runs of a process would share it; the error names the field and what to write instead."""
    made = type("Odd", (), {"items": default, "__annotations__": {"items": t.Any}})
    with pytest.raises(ConfigError, match=rf"^Odd\.items: .*attrs\.field\(factory={type(default).__name__}\)"):
        venturi.task("fine")(prepare(made))


def test_a_mutable_default_of_a_carry_is_refused() -> None:
    """What one job keeps in it would be found there by the next."""

    @attrs.define
    class Seen:
        pages: list[int] = []  # noqa: RUF008

    with pytest.raises(ConfigError, match=r"Seen\.pages: .*attrs\.field\(factory=list\)"):
        venturi.task("fine", carry=Seen)


def test_any_other_default_is_taken() -> None:
    """Immutable ones, factories, and those that are made of the task itself."""

    @venturi.task("fine")
    class Fine:
        text: str = ""
        pair: tuple[int, ...] = ()
        welcome: Welcome = Welcome(1)
        items: list[int] = attrs.field(factory=list[int])
        size: int = attrs.field(default=attrs.Factory(lambda self: len(self.items), takes_self=True))

    assert Fine().items == []
    assert Fine().items is not Fine().items
    assert Fine(items=[1]).size == 1


@pytest.mark.conformance(4)
@pytest.mark.parametrize("kind", ["x", "x" * 200, "ü" * 100, "a b", "日本.🎉", "a\\b", 'a"b', "{}", "%s", "a,b"])
def test_any_other_kind_works(queue: venturi.Queue, kind: str) -> None:
    """In every way of enqueuing, and when it is claimed."""

    @venturi.task(kind)
    class Odd:
        key: str | None = None

        def dedup_key(self) -> str | None:
            return self.key

    @queue.handler(task=Odd)
    def odd(task: Odd) -> None:
        pass

    receipts = [queue.enqueue(Odd()), queue.enqueue(Odd("a")), *queue.enqueue_many([Odd("b"), Odd()])]
    with working(queue, concurrency=4):
        for receipt in receipts:
            assert ended(queue, receipt.id).kind == kind
    queue.enqueue_many([Odd()] * 1000)  # in several statements
    assert queue.stats().kinds[kind].ready == 1000


@pytest.mark.conformance(8)
def test_each_kind_has_its_own_backoff_and_timeout(queue: venturi.Queue) -> None:
    """On one worker, beside a kind without."""

    @venturi.task("one", backoff=Backoff(10, 100), timeout=5)
    class One:
        pass

    @venturi.task("two", backoff=Backoff(dt.timedelta(seconds=20), 100), timeout=dt.timedelta(seconds=50))
    class Two:
        pass

    remaining: dict[str, dt.timedelta | None] = {}

    def fail(task: object, ctx: venturi.Context[t.Any]) -> None:
        remaining[ctx.kind] = ctx.time_remaining
        raise ValueError("no")

    for task in (One, Two, Empty):
        queue.handler(task=task)(functools.partial(fail))
    receipts = [queue.enqueue(task) for task in (One(), Two(), Empty())]
    with working(queue, backoff=Backoff(30, 100), jitter=0):
        for receipt in receipts:
            until(queue, receipt.id, "retried")
    assert [_wait(queue, r.id).total_seconds() for r in receipts] == [10, 20, 30]
    one, two = remaining["one"], remaining["two"]
    assert one is not None
    assert two is not None
    assert dt.timedelta(seconds=4) < one <= dt.timedelta(seconds=5)
    assert dt.timedelta(seconds=49) < two <= dt.timedelta(seconds=50)
    assert remaining["empty"] is None


@pytest.mark.conformance(9)
def test_jobs_of_a_former_kind_are_run(queue: venturi.Queue, dsn: str) -> None:
    """By the handler of the new name, under which new jobs are stored."""

    @venturi.task("mail.hello")
    class Hello:
        user_id: int

    @venturi.task("mail.renamed", aliases=("mail.hello",))
    class Renamed:
        user_id: int

    seen: list[tuple[Renamed, str]] = []

    @queue.handler(task=Renamed)
    def renamed(task: Renamed, ctx: venturi.Context) -> None:
        seen.append((task, ctx.kind))

    former = venturi.Queue(queue.schema, dsn=dsn)
    old, new = former.enqueue(Hello(1)), queue.enqueue(Renamed(2))
    with working(queue, concurrency=1):
        assert ended(queue, old.id).kind == "mail.hello"
        assert ended(queue, new.id).kind == "mail.renamed"
    assert sorted((task.user_id, kind) for task, kind in seen) == [(1, "mail.renamed"), (2, "mail.renamed")]
    former.close()


@pytest.mark.conformance(10)
def test_a_task_changed_by_its_run_is_whole_again_in_the_next(queue: venturi.Queue) -> None:
    """Each run sees the payload that was enqueued, whatever the one before did to its own copy (case 013)."""

    @venturi.task("items", backoff=Backoff(0.001, 0.001))
    class Items:
        items: list[int]
        more: dict[str, list[int]]

    seen: list[tuple[list[int], dict[str, list[int]]]] = []

    @queue.handler(task=Items)
    def items(task: Items) -> None:
        seen.append((list(task.items), {k: list(v) for k, v in task.more.items()}))
        task.items.clear()
        task.more["a"].append(9)
        if len(seen) < 3:
            raise ValueError("again")

    receipt = queue.enqueue(Items([1, 2], {"a": [3]}))
    with working(queue, poll=0.02):
        ended(queue, receipt.id)
    assert seen == [([1, 2], {"a": [3]})] * 3


NAMES = (
    "task job ctx context cls kind priority carry queue delay at conn payload note attempt dedup_key merge id index fn "
    "state run worker status key"
)


def test_fields_of_any_name_arrive_untouched(queue: venturi.Queue) -> None:
    """No name of a field means anything to the library (case 010)."""
    names = NAMES.split()
    made: type[t.Any] = attrs.make_class("Odd", {name: attrs.field(type=str) for name in names})
    odd = venturi.task("odd")(made)
    values = {name: f"value of {name}" for name in names}
    seen: list[dict[str, str]] = []

    @queue.handler(task=odd)
    def handle(task: t.Any, ctx: venturi.Context) -> None:
        seen.append(attrs.asdict(task))

    receipts = [queue.enqueue(odd(**values)), *queue.enqueue_many([odd(**values)])]
    with working(queue):
        for receipt in receipts:
            assert ended(queue, receipt.id).dedup_key is None
    assert seen == [values] * 2


@pytest.mark.conformance(17)
@pytest.mark.parametrize("carry", [set, bytes, dt.datetime, object, int | str, "dict", 5, tuple, complex])
def test_a_carry_of_another_type_is_refused_when_declared(carry: t.Any) -> None:
    """A carry is an attrs class or plain JSON."""
    with pytest.raises(ConfigError, match="carry="):
        venturi.task("x", carry=carry)


@attrs.define
class Needy:
    must: int


@attrs.define
class Broken:
    value: int = attrs.field(factory=lambda: 1 // 0)


@attrs.define
class Fine:
    value: list[int] = attrs.Factory(list[int])


@pytest.mark.conformance(17)
@pytest.mark.parametrize("carry", [Needy, Broken])
def test_a_carry_without_a_default_is_refused_when_declared(carry: t.Any) -> None:
    """A first run has to begin with something; the cause is kept."""
    with pytest.raises(ConfigError, match="cannot be made without arguments") as caught:
        venturi.task("x", carry=carry)
    assert caught.value.__cause__ is not None


@pytest.mark.conformance(17)
@pytest.mark.parametrize("carry", [Fine, dict, list, str, int, float, bool, dict[str, int], list[Fine], None])
def test_any_other_carry_begins_with_its_default(carry: t.Any) -> None:
    """Fresh for each run."""

    @venturi.task("x", carry=carry)
    class Carrying:
        pass

    type_ = task_type(Carrying)
    first, second = type_.new_carry(), type_.new_carry()
    assert first == second
    assert first is not second or not isinstance(first, (Fine, dict, list))


def _wait(queue: venturi.Queue, id_: uuid.UUID) -> dt.timedelta:
    """The time between a job's last entry and its next run."""
    job = queue.job(id_)
    assert job is not None
    assert job.visible_at is not None
    return job.visible_at - queue.journal(id_)[-1].recorded_at
