"""A long import that does one page per run, and keeps its place.

A run that ends with Pause frees its slot, and the job goes behind its peers; the carry is stored in the same commit. So
a deployment or a crash costs one page at most, however long the whole import takes.
"""

import datetime as dt
import threading

import attrs

import venturi

queue = venturi.Queue("example_checkpoint")
done = threading.Event()
PAGES = (["ada", "grace"], ["barbara", "frances"], ["radia"])


@attrs.define
class Cursor:
    """The carry: made without arguments on a first run, so that every field has a default."""

    page: int = 0
    names: int = 0


@venturi.task("people.import", carry=Cursor)
class ImportPeople:
    source: str


@queue.handler
def import_people(task: ImportPeople, ctx: venturi.Context[Cursor]) -> venturi.Outcome:
    names = PAGES[ctx.carry.page]
    if ctx.carry.page == 1 and ctx.failure_count == 0:
        # Failures keep the carry too. Left to itself, the first retry comes after about a second.
        raise venturi.RetryLater(dt.timedelta(0), "the source was busy")

    # At least once: a crash after this line repeats the page, so that storing it twice has to be harmless.
    print(f"run {ctx.run_count}: page {ctx.carry.page} of {task.source}: {', '.join(names)}")
    ctx.attach(page=ctx.carry.page, names=len(names))
    ctx.carry.page += 1
    ctx.carry.names += len(names)
    if ctx.carry.page < len(PAGES):
        return venturi.Pause(dt.timedelta(milliseconds=50), "next page")
    done.set()
    return venturi.Completed(f"{ctx.carry.names} names")


if __name__ == "__main__":
    queue.migrate()
    receipt = queue.enqueue(ImportPeople("people.csv"))
    queue.work(stop=done)
    for entry in queue.journal(receipt.id):
        print(f"journal: run {entry.run_no} {entry.outcome}: {entry.note}")
    queue.close()
