"""One run of one job, inside a slot: decode, call the handler, encode.

All code of the user's runs here and nowhere else, and whatever it raises becomes the end of this run alone:
converters, default factories and ``__str__`` of exceptions are its code as much as the handler is.
"""

from __future__ import annotations

import contextvars
import inspect
import threading
import time
import typing as t
import uuid
from collections.abc import Callable

import attrs

from venturi import codec, text
from venturi.backoff import jittered
from venturi.carry import read_carry, write_carry
from venturi.checks import microseconds
from venturi.context import Context, enter
from venturi.errors import Cancelled, PayloadError, PermanentError, RetryLater
from venturi.outcome import Completed, Pause
from venturi.store.claiming import Ending
from venturi.telemetry import Telemetry
from venturi.values import Entry
from venturi.worker.flight import Run
from venturi.worker.settings import Settings

__all__ = ["LEAST_DELAY", "Runner"]

LEAST_DELAY = 5_000_000
"""Microseconds: a job that was recovered, or could not be decoded, waits at least so long."""

EVIDENCE_BYTES = 64 * 1024
_LONGEST = 260_000_000_000_000_000  # microseconds, some 8200 years; the database stops it at the latest instant


@attrs.define
class _End:
    """How the handler ended, before it is made an `Ending`."""

    outcome: t.Literal["completed", "paused", "retried", "dead", "released", "cancelled"]
    note: str | None = None
    traceback: str | None = None
    delay: int | None = None
    keeps_carry: bool = False


class Runner:
    """Runs claims.

    Args:
        owner: The worker's id.
        state: Given to every handler.
        history: Reads the newest entries of a job.
    """

    def __init__(
        self,
        owner: uuid.UUID,
        settings: Settings,
        state: object,
        telemetry: Telemetry,
        history: Callable[[uuid.UUID], list[Entry]],
    ) -> None:
        self._owner = owner
        self._settings = settings
        self._state = state
        self._telemetry = telemetry
        self._history = history

    def __call__(self, run: Run) -> Ending:
        """Run one claim to its end. Raises only what another thread raises in this one."""
        if run.signal.reason is not None:
            return self._unstarted(run)
        run.thread = threading.current_thread().name
        try:
            # A context of its own, so that no variable set by one run is seen by the next.
            return contextvars.Context().run(self._observed, run)
        except BaseException as error:
            return self._failed(run, text.describe(error), text.trace(error))

    def interrupted(self, run: Run) -> Ending:
        """The end of a run that an exception from another thread has cut short outside of its handler."""
        return self._failed(run, "cut short by an exception from another thread", None, delay=LEAST_DELAY)

    def _unstarted(self, run: Run) -> Ending:
        reason = run.signal.reason
        return self._ending(run, _End("cancelled" if reason == "operator" else "released", f"not started: {reason}"))

    def _observed(self, run: Run) -> Ending:
        claim = run.claim
        with self._telemetry.processing(run.bound.task.kind, claim.key, claim.run_count, claim.trace) as ended:
            started = time.monotonic()
            ending = self._run(run)
            self._telemetry.record("messaging.process.duration", time.monotonic() - started, venturi__kind=claim.kind)
            ended(ending.outcome)
            return ending

    def _run(self, run: Run) -> Ending:
        claim, bound = run.claim, run.bound
        try:
            if claim.payload is None:
                raise PayloadError("the body of the job is missing")
            task: t.Any = codec.decode(claim.payload, t.cast("type[t.Any]", bound.task.cls))
            carry = read_carry(claim.carry, bound.task)
        except BaseException as error:
            return self._failed(run, text.describe(error), text.trace(error), least=LEAST_DELAY)
        evidence: dict[str, object] = {}
        context: Context[t.Any, t.Any] = Context(
            id=claim.key,
            kind=bound.task.kind,
            run_count=claim.run_count,
            failure_count=claim.failure_count,
            carry=carry,
            state=self._state,
            signal=run.signal,
            evidence=evidence,
            history=lambda: self._history(claim.id),
        )
        enter(context)
        if bound.task.timeout is not None:
            run.signal.timeout_at = time.monotonic() + bound.task.timeout
        started = time.monotonic()
        end = self._call(run, task, context)
        duration = round((time.monotonic() - started) * 1e6)
        return self._encoded(run, end, context.carry, evidence, duration)

    def _call(self, run: Run, task: t.Any, context: Context[t.Any, t.Any]) -> _End:
        handler = run.bound.handler
        try:
            result: object = handler.fn(task, context) if run.bound.takes_context else handler.fn(task)
        except PermanentError as error:
            return _End("dead", text.note(error), text.trace(error))
        except RetryLater as error:
            return _End("retried", text.describe(error), text.trace(error), delay=microseconds(error.delay))
        except Cancelled as error:
            return self._cancelled(run, error)
        except Exception as error:
            gives_up = bool(handler.dead_on) and isinstance(error, handler.dead_on)
            return _End("dead" if gives_up else "retried", text.describe(error), text.trace(error))
        except BaseException as error:
            return _End("retried", text.describe(error), text.trace(error), keeps_carry=True)
        return _returned(result)

    def _cancelled(self, run: Run, error: Cancelled) -> _End:
        failed = _End("retried", text.describe(error), text.trace(error))
        match run.signal.reason:
            case "shutdown" | "lease lost":
                # A lease that the clock took for lost, in an outage, may have been renewed since. A claim that is lost
                # indeed is not touched: the epoch sees to that.
                return _End("released", text.note(error))
            case "operator":
                return _End("cancelled", text.note(error))
            case _:
                return failed

    def _encoded(self, run: Run, end: _End, carried: object, given: dict[str, object], duration: int) -> Ending:
        evidence, problem = _evidence(given)
        problems = [problem] if problem else []
        carry: str | None = None
        if end.outcome in ("paused", "retried") and not end.keeps_carry and run.bound.task.carry is not None:
            try:
                carry = write_carry(carried, run.bound.task)
            except BaseException as error:
                problems.append(f"the carry cannot be stored: {text.describe(error)}")
                if end.outcome == "paused":
                    # Without its state the next run would begin again, and again; nobody can wish for that.
                    end = _End("dead", end.note, text.trace(error))
        end.note = text.note("; ".join(filter(None, [end.note, *problems]))) if problems else end.note
        if run.signal.by_operator and end.outcome != "completed":
            end.outcome = "cancelled"
        if end.outcome == "retried":
            return self._failed(run, end.note, end.traceback, duration, evidence, carry, delay=end.delay)
        return self._ending(run, end, duration, evidence, carry)

    def _failed(
        self,
        run: Run,
        note: str | None,
        traceback: str | None,
        duration: int = 0,
        evidence: str | None = None,
        carry: str | None = None,
        *,
        delay: int | None = None,
        least: int = 0,
    ) -> Ending:
        """A retry, or the end of the job when it has failed too often."""
        claim, settings = run.claim, self._settings
        failure = claim.failure_count + 1
        if settings.backstop is not None and failure >= settings.backstop:
            return self._ending(run, _End("dead", note, traceback), duration, evidence)
        if delay is None:
            curve = run.bound.task.backoff or settings.backoff
            delay = max(least, jittered(curve, claim.id, failure, settings.jitter) // 1000)
        return self._ending(run, _End("retried", note, traceback, delay), duration, evidence, carry)

    def _ending(
        self, run: Run, end: _End, duration: int = 0, evidence: str | None = None, carry: str | None = None
    ) -> Ending:
        claim = run.claim
        return Ending(
            key=claim.key,
            kind=claim.kind,
            run_count=claim.run_count,
            owner=self._owner,
            outcome=end.outcome,
            delay=min(max(end.delay or 0, 0), _LONGEST),
            duration=duration,
            note=end.note,
            traceback=end.traceback,
            evidence=evidence,
            carry=carry,
        )


def _returned(result: object) -> _End:
    if result is None:
        return _End("completed")
    if isinstance(result, Completed):
        return _End("completed", None if result.note is None else text.note(result.note))
    if isinstance(result, Pause):
        note = None if result.note is None else text.note(result.note)
        return _End("paused", note, delay=microseconds(result.resume_in))
    if inspect.iscoroutine(result):
        result.close()
    named = text.note(_named(result))
    problem = f"the handler returned {named}, which is none of None, Completed and Pause"
    return _End("retried", problem, keeps_carry=True)


def _named(result: object) -> str:
    if isinstance(result, type):
        return f"the class {result.__qualname__}"
    return f"an object of type {type(result).__qualname__}"


def _evidence(given: dict[str, object]) -> tuple[str | None, str | None]:
    """The JSON text of the evidence, or what is wrong with it."""
    if not given:
        return None, None
    try:
        encoded = codec.plain(given)
    except BaseException as error:
        return None, f"the evidence is left out: {text.describe(error)}"
    if len(encoded) > EVIDENCE_BYTES:
        return None, f"the evidence is left out: {len(encoded)} bytes are more than {EVIDENCE_BYTES}"
    return encoded, None
