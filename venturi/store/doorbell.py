"""How a parked worker is woken without taxing busy ones.

A commit with a pending NOTIFY takes a lock of the whole database until its commit record is flushed, so a NOTIFY with
every enqueue makes all commits wait in line. It is sent only when somebody sleeps who could do the job. Two sorts of
advisory keys say so:

PARKED    one for each kind of a queue, held shared, for as long as it sleeps, by the listening session of each parked
          worker; a worker of very many kinds holds one that stands for all of them instead
INFLIGHT  one for each queue, held shared by every producer from before it looks at PARKED to the end of its transaction

A producer takes INFLIGHT, and tries PARKED of its kind and of all kinds exclusively: free means that nobody sleeps,
and it lets go at once; refused means that somebody does, and it notifies. A worker with nothing to do takes PARKED
shared, and then tries INFLIGHT exclusively in a transaction of its own: granted means that every producer that looked
before it has committed or rolled back, and every later one will see it. So it claims once more, in a later statement,
and sleeps until notified, due or told. Refused means that a producer in an open transaction may have looked too early:
it keeps PARKED, polls ever slower, and asks again.

Every lock is only tried. A producer that is refused INFLIGHT, which some worker holds for a moment, notifies all the
same; a refused PARKED makes a worker poll. Nothing waits in a caller's transaction, and nothing is lost:

* a producer that sees PARKED free entered INFLIGHT before the worker could pass its second step, so that step is
  refused until the producer has committed, and the claim after it sees the job;
* a session that dies gives up both its LISTEN and its PARKED, since they belong to the same session.

What would break it: looking at PARKED before entering INFLIGHT, or without having entered it; claiming in the same
statement that tries INFLIGHT, whose snapshot is older; a worker that sleeps on one session and listens on another;
sending the two locks of the worker through a pooler.
"""

from __future__ import annotations

from collections.abc import Sequence

from venturi.store import sql
from venturi.store.connections import Session, run

__all__ = ["leave", "listen", "park", "quiet"]


def listen(session: Session, statements: sql.Sql) -> None:
    """Subscribe the session to the queue's channel."""
    run(session, statements(sql.LISTEN))


def park(session: Session, statements: sql.Sql, bells: Sequence[int]) -> bool | None:
    """Take PARKED; whether the worker may sleep after one more claim. None: not even PARKED was to be had just now."""
    answers = run(session, statements(sql.PARK), (list(bells),)).fetchall()
    taken = [bell for bell, granted in answers if granted]
    if len(taken) < len(answers):
        leave(session, statements, taken)
        return None
    return quiet(session, statements)


def quiet(session: Session, statements: sql.Sql) -> bool:
    """Whether every producer that looked before PARKED was taken has ended its transaction."""
    return bool(run(session, statements(sql.QUIET)).fetchall()[0][0])


def leave(session: Session, statements: sql.Sql, bells: Sequence[int]) -> None:
    """Let go of PARKED."""
    run(session, statements(sql.LEAVE), (list(bells),))
