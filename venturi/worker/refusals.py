"""What the database refuses for what is to be stored, and would refuse again: nothing else is to wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import psycopg

from venturi.log import Log, log
from venturi.store.claiming import Claiming, Ending, Unsettled
from venturi.store.connections import Connection

__all__ = ["Refused", "about_data", "reduced", "settle"]

logger: Log = log("venturi.worker")


@attrs.frozen
class Refused:
    """An ending that the database refuses.

    Attributes:
        code: The SQLSTATE.
    """

    ending: Ending
    code: str | None

    def report(self) -> None:
        """Say so: the claim stands until somebody does something about it."""
        ending = self.ending
        logger.error(
            "job %s of kind %s: the database refuses to store that run %d was %s (SQLSTATE %s)",
            ending.key, ending.kind, ending.run_count, ending.outcome, self.code,
            extra={"job": ending.key, "kind": ending.kind, "run": ending.run_count, "worker": str(ending.owner)},
        )  # fmt: skip


def settle(
    claiming: Claiming, session: Connection, endings: Sequence[Ending], *, expired: bool = False
) -> tuple[list[Unsettled], list[Refused]]:
    """Settle in one statement, or one by one where that is refused; gives what was not settled, and what is refused.

    Args:
        expired: A recovery.
    """
    try:
        return claiming.settle(session, endings, expired=expired), []
    except psycopg.Error as error:
        if not about_data(error):
            raise
        if len(endings) == 1:
            return [], [Refused(endings[0], error.sqlstate)]
    apart = [settle(claiming, session, [ending], expired=expired) for ending in endings]
    return [each for answers, _ in apart for each in answers], [each for _, refused in apart for each in refused]


def about_data(error: psycopg.Error) -> bool:
    """Whether the database refuses what is to be stored, and would refuse it again.

    Classes 22 data exception, 23 constraint, 54 program limit, P0 raised by a trigger
    (PostgreSQL documentation, appendix A).
    """
    return (error.sqlstate or "")[:2] in ("22", "23", "54", "P0")


def reduced(refused: Refused) -> Ending:
    """The end of a run without what the user's code put into it, for a database that refuses that."""
    ending = refused.ending
    note = f"the database refused to store all of this entry (SQLSTATE {refused.code})"
    lost_carry = ending.outcome == "paused" and ending.carry is not None
    outcome = "dead" if lost_carry else ending.outcome
    return attrs.evolve(ending, outcome=outcome, note=note, traceback=None, evidence=None, carry=None)
