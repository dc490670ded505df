"""Handlers: how they are found, what they may look like, and what is refused."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import threading
import typing as t
from pathlib import Path

import attrs
import pytest
from fixtures.nowhere import NOWHERE, binding
from fixtures.work import ended, working

import venturi
from venturi import ConfigError, Context

if t.TYPE_CHECKING:
    from somewhere import Hidden  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]


@attrs.define
class Cursor:
    page: int = 0


@venturi.task("mail.welcome")
class Welcome:
    user_id: int = 0


@venturi.task("feed", carry=Cursor)
class Feed:
    url: str = ""


class NoTask:
    pass


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(13)
def test_both_forms_of_handler_are_dispatched_by_annotation(schema: str, dsn: str) -> None:
    """With the task alone or with a context, whose state is the very object given to work()."""
    queue = venturi.Queue[list[str]](schema, dsn=dsn)
    state: list[str] = []
    seen: list[tuple[object, object]] = []

    @queue.handler
    def welcome(task: Welcome) -> None:
        seen.append((task, None))

    @queue.handler(cap=4)
    def feed(task: Feed, ctx: Context[Cursor, list[str]]) -> None:
        seen.append((task, ctx.state))

    receipts = [queue.enqueue(task) for task in (Welcome(1), Feed("a"), Welcome(2), Feed("b"))]
    with queue.work(state=state, block=False, concurrency=1, poll=0.1):
        for receipt in receipts:
            ended(queue, receipt.id)
    assert seen == [(Welcome(1), None), (Feed("a"), []), (Welcome(2), None), (Feed("b"), [])]
    assert all(each is state for _, each in seen if each is not None)
    queue.close()


@pytest.mark.conformance(14)
def test_a_class_defined_later_in_the_module_resolves(nowhere: venturi.Queue) -> None:
    """Annotations are text until a worker starts (case 033)."""

    @nowhere.handler
    def later(task: DefinedLater) -> None:
        pass

    binding(nowhere)
    assert nowhere.registry.find("later").task.cls is DefinedLater


@venturi.task("later")
class DefinedLater:
    pass


@pytest.mark.conformance(14, 16)
def test_a_name_for_type_checkers_only_is_named_with_the_way_out(nowhere: venturi.Queue) -> None:
    """The error says what does not resolve and what to write instead, which works (case 033)."""

    def hidden(task: Hidden) -> None:  # pyright: ignore[reportUnknownParameterType]
        pass

    broken = venturi.Queue(dsn=NOWHERE)
    broken.handler(hidden)  # pyright: ignore[reportUnknownArgumentType]
    with pytest.raises(ConfigError, match=r"'Hidden' does not resolve.*handler\(task=Hidden\)") as caught:
        broken.work()
    assert "hidden" in str(caught.value)
    nowhere.handler(task=Welcome)(hidden)  # pyright: ignore[reportUnknownArgumentType]
    binding(nowhere)


@pytest.mark.conformance(15)
def test_a_decorated_function_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called and returns as before, with no queue, worker or environment; name, docstring, signature stay.

    Case 029.
    """
    for name in list(os.environ):
        if name.startswith("PG") or name.endswith("DATABASE_URL"):
            monkeypatch.delenv(name)

    def welcome(task: Welcome) -> venturi.Outcome:
        """Greets."""
        return venturi.Completed(f"hello {task.user_id}")

    for decorate in (venturi.Queue().handler, venturi.Queue().handler(cap=2, dead_on=(ValueError,))):
        handler = decorate(welcome)
        assert handler(Welcome(7)) == venturi.Completed("hello 7")
        assert getattr(handler, "__name__", None) == "welcome"
        assert handler.__doc__ == "Greets."
        assert inspect.signature(handler) == inspect.signature(welcome)


def quoted(task: "Welcome") -> None: ...  # noqa: UP037 - as people write it
def quoted_carry(task: "Feed", ctx: "Context[Cursor]") -> None: ...  # noqa: UP037
def annotated(task: t.Annotated[Welcome, "a user's"]) -> None: ...
def hidden_context(task: Welcome, ctx: Context[Hidden]) -> None: ...  # pyright: ignore[reportUnknownParameterType]
def hidden_result(task: Welcome) -> Hidden: ...  # pyright: ignore[reportUnknownParameterType]


@pytest.mark.conformance(16)
@pytest.mark.parametrize("name", ["quoted", "quoted_carry", "annotated", "hidden_context", "hidden_result"])
def test_annotations_are_read_as_far_as_they_are_needed(nowhere: venturi.Queue, name: str) -> None:
    """Quoted and postponed, with more to them, or beside names that only type checkers have (case 033)."""
    nowhere.handler(globals()[name])
    binding(nowhere)


def nothing() -> None: ...
def three(task: Welcome, ctx: Context, more: int) -> None: ...
def keyword(task: Welcome, *, ctx: Context) -> None: ...
def bare(*task: Welcome) -> None: ...
def no_task(task: NoTask) -> None: ...
def no_class(task: list[Welcome]) -> None: ...
def unresolved(task: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def other_carry(task: Feed, ctx: Context[Welcome]) -> None: ...
def no_carry(task: Welcome, ctx: Context[Cursor]) -> None: ...
def none_carry(task: Feed, ctx: Context[None]) -> None: ...
def quoted_other(task: Feed, ctx: "Context[Welcome]") -> None: ...  # noqa: UP037


BROKEN = ["nothing", "three", "keyword", "bare", "no_task", "no_class", "unresolved"]
WRONG_CARRIES = ["other_carry", "no_carry", "none_carry", "quoted_other"]


@pytest.mark.conformance(16)
@pytest.mark.parametrize("name", BROKEN + WRONG_CARRIES)
def test_a_function_that_cannot_handle_is_named(nowhere: venturi.Queue, name: str) -> None:
    """When it is decorated or, at the latest, when a worker starts, before it connects."""

    def begin() -> None:
        nowhere.handler(globals()[name])
        nowhere.work()

    with pytest.raises(ConfigError, match=name):
        begin()


@pytest.mark.parametrize("thing", [5, None, "welcome", object()])
def test_what_cannot_be_called_is_no_handler(nowhere: venturi.Queue, thing: t.Any) -> None:
    """And neither is a builtin whose signature cannot be read (case 029)."""
    with pytest.raises(ConfigError):
        nowhere.handler(task=Welcome)(thing)
    with pytest.raises(ConfigError):
        nowhere.handler(task=NoTask)(lambda task: None)


class Later:
    """An object whose call is a coroutine."""

    async def __call__(self, task: Welcome) -> None: ...


async def coroutine(task: Welcome) -> None: ...
def generator(task: Welcome) -> t.Iterator[int]:
    yield 1


async def both(task: Welcome) -> t.AsyncIterator[int]:
    yield 1


@pytest.mark.conformance(16)
@pytest.mark.parametrize("fn", [coroutine, generator, both, functools.partial(coroutine), Later(), Later().__call__])
def test_what_only_makes_a_coroutine_or_a_generator_is_no_handler(nowhere: venturi.Queue, fn: t.Any) -> None:
    """It would do nothing, run for run, whatever form it comes in (case 029)."""
    with pytest.raises(ConfigError, match="plain functions"):
        nowhere.handler(task=Welcome)(fn)


def defaults(task: Welcome, ctx: Context | None = None, *more: int, flag: bool = False, **rest: int) -> None: ...
def any_carry(task: Feed, ctx: Context[t.Any]) -> None: ...
def plain_context(task: Welcome, ctx: Context) -> None: ...


@pytest.mark.conformance(16)
@pytest.mark.parametrize("fn", [defaults, any_carry, plain_context], ids=lambda fn: fn.__name__)
def test_optional_parameters_and_open_carries_are_fine(nowhere: venturi.Queue, fn: t.Any) -> None:
    """Only what a run must fill counts, and Any fits every carry."""
    nowhere.handler(fn)
    binding(nowhere)


class Methods:
    seen: t.ClassVar[list[str]] = []

    def bound(self, task: Welcome) -> None:
        self.seen.append("bound")

    @staticmethod
    def static(task: Welcome) -> None:
        Methods.seen.append("static")

    @classmethod
    def of_class(cls, task: Welcome, ctx: Context) -> None:
        cls.seen.append("of class")

    def __call__(self, task: Welcome) -> None:
        self.seen.append("called")


def with_more(more: str, task: Welcome) -> None:
    Methods.seen.append(more)


def logged(fn: t.Callable[[Welcome], None]) -> t.Callable[[Welcome], None]:
    """A decorator as programs have them."""

    @functools.wraps(fn)
    def inner(*arguments: t.Any, **options: t.Any) -> None:
        fn(*arguments, **options)

    return inner


@logged
def wrapped(task: Welcome) -> None:
    Methods.seen.append("wrapped")


FORMS: dict[str, t.Any] = {
    "bound": Methods().bound,
    "static": Methods.static,
    "of class": Methods.of_class,
    "called": Methods(),
    "partial": functools.partial(with_more, "partial"),
    "wrapped": wrapped,
    "lambda": eval("lambda task: Methods.seen.append('lambda')"),  # untyped, as users write it
    "cached": eval("functools.lru_cache(lambda task: Methods.seen.append('cached'))"),
}


@pytest.mark.conformance(13)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("named", [True, False])
def test_callables_of_every_form_are_handlers(queue: venturi.Queue, form: str, named: bool) -> None:
    """Methods, partials and objects too; one without an annotation needs its task named, and says so (case 029)."""
    Methods.seen.clear()
    if named:
        queue.handler(task=Welcome)(FORMS[form])
    elif form in ("lambda", "cached"):
        with pytest.raises(ConfigError, match=r"handler\(task="):
            queue.handler(FORMS[form])
        return
    else:
        queue.handler(FORMS[form])
    receipt = queue.enqueue(Welcome())
    with working(queue):
        ended(queue, receipt.id)
    assert Methods.seen == [form]


@pytest.mark.conformance(21)
def test_work_without_handlers_is_refused_before_connecting(nowhere: venturi.Queue) -> None:
    """It does not return quietly, and says what is missing."""
    with pytest.raises(ConfigError, match="no handlers"):
        nowhere.work()
    with pytest.raises(ConfigError, match="no handlers"):
        nowhere.work(block=False)


@pytest.mark.conformance(23)
@pytest.mark.parametrize(
    "dead_on",
    [(5,), ("ValueError",), (BaseException,), (KeyboardInterrupt,), ValueError, [ValueError], (ValueError(),)],
)
def test_dead_on_takes_exception_classes(nowhere: venturi.Queue, dead_on: t.Any) -> None:
    """A tuple of them, and nothing else."""
    with pytest.raises(ConfigError, match="dead_on="):
        nowhere.handler(task=Welcome, dead_on=dead_on)(lambda task: None)


@pytest.mark.conformance(24)
def test_current_context_is_that_of_the_run(queue: venturi.Queue) -> None:
    """On each slot its own, deep in the call; outside of a run there is none."""
    together = threading.Barrier(4)
    seen: list[tuple[Context[t.Any, t.Any], Context[t.Any, t.Any]]] = []

    def deep() -> Context[t.Any, t.Any]:
        together.wait(5)
        return venturi.current_context()

    @queue.handler
    def welcome(task: Welcome, ctx: Context) -> None:
        seen.append((ctx, deep()))

    receipts = queue.enqueue_many([Welcome()] * 4)
    with working(queue, concurrency=4):
        for receipt in receipts:
            ended(queue, receipt.id)
    assert all(own is current for own, current in seen)
    assert {own.id for own, _ in seen} == {receipt.id for receipt in receipts}
    with pytest.raises(ConfigError, match="inside a running handler"):
        venturi.current_context()


MODULES = {
    "tasks": "import venturi\nqueue = venturi.Queue('x')\n@venturi.task('t')\nclass T: pass",
    "app": "import tasks\ndef send(): tasks.queue.enqueue(tasks.T())",
    "handlers": "import app, tasks\n@tasks.queue.handler\ndef run(task: 'tasks.T'): pass",
    "main": "import handlers, tasks\nfrom venturi.worker import Worker\nWorker(tasks.queue)",
}


@pytest.mark.conformance(22)
@pytest.mark.parametrize("order", [("tasks", "app", "handlers"), ("handlers", "app", "tasks"), ("app", "handlers")])
def test_modules_may_be_imported_in_any_order(tmp_path: Path, order: tuple[str, ...]) -> None:
    """Nothing but the class is needed to declare a task, and nothing but the queue to declare a handler (case 037)."""
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    path = os.pathsep.join([str(tmp_path), str(Path(venturi.__file__).parents[1])])
    command = [sys.executable, "-c", "import " + ", ".join([*order, "main"])]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=30)
