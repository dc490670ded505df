"""What a journal that is partitioned by day would cost, measured on copies of it: the second part of ``retention``."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import datetime as dt
import time
import typing as t
import uuid

import attrs
import psycopg
from psycopg import sql

from venturi.ids import uuid7

from . import ground
from .ground import Site

__all__ = ["compared"]

COPIES = ((None, 30), (30, 30), (90, 90))
"""Partitions, or None for none, and over how many days the entries are spread."""

_LIKE = """
CREATE TABLE {table} (LIKE {q}.journal INCLUDING DEFAULTS INCLUDING IDENTITY INCLUDING CONSTRAINTS) {partitioned};
ALTER TABLE {table} ADD PRIMARY KEY ({key});
CREATE INDEX ON {table} (recorded_at) WHERE outcome IN (0, 3, 7);"""

_DAY = "CREATE TABLE {part} PARTITION OF {table} FOR VALUES FROM ({first}) TO ({last})"

_ENTRIES = """
INSERT INTO {table} (job_id, run_no, failure_count, recorded_at, outcome, kind, worker, duration)
SELECT ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 1, 0,
       {today}::timestamptz - {days} * interval '1 day' + n * {days} * interval '1 day' / {count}, 0, 'growth.step0',
       '00000000-0000-4000-8000-000000000000', interval '1 ms'
  FROM generate_series(0, {count} - 1) n"""

# What a settle does to the journal: it looks for an entry of an earlier try, and writes its own.
_LOOK = """
SELECT g.id, d.there FROM unnest(%s::uuid[]) g(id) LEFT JOIN LATERAL (
  SELECT true AS there FROM {table} e WHERE e.job_id = g.id AND e.run_no = 1 AND e.outcome = 0 LIMIT 1) d ON true"""
_WRITE = """
INSERT INTO {table} (job_id, run_no, failure_count, recorded_at, outcome, kind, worker, duration)
SELECT id, 1, 0, statement_timestamp(), 0, 'growth.step0', '00000000-0000-4000-8000-000000000000', interval '1 ms'
  FROM unnest(%s::uuid[]) g(id)"""

_FIND = "SELECT * FROM {table} WHERE job_id = %s ORDER BY id DESC LIMIT 50"

_OLDEST = """
DELETE FROM {table} WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM {table} WHERE outcome IN (0, 3, 7) AND recorded_at < %s ORDER BY recorded_at LIMIT 1000))"""


@attrs.frozen
class Copy:
    """A copy of the journal.

    Attributes:
        days: Partitions of a day each, and one for today. None: it is not partitioned.
        count: Entries.
    """

    site: Site
    days: int | None
    count: int

    @property
    def table(self) -> sql.Identifier:
        return sql.Identifier(f"entries_{self.days or 'plain'}")

    def make(self, over: int) -> None:
        """Create and fill it, with entries of the last ``over`` days."""
        partitioned, key = ("PARTITION BY RANGE (recorded_at)", ", recorded_at") if self.days else ("", "")
        columns = sql.SQL("job_id, id" + key)
        self.site.ask(_LIKE, table=self.table, partitioned=sql.SQL(partitioned), key=columns)
        today = _today()
        for ago in range(-1, self.days or -1):
            first = today - dt.timedelta(days=ago + 1)
            last = sql.Literal(first + dt.timedelta(days=1))
            part = sql.Identifier(f"entries_{self.days}_{ago + 1}")
            self.site.ask(_DAY, part=part, table=self.table, first=sql.Literal(first), last=last)
        values = {"today": today, "days": over, "count": self.count}
        self.site.ask(_ENTRIES, table=self.table, **{name: sql.Literal(value) for name, value in values.items()})
        self.site.ready()

    def figures(self, over: int, batches: int) -> dict[str, object]:
        """Inserts, look-ups, and the end of the oldest day."""
        self.make(over)
        row: dict[str, object] = {"partitions": self.days or "none", "entries": self.count}
        row |= self.inserts(batches) | self.finds()
        return row | (self.drop() if self.days else self.delete(over))

    def inserts(self, batches: int) -> dict[str, object]:
        """Batches of 50 as a settle writes them, and its look for earlier entries of them."""
        with psycopg.connect(self.site.dsn, autocommit=True) as worker:
            write, look = (sql.SQL(text).format(table=self.table) for text in (_WRITE, _LOOK))
            writing = _timed(lambda: worker.execute(write, (_ids(50),), prepare=True), batches)
            looking = _timed(lambda: worker.execute(look, (_ids(50),), prepare=True), batches)
        return {"inserts/s": round(50 / writing), "write ms per 50": _ms(writing), "look-up ms per 50": _ms(looking)}

    def finds(self) -> dict[str, object]:
        """Planning and execution of the query for one job's entries, once in a new session and then prepared."""
        query = sql.SQL(_FIND).format(table=self.table)
        explain = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ") + query
        id_ = uuid.UUID(int=0x70008000000000000000 + self.count // 2)
        with psycopg.connect(self.site.dsn, autocommit=True) as reader:
            first = _explained(reader, explain, id_)
            again = _explained(reader, explain, id_)
            prepared = _timed(lambda: reader.execute(query, (id_,), prepare=True).fetchall(), 200)
        return {
            "first planning ms": first[0],
            "planning ms": again[0],
            "execution ms": again[1],
            "buffers": again[2],
            "prepared ms": _ms(prepared),
        }

    def drop(self) -> dict[str, object]:
        """The oldest day, by dropping its partition, and the next one, by detaching it first."""
        with self.ended() as figures:
            self.site.ask("DROP TABLE {part}", part=sql.Identifier(f"entries_{self.days}_{self.days}"))
        part = sql.Identifier(f"entries_{self.days}_{(self.days or 0) - 1}")
        begun = time.perf_counter()
        self.site.ask("ALTER TABLE {table} DETACH PARTITION {part} CONCURRENTLY", table=self.table, part=part)
        return figures | {"detach ms": _ms(time.perf_counter() - begun)}

    def delete(self, over: int) -> dict[str, object]:
        """The oldest day, a thousand at a time."""
        before, left = _today() - dt.timedelta(days=over - 1), 1
        with self.ended() as figures, psycopg.connect(self.site.dsn, autocommit=True) as cleaner:
            while left:
                left = cleaner.execute(sql.SQL(_OLDEST).format(table=self.table), (before,)).rowcount
        return figures

    @contextlib.contextmanager
    def ended(self) -> cabc.Generator[dict[str, object]]:
        """Time and write-ahead log of letting one day go."""
        figures: dict[str, object] = {}
        self.site.ask("CHECKPOINT")
        begun, position = time.perf_counter(), self.site.position()
        yield figures
        figures["one day gone ms"] = _ms(time.perf_counter() - begun)
        figures["one day gone WAL kB"] = (self.site.position() - position) >> 10


def _today() -> dt.datetime:
    return dt.datetime.now(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def _ids(count: int) -> list[uuid.UUID]:
    return [uuid7() for _ in range(count)]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def _timed(call: cabc.Callable[[], object], times: int) -> float:
    """Seconds of one call, out of so many or of those that ten seconds have time for."""
    begun = now = time.perf_counter()
    made = 0
    while made < times and now - begun < 10:
        call()
        made, now = made + 1, time.perf_counter()
    return (now - begun) / made


def _explained(reader: psycopg.Connection, explain: sql.Composed, id_: uuid.UUID) -> tuple[float, float, int]:
    row = reader.execute(explain, (id_,), prepare=False).fetchone()
    told: dict[str, t.Any] = row[0][0] if row else {}
    plan = told["Plan"]
    return told["Planning Time"], told["Execution Time"], plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def compared(site: Site, entries: int) -> list[dict[str, object]]:
    """The figures of each of `COPIES`, with so many entries."""
    rows: list[dict[str, object]] = []
    for days, over in COPIES:
        rows.append(Copy(site, days, entries).figures(over, 500))
        ground.show(rows[-1])
    return rows
