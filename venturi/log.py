"""Loggers that only log: a program's faulty filter or handler ends neither a worker nor a caller's transaction."""

from __future__ import annotations

import logging
import traceback
import typing as t

__all__ = ["Log", "log"]


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls do not raise."""

    def log(self, level: int, msg: object, *args: object, **options: t.Any) -> None:
        """Log; what a filter or handler raises is printed, as `logging` does with what handlers meet themselves."""
        options.setdefault("stacklevel", 2)  # what is reported as the place is the caller's, and not this one
        try:
            self.logger.log(level, msg, *args, **options)
        except Exception:  # noqa: BLE001 - a program's filters and handlers may raise anything
            if logging.raiseExceptions:
                traceback.print_exc()


def log(name: str) -> Log:
    """The logger of that name."""
    return Log(logging.getLogger(name), None)
