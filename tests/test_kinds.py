"""One handler and one task class for each kind of a queue, and what becomes of kinds and payloads of other versions."""

from __future__ import annotations

import typing as t

import psycopg
import pytest
from fixtures.nowhere import NOWHERE, binding
from fixtures.work import ended, working
from psycopg import sql

import venturi
from venturi import Context, DuplicateKindError


@venturi.task("mail.welcome")
class Welcome:
    user_id: int = 0


@venturi.task("feed")
class Feed:
    url: str = ""


class Methods:
    def bound(self, task: Welcome) -> None: ...


def plain_context(task: Welcome, ctx: Context) -> None: ...


@pytest.fixture
def schema(emptied: str) -> str:
    """One schema for all tests here, emptied after each."""
    return emptied


@pytest.mark.conformance(18)
def test_a_second_handler_of_a_kind_or_alias_is_refused(nowhere: venturi.Queue) -> None:
    """Both are named, when the second is decorated or when a worker starts (case 030)."""

    @venturi.task("mail.renamed", aliases=["mail.welcome"])
    class Renamed:
        pass

    def first(task: t.Any) -> None: ...
    def second(task: t.Any) -> None: ...

    for one, other in ((Welcome, Welcome), (Welcome, Renamed), (Renamed, Welcome)):
        queue = venturi.Queue(dsn=NOWHERE)
        queue.handler(task=one)(first)
        with pytest.raises(DuplicateKindError) as caught:
            queue.handler(task=other)(second)
        if one is other:
            assert "first" in str(caught.value)
            assert "second" in str(caught.value)
        assert "mail.welcome" in str(caught.value)


@pytest.mark.conformance(18)
def test_a_second_handler_by_annotation_is_refused_at_the_start(nowhere: venturi.Queue) -> None:
    """Postponed annotations are compared when they are resolved (case 030)."""

    @nowhere.handler
    def first(task: Welcome) -> None: ...

    @nowhere.handler
    def second(task: Welcome) -> None: ...

    with pytest.raises(DuplicateKindError, match=r"first and .*second"):
        nowhere.work()


@pytest.mark.conformance(18)
def test_the_same_function_again_and_another_queue_are_fine(nowhere: venturi.Queue) -> None:
    """Registering twice is registering once; queues do not know of each other (case 030)."""
    other = venturi.Queue("billing", dsn=NOWHERE)
    method = Methods().bound
    for queue in (nowhere, nowhere, other):
        queue.handler(plain_context)
        queue.handler(task=Feed)(plain_context)
    assert [len(list(binding(queue).queue.registry)) for queue in (nowhere, other)] == [2, 2]
    third = venturi.Queue(dsn=NOWHERE)
    for _ in range(2):
        third.handler(method)
        third.handler(third.handler(method))
    binding(third)


@pytest.mark.conformance(18)
@pytest.mark.parametrize(
    ("options", "others", "told"),
    [
        ({"cap": 1}, {"cap": 2}, r"cap=2: .*plain_context.* with cap=1"),
        ({}, {"cap": 1}, r"cap=1: .*cap=None"),
        ({"cap": 1, "dead_on": (OSError,)}, {"cap": 1}, r"dead_on=\(\): .*OSError"),
    ],
)
def test_the_same_function_again_with_other_options_is_refused(
    options: dict[str, t.Any], others: dict[str, t.Any], told: str
) -> None:
    """The option is named, when the second is registered or, with the class named once only, when a worker starts."""
    queue = venturi.Queue(dsn=NOWHERE)
    for _ in range(2):
        queue.handler(**options)(plain_context)
    queue.handler(task=Welcome, **options)(plain_context)
    assert len(list(binding(queue).queue.registry)) == 1
    with pytest.raises(venturi.ConfigError, match=told):
        queue.handler(**others)(plain_context)
    with pytest.raises(venturi.ConfigError, match=told):
        queue.handler(task=Welcome, **others)(plain_context)

    late = venturi.Queue(dsn=NOWHERE)
    late.handler(**options)(plain_context)
    late.handler(task=Welcome, **others)(plain_context)
    with pytest.raises(venturi.ConfigError, match="plain_context"):
        binding(late)


@pytest.mark.conformance(18)
def test_a_second_task_class_of_a_kind_is_refused(queue: venturi.Queue) -> None:
    """By producers too: both classes are named."""

    @venturi.task("mail.welcome")
    class Double:
        pass

    queue.enqueue(Welcome())
    with pytest.raises(DuplicateKindError, match=r"mail\.welcome.*Welcome.*Double"):
        queue.enqueue(Double())
    assert len(queue.jobs()) == 1


@pytest.mark.conformance(18)
def test_one_file_imported_under_two_names_is_told(queue: venturi.Queue) -> None:
    """The classes look alike, so that the error says what may have happened (case 031)."""
    source = "import venturi\n@venturi.task('twice')\nclass Twice: pass\n"
    modules: list[dict[str, t.Any]] = [{"__name__": "tasks"}, {"__name__": "app.tasks"}]
    for module in modules:
        exec(source, module)
    queue.enqueue(modules[0]["Twice"]())
    with pytest.raises(DuplicateKindError, match=r"tasks\.Twice and app\.tasks\.Twice.*imported under two names"):
        queue.enqueue(modules[1]["Twice"]())


@pytest.mark.conformance(18)
def test_handlers_of_one_file_imported_under_two_names_are_told(nowhere: venturi.Queue) -> None:
    """A file that runs as __main__ and is imported too meets its own handlers, and hears what is wrong (case 031)."""
    source = "def welcome(task: Welcome) -> None: ...\n"
    modules: list[dict[str, t.Any]] = [{"__name__": name, "Welcome": Welcome} for name in ("__main__", "app.handlers")]
    for module in modules:
        exec(source, module)
        nowhere.handler(module["welcome"])
    with pytest.raises(DuplicateKindError, match=r"__main__\.welcome and app\.handlers\.welcome.*under two names"):
        binding(nowhere)


@pytest.mark.conformance(19)
def test_an_unknown_kind_is_named(nowhere: venturi.Queue) -> None:
    """By attribute and text."""
    nowhere.handler(plain_context)
    binding(nowhere)
    with pytest.raises(venturi.UnknownKindError, match=r"no\.such") as caught:
        nowhere.registry.find("no.such")
    assert caught.value.kind == "no.such"


@pytest.mark.conformance(20)
def test_a_worker_claims_only_the_kinds_of_its_own_queues_handlers(queue: venturi.Queue, dsn: str) -> None:
    """A kind that only another queue's handlers know stays pending (case 155)."""
    other = venturi.Queue("billing", dsn=dsn)
    other.handler(task=Feed)(lambda task: None)
    queue.handler(task=Welcome)(lambda task: None)
    with pytest.raises(venturi.UnknownKindError):
        binding(queue).queue.registry.find("feed")
    foreign, own = queue.enqueue(Feed()), queue.enqueue(Welcome())
    with working(queue):
        ended(queue, own.id)
    job = queue.job(foreign.id)
    assert job is not None
    assert (job.status, job.run_count) == ("pending", 0)


@pytest.mark.conformance(25)
def test_payloads_of_other_versions_of_the_code_run(queue: venturi.Queue, dsn: str) -> None:
    """A newer producer's extra field is ignored, an older one's missing field has its default or fails the run.

    Case 157.
    """

    @venturi.task("versioned")
    class Newer:
        must: int
        may: str = "default"

    def stored(payload: str) -> venturi.Receipt:
        receipt = queue.enqueue(Newer(1))
        with psycopg.connect(dsn) as connection:
            table = sql.Identifier(queue.schema, "jobs")
            change = sql.SQL("UPDATE {} SET payload = %s WHERE id = %s").format(table)
            connection.execute(change, (payload, receipt.id))
        return receipt

    seen: list[Newer] = []
    queue.handler(task=Newer)(seen.append)
    fine = [stored('{"must": 2, "may": "x", "new": [1]}'), stored('{"must": 3}')]
    bad = stored('{"may": "x"}')
    with working(queue, concurrency=1, backstop=1):
        for receipt in fine:
            ended(queue, receipt.id)
        ended(queue, bad.id, "dead")
    assert seen == [Newer(2, "x"), Newer(3)]
    assert "must" in (queue.journal(bad.id)[0].note or "")
