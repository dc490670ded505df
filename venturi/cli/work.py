"""``venturi work``: a worker as a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import logging
import os
import signal
import sys
import threading
import types
import typing as t

import venturi
from venturi.cli.errors import tell
from venturi.errors import ConfigError, VenturiError
from venturi.queue import Queue
from venturi.worker import Worker, WorkOptions

__all__ = ["work"]

logger: logging.Logger = logging.getLogger("venturi.cli")


def work(given: argparse.Namespace) -> int:
    """Work until a signal stops it.

    Returns:
        0 after a stop by a signal, 1 when an internal thread has failed for good.

    Raises:
        VenturiError: It cannot start.
    """
    queue = _queue(given.target)
    logging.basicConfig(
        level=given.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    worker = Worker(
        queue, **{name: getattr(given, name) for name in WorkOptions.__annotations__ if hasattr(given, name)}
    )
    # While it works it has handlers of its own, and puts these back: no signal before or after that ends the process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stopping(worker))
    code = _run(worker)
    _pass_stragglers(code)
    return code


def _stopping(worker: Worker) -> t.Callable[[int, types.FrameType | None], None]:
    return lambda number, frame: worker.stop()


def _queue(target: str) -> Queue[t.Any]:
    name, _, attribute = target.partition(":")
    sys.path.insert(0, os.getcwd())
    module = _module(name)
    if not attribute:
        return venturi.default
    try:
        queue: object = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise ConfigError(f"the module {name} has no {attribute}") from None
    if not isinstance(queue, Queue):
        raise ConfigError(f"{target} is no venturi.Queue but a {type(queue).__name__}")
    return t.cast(t.Any, queue)  # type: ignore[no-any-return]


def _module(name: str) -> t.Any:
    try:
        if all(map(str.isidentifier, name.split("."))):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that this one needs and does not find is its own trouble, and keeps its traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    raise ConfigError(f"there is no module {name!r} here")


def _run(worker: Worker) -> int:
    logger.info("%r starts", worker)
    try:
        report = worker.run()
    except VenturiError as error:
        tell(error)
        return 1
    except Exception:
        logger.exception("%r has failed", worker)
        return 1
    logger.info(
        "%r has stopped: %d runs settled, %d released, %d not settled",
        worker, report.settled, len(report.released), len(report.unsettled),
    )  # fmt: skip
    return 0


def _pass_stragglers(code: int) -> None:
    """End the process at once where a handler still runs: the interpreter would wait for its thread."""
    if any(thread.name.startswith("venturi-") and not thread.daemon for thread in threading.enumerate()):
        logging.shutdown()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
