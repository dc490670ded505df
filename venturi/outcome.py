"""How a run ends well, and what a second enqueue of the same dedup key may decide."""

from __future__ import annotations

import datetime as dt
import typing as t

import attrs
from typing_extensions import TypeVar

from venturi import checks
from venturi.values import Priority

__all__ = ["Combine", "Completed", "Independent", "Keep", "Merge", "Outcome", "Pause", "Replace"]

T = TypeVar("T")


def _span(made: object, field: attrs.Attribute[t.Any], value: object) -> None:
    checks.delay(field.name, value)


@attrs.frozen
class Completed:
    """The job is done.

    Args:
        note: Text for the journal, cut at 8 KiB. Default: None, no note.
    """

    note: str | None = None


@attrs.frozen
class Pause:
    """Run the job again later, with the carry as this run left it; no failure.

    A carry that cannot be stored ends the job dead: without it the next run would begin again.

    Args:
        resume_in: Time until the next run. Default: zero, due at once but behind its peers. Negative counts as zero.
        note: Text for the journal, cut at 8 KiB. Default: None, no note.

    Raises:
        TypeError: ``resume_in`` is no timedelta.
    """

    resume_in: dt.timedelta = attrs.field(default=dt.timedelta(0), validator=_span)
    note: str | None = None


Outcome: t.TypeAlias = Completed | Pause | None
"""What a handler may return; None is ``Completed()``."""


@attrs.frozen
class Keep:
    """Leave the pending job as it is and drop the new task."""


@attrs.frozen
class Replace:
    """Give the pending job the new task's payload and priority; carry and failures start afresh.

    Args:
        delay: Due that long after now. Default: None, the earlier of the existing and the requested time.

    Raises:
        TypeError: ``delay`` is no timedelta.
    """

    delay: dt.timedelta | None = attrs.field(default=None, validator=attrs.validators.optional(_span))


@attrs.frozen
class Combine(t.Generic[T]):
    """Give the pending job a payload made of both.

    Args:
        task: The payload to store. The dedup key is not computed again.
        carry: The carry to store. Left out: the existing one stays.
        priority: Default: None, the priority that the new enqueue asked for.
        delay: Due that long after now. Default: None, the earlier of the existing and the requested time.

    Raises:
        TypeError: ``delay`` is no timedelta.
    """

    task: T
    # By a factory: as a plain default attrs takes NOTHING to mean that there is none.
    carry: object = attrs.field(factory=lambda: attrs.NOTHING)
    priority: Priority | None = None
    delay: dt.timedelta | None = attrs.field(default=None, validator=attrs.validators.optional(_span))


@attrs.frozen
class Independent:
    """Insert the new task as a job of its own beside the pending one."""


Merge: t.TypeAlias = Keep | Replace | Combine[T] | Independent
"""What ``merge(self, existing)`` returns."""
