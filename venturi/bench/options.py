"""What a user may choose."""

from __future__ import annotations

import attrs

from venturi import checks
from venturi.bench.tasks import PAYLOADS
from venturi.errors import ConfigError

__all__ = ["Options"]


@attrs.frozen(kw_only=True)
class Options:
    """The options of a benchmark, checked.

    Args:
        dsn: Where to. Default: None, as `venturi.Queue`.
        jobs: How many are enqueued in chunks and drained, at least 1; what is done one by one is done with fewer.
            Default: 20000.
        concurrency: Handlers that run at once in one worker process, at least 1. Default: 20.
        processes: Worker processes, at least 1. Default: 1.
        producers: Threads that enqueue side by side in the measure ``producers``, at least 1. Default: 8.
        payload: Bytes of a job's payload, about: 200 in fields of several types, or 0, a number alone. Default: 200.
        sleep: Milliseconds that a handler sleeps. Default: 0, it does nothing.
        rate: Jobs a second that arrive in the measure ``steady``, at least 1. Default: None, half of what the workers
            can drain.
        only: Names of the measures to take. Default: none, all of them.

    Raises:
        ConfigError: An option is out of its bounds.
    """

    dsn: str | None = None
    jobs: int = 20000
    concurrency: int = 20
    processes: int = 1
    producers: int = 8
    payload: int = 200
    sleep: int = 0
    rate: int | None = None
    only: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        for name in ("jobs", "concurrency", "processes", "producers"):
            checks.whole(name, getattr(self, name), 1)
        checks.whole("sleep", self.sleep, 0)
        if self.rate is not None:
            checks.whole("rate", self.rate, 1)
        if self.payload not in PAYLOADS:
            raise ConfigError(f"payload={self.payload!r}: must be one of {', '.join(map(str, PAYLOADS))}")

    @property
    def singles(self) -> int:
        """How many jobs are enqueued one by one."""
        return max(1, self.jobs // 20)

    @property
    def tries(self) -> int:
        """How often an idle worker is woken."""
        return max(1, self.jobs // 200)
