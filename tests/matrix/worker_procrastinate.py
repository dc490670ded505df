"""procrastinate: retries by RetryStrategy, stalled jobs by the periodic task that its documentation recommends."""

from __future__ import annotations

import asyncio
import importlib
import typing as t

import psycopg
from matrix.adapter import CONCURRENCY, RUNS, Deeds, main

# It is not installed where this project is checked.
procrastinate: t.Any = importlib.import_module("procrastinate")


def _app(dsn: str) -> t.Any:
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))


async def _retry_stalled_jobs(context: t.Any, timestamp: int) -> None:
    manager = context.app.job_manager
    for job in await manager.get_stalled_jobs(seconds_since_heartbeat=context.additional_context["stale"]):
        await manager.retry_job(job)


class Adapter:
    def install(self, dsn: str) -> str:
        with _app(dsn).open() as app:
            app.schema_manager.apply_schema()
        return str(procrastinate.__version__)

    def enqueue(self, dsn: str, act: str, seconds: float, count: int) -> list[str]:
        with _app(dsn).open() as app:
            deed = app.configure_task("deed")
            return [str(id) for id in deed.batch_defer(*[{"act": act, "seconds": seconds}] * count)]

    def work(self, dsn: str, deeds: Deeds, stale: float) -> None:
        asyncio.run(self._work(_app(dsn), deeds, stale))

    async def _work(self, app: t.Any, deeds: Deeds, stale: float) -> None:
        def deed(context: t.Any, act: str, seconds: float) -> None:
            deeds.perform(context.job.id, act, seconds)

        strategy = procrastinate.RetryStrategy(max_attempts=RUNS - 1, wait=1)
        app.task(name="deed", pass_context=True, retry=strategy)(deed)
        stalled = app.task(name="stalled", queueing_lock="stalled", pass_context=True)(_retry_stalled_jobs)
        app.periodic(cron="* * * * * *")(stalled)  # every second
        async with app.open_async():
            await app.run_worker_async(
                concurrency=CONCURRENCY,
                fetch_job_polling_interval=1,
                update_heartbeat_interval=stale / 3,
                stalled_worker_timeout=stale,
                additional_context={"stale": stale},
            )

    def duplicate(self, dsn: str) -> dict[str, str]:
        with _app(dsn).open() as app:
            app.configure_task("keyed", queueing_lock="k").defer()
            connection = psycopg.connect(dsn)
            try:
                app.configure_task("keyed", queueing_lock="k", connection=connection).defer()
                enqueued = "no error"
            except procrastinate.exceptions.AlreadyEnqueued:
                enqueued = "AlreadyEnqueued"
            return {"queueing_lock": f"{enqueued}, transaction {_state(connection)}"}


def _state(connection: psycopg.Connection) -> str:
    try:
        connection.execute("SELECT 1")
    except psycopg.errors.InFailedSqlTransaction:
        return "aborted"
    return "usable"


if __name__ == "__main__":
    main(Adapter())
