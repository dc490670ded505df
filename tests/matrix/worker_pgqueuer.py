"""pgqueuer: retries by DatabaseRetryEntrypointExecutor, failed jobs held, a pool, restarts by its own supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import importlib
import json
import typing as t

from matrix.adapter import CONCURRENCY, RUNS, Deeds, main

# They are not installed where this project is checked.
asyncpg: t.Any = importlib.import_module("asyncpg")
pgqueuer: t.Any = importlib.import_module("pgqueuer")

WAYS = ("raise", "skip", "update_priority")
"""What it can do with a duplicate."""


class Adapter:
    def install(self, dsn: str) -> str:
        asyncio.run(self._with_queries(dsn, lambda queries: queries.install()))
        return str(pgqueuer.__version__)

    def enqueue(self, dsn: str, act: str, seconds: float, count: int) -> list[str]:
        payload = json.dumps({"act": act, "seconds": seconds}).encode()
        many = ["deed"] * count, [payload] * count, [0] * count
        return [str(id) for id in asyncio.run(self._with_queries(dsn, lambda queries: queries.enqueue(*many)))]

    async def _with_queries(self, dsn: str, use: t.Callable[[t.Any], t.Awaitable[t.Any]]) -> t.Any:
        connection = await asyncpg.connect(dsn)
        try:
            return await use(pgqueuer.Queries(pgqueuer.AsyncpgDriver(connection)))
        finally:
            await connection.close()

    def work(self, dsn: str, deeds: Deeds, stale: float) -> None:
        asyncio.run(
            pgqueuer.run(
                functools.partial(self._manager, dsn, deeds),
                dequeue_timeout=dt.timedelta(seconds=1),
                heartbeat_timeout=dt.timedelta(seconds=stale),
                batch_size=CONCURRENCY // 2,  # its concurrency is at least twice the batch
                max_concurrent_tasks=CONCURRENCY,
                shutdown_on_listener_failure=True,
                restart_on_failure=True,
                restart_delay=dt.timedelta(seconds=1),
            )
        )

    @contextlib.asynccontextmanager
    async def _manager(self, dsn: str, deeds: Deeds) -> t.AsyncGenerator[t.Any]:
        async def deed(job: t.Any) -> None:
            # Its documentation sends blocking code to a thread.
            await asyncio.to_thread(lambda: deeds.perform(job.id, **json.loads(job.payload)))

        # It takes a single connection as well, but that one is not opened again when it is lost.
        async with asyncpg.create_pool(dsn, min_size=2, max_size=CONCURRENCY) as pool:
            manager = pgqueuer.PgQueuer(pgqueuer.AsyncpgPoolDriver(pool))
            retrying = functools.partial(
                pgqueuer.DatabaseRetryEntrypointExecutor,
                max_attempts=RUNS - 1,
                initial_delay=dt.timedelta(seconds=1),
            )
            manager.entrypoint("deed", on_failure="hold", executor_factory=retrying)(deed)
            yield manager

    def duplicate(self, dsn: str) -> dict[str, str]:
        return {f"on_conflict={way!r}": asyncio.run(self._duplicate(dsn, way)) for way in WAYS}

    async def _duplicate(self, dsn: str, way: str) -> str:
        await self._with_queries(dsn, lambda queries: queries.enqueue("keyed", b"", 0, dedupe_key=way))
        connection = await asyncpg.connect(dsn)
        transaction = connection.transaction()
        await transaction.start()
        queries = pgqueuer.Queries(pgqueuer.AsyncpgDriver(connection))
        try:
            await queries.enqueue("keyed", b"", 0, dedupe_key=way, on_conflict=way)
            enqueued = "no error"
        except pgqueuer.errors.DuplicateJobError:
            enqueued = "DuplicateJobError"
        try:
            await connection.execute("SELECT 1")
        except asyncpg.InFailedSQLTransactionError:
            return f"{enqueued}, transaction aborted"
        return f"{enqueued}, transaction usable"


if __name__ == "__main__":
    main(Adapter())
