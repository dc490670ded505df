"""venturi: every option that is not given here has its default."""

from __future__ import annotations

import pathlib
import tomllib

import psycopg
from matrix.adapter import CONCURRENCY, RUNS, Deeds, main

import venturi


@venturi.task("deed")
class Deed:
    act: str
    seconds: float


@venturi.task("keyed")
class Keyed:
    key: str

    def dedup_key(self) -> str:
        return self.key


class Adapter:
    def install(self, dsn: str) -> str:
        venturi.Queue(dsn=dsn).migrate()
        # The checkout's: it need not be installed.
        project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        return str(project["version"])

    def enqueue(self, dsn: str, act: str, seconds: float, count: int) -> list[str]:
        queue: venturi.Queue = venturi.Queue(dsn=dsn)
        return [str(receipt.id) for receipt in queue.enqueue_many(Deed(act, seconds) for _ in range(count))]

    def work(self, dsn: str, deeds: Deeds, stale: float) -> None:
        queue: venturi.Queue = venturi.Queue(dsn=dsn)

        @queue.handler
        def deed(task: Deed, ctx: venturi.Context) -> None:
            deeds.perform(ctx.id, task.act, task.seconds)

        queue.work(concurrency=CONCURRENCY, lease=stale, poll=1, backstop=RUNS)

    def duplicate(self, dsn: str) -> dict[str, str]:
        queue: venturi.Queue = venturi.Queue(dsn=dsn)
        queue.enqueue(Keyed("k"))
        with psycopg.connect(dsn) as connection:
            receipt = queue.enqueue(Keyed("k"), conn=connection)
            connection.execute("SELECT 1")
        return {"conn=": f"{receipt.action}, transaction usable"}


if __name__ == "__main__":
    main(Adapter())
