"""Does a test fail without it? Asked of every condition that guards a statement on live jobs.

    python -m tests.mutations [STATEMENT ...] [--tests FILE ...]

Each mutation takes one condition out of a statement, in a copy of the package that comes before the checkout on the
import path, and runs the tests of that statement. "killed": a test failed, as it should. "survived": none did,
and a test is missing. "broken": the statement does not run at all any more, which proves nothing. The exit status is 1
unless all are killed. Takes some three minutes, and is no part of the test suite.
"""

from __future__ import annotations

import argparse
import collections.abc as cabc
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import typing as t
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from venturi import embedded

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("venturi/store/sql.py", "venturi/store/claiming_sql.py", "venturi/store/looking_sql.py")
"""The modules of the statements."""
LONGEST = 60
"""Seconds after which tests that still run count as failed."""
WORKERS, OPERATORS = "tests/test_guards.py", "tests/test_guards_operators.py"
EVERYTHING = (WORKERS, OPERATORS, "tests/test_model.py", "tests/test_tiers.py")
BROKEN = re.compile(r"psycopg\.(ProgrammingError|errors\.(SyntaxError|Undefined|Ambiguous|Indeterminate|Datatype))")

TESTS: dict[str, tuple[str, str]] = {
    "CLAIM": (WORKERS, "claim"),
    "NEXT_DUE": (WORKERS, "next_due"),
    "STRAYS": (WORKERS, "stray"),
    "SETTLE": (WORKERS, "settle or recover"),
    "RENEW": (WORKERS, "renewal"),
    "EXPIRED": (WORKERS, "lost or request"),
    "PRUNE_WORKERS": (WORKERS, "silent"),
    "LEFT": (WORKERS, "silent"),
    "CANDIDATES": (OPERATORS, "merge"),
    "MERGE": (OPERATORS, "merge"),
    "CANCEL_PENDING": (OPERATORS, "cancel"),
    "CANCEL_CLAIMED": (OPERATORS, "cancel or end"),
    "TOLD": (OPERATORS, "told"),
    "SWEEP_CANCELS": (OPERATORS, "told or request"),
    "REQUEUE": (OPERATORS, "requeue"),
    "CLEANUP": (OPERATORS, "cleanup"),
}
"""The tests of each statement: a file, and what their names hold."""


class Mutation(t.NamedTuple):
    """One condition less.

    Attributes:
        statement: The constant.
        guard: The condition, in words.
        old: Its text, which is in the statement exactly once.
        new: What stands there instead.
        same: Why nothing can tell the difference, for a condition that only says again what holds already.
    """

    statement: str
    guard: str
    old: str
    new: str
    same: str = ""


CHANGED = "a row that has changed since the snapshot has another ctid, which the update does not find"

MUTATIONS = [
    Mutation("CLAIM", "kind", "l.kind = a.kind AND l.priority", "l.priority"),
    Mutation("CLAIM", "tier", "AND l.priority = a.tier AND", "AND"),
    Mutation("CLAIM", "mark", "AND l.visible_at >= {first}", ""),
    Mutation("CLAIM", "due", "AND l.visible_at <= {last}", ""),
    Mutation("CLAIM", "unclaimed", "AND l.owner IS NULL\n      ORDER BY", "\n      ORDER BY"),
    Mutation("CLAIM", "many: own tier", "PARTITION BY a.tier ORDER", "ORDER"),
    Mutation("CLAIM", "many: near lanes", "HAVING min(place) <= room", ""),
    Mutation("CLAIM", "room", "taken <= room", "taken <= room + 100"),
    Mutation("CLAIM", "count", "visible_at LIMIT %s)", "visible_at LIMIT %s + 100)"),
    Mutation("CLAIM", "chosen", "r.ctid = c.tid AND", ""),
    Mutation("CLAIM", "still unclaimed", "AND r.owner IS NULL", "", CHANGED),
    Mutation("CLAIM", "still due", "AND r.visible_at <=", "AND timestamptz '-infinity' <=", CHANGED),
    Mutation("CLAIM", "SKIP LOCKED", "FOR UPDATE SKIP LOCKED", "FOR UPDATE"),
    Mutation("CLAIM", "own body", "WHERE j.id = c.id", ""),
    Mutation("STRAYS", "kind", "l.kind = a.kind AND", ""),
    Mutation("STRAYS", "tier", "AND l.priority = a.tier", ""),
    Mutation("STRAYS", "owner", "s.owner = %s", "%s::uuid IS NOT NULL AND s.owner IS NOT NULL"),
    Mutation("STRAYS", "known", "k.id = s.id AND k.run", "k.run"),
    Mutation("STRAYS", "known run", "AND k.run = s.run_count", ""),
    Mutation("NEXT_DUE", "kind", "l.kind = a.kind AND", ""),
    Mutation("NEXT_DUE", "tier", "AND l.priority = a.tier", ""),
    Mutation("NEXT_DUE", "unclaimed", "AND l.owner IS NULL", ""),
    Mutation("SETTLE", "id", "WHERE r.id = g.id AND r.run_count = g.run AND r.owner = g.owner\n         AND",
             "WHERE r.run_count = g.run AND r.owner = g.owner\n         AND"),
    Mutation("SETTLE", "run", "AND r.run_count = g.run AND r.owner = g.owner\n         AND",
             "AND r.owner = g.owner\n         AND"),
    Mutation("SETTLE", "owner", "AND r.owner = g.owner\n         AND", "AND"),
    Mutation("SETTLE", "lease", "AND (NOT %s::bool OR r.lease_until < {now})\n       LIMIT",
             "AND %s::bool IS NOT NULL\n       LIMIT"),
    Mutation("SETTLE", "SKIP LOCKED", "FOR UPDATE SKIP LOCKED", "FOR UPDATE"),
    Mutation("SETTLE", "deleted rows", "WHERE r.ctid = ANY (ARRAY(SELECT tid FROM held WHERE outcome IN (0, 3, 7)))",
             ""),
    Mutation("SETTLE", "deleted outcomes", "held WHERE outcome IN (0, 3, 7)", "held"),
    Mutation("SETTLE", "updated rows", "WHERE r.ctid = h.tid AND", "WHERE"),
    Mutation("SETTLE", "updated outcomes", "AND h.outcome IN (1, 2, 4, 5)", "",
             "a row that the same statement has deleted is not updated"),
    Mutation("SETTLE", "failures", "WHEN g.outcome IN (2, 3, 4)", "WHEN g.outcome IN (2, 3, 4, 5)"),
    Mutation("SETTLE", "what was changed", "FROM held WHERE id IN (SELECT id FROM gone UNION ALL SELECT id FROM again)",
             "FROM held"),
    Mutation("SETTLE", "dead only", "FROM ended WHERE outcome = 3", "FROM ended"),
    Mutation("SETTLE", "ours: id", "WHERE r.id = g.id AND r.run_count = g.run AND r.owner = g.owner AND (",
             "WHERE r.run_count = g.run AND r.owner = g.owner AND ("),
    Mutation("SETTLE", "ours: run", "AND r.run_count = g.run AND r.owner = g.owner AND (",
             "AND r.owner = g.owner AND ("),
    Mutation("SETTLE", "ours: owner", "AND r.owner = g.owner AND (", "AND ("),
    Mutation("SETTLE", "ours: lease", "AND (NOT %s::bool OR r.lease_until < {now})\n     LIMIT",
             "AND %s::bool IS NOT NULL\n     LIMIT"),
    Mutation("SETTLE", "done: job", "e.job_id = g.id AND", ""),
    Mutation("SETTLE", "done: run", "e.run_no = g.run AND", ""),
    Mutation("SETTLE", "done: worker", "e.worker = g.owner AND", ""),
    Mutation("SETTLE", "done: outcome", "AND e.outcome = g.outcome", ""),
    Mutation("SETTLE", "unsettled only", "WHERE NOT EXISTS (SELECT FROM ended e WHERE e.n = g.n)", ""),
    Mutation("RENEW", "id", "WHERE r.id = g.id AND r.run_count = g.run AND r.owner = %s LIMIT 1 FOR",
             "WHERE r.run_count = g.run AND r.owner = %s LIMIT 1 FOR"),
    Mutation("RENEW", "run", "AND r.run_count = g.run AND r.owner = %s LIMIT 1 FOR", "AND r.owner = %s LIMIT 1 FOR"),
    Mutation("RENEW", "owner", "AND r.owner = %s LIMIT 1 FOR",
             "AND %s::uuid IS NOT NULL AND r.owner IS NOT NULL LIMIT 1 FOR"),
    Mutation("RENEW", "SKIP LOCKED", "FOR UPDATE SKIP LOCKED", "FOR UPDATE"),
    Mutation("RENEW", "renewed rows", "WHERE r.ctid = ANY (ARRAY(SELECT tid FROM held))", "WHERE r.owner IS NOT NULL"),
    Mutation("RENEW", "ours: id", "WHERE r.id = g.id AND r.run_count = g.run AND r.owner = %s LIMIT 1) o",
             "WHERE r.run_count = g.run AND r.owner = %s LIMIT 1) o"),
    Mutation("RENEW", "ours: run", "AND r.run_count = g.run AND r.owner = %s LIMIT 1) o",
             "AND r.owner = %s LIMIT 1) o"),
    Mutation("RENEW", "ours: owner", "AND r.owner = %s LIMIT 1) o", "AND %s::uuid IS NOT NULL LIMIT 1) o"),
    Mutation("EXPIRED", "lane", "WHERE l.kind = a.kind AND l.priority = a.priority", ""),
    Mutation("EXPIRED", "lease", "WHERE e.lease_until < {now}", "WHERE e.owner IS NOT NULL"),
    Mutation("EXPIRED", "batch", "ORDER BY e.lease_until LIMIT %s", "ORDER BY e.lease_until LIMIT %s + 100"),
    Mutation("EXPIRED", "request: job", "c.job_id = h.id AND", ""),
    Mutation("EXPIRED", "request: run", "AND c.run_count <= h.run_count", ""),
    Mutation("PRUNE_WORKERS", "silence", "WHERE seen_at < {now} - 10 * lease", ""),
    Mutation("PRUNE_WORKERS", "SKIP LOCKED", "FOR UPDATE SKIP LOCKED", "FOR UPDATE"),
    Mutation("PRUNE_WORKERS", "rows", "WHERE ctid = ANY (ARRAY(", "WHERE 1 > 0 OR ctid = ANY (ARRAY("),
    Mutation("LEFT", "id", "WHERE id = %s", "WHERE %s::uuid IS NOT NULL"),
    Mutation("CANDIDATES", "kind", "l.kind = k.kind AND", ""),
    Mutation("CANDIDATES", "key", "AND l.dedup_key = k.key", ""),
    Mutation("CANDIDATES", "unclaimed", "AND l.owner IS NULL", ""),
    Mutation("CANDIDATES", "passed over", "AND l.id <> ALL (%s::uuid[])", "AND %s::uuid[] IS NOT NULL"),
    Mutation("CANDIDATES", "own body", "ON b.id = l.id", "ON true"),
    Mutation("CANDIDATES", "oldest", "ORDER BY b.created_at, l.id LIMIT", "ORDER BY b.created_at DESC LIMIT"),
    Mutation("CANDIDATES", "FOR UPDATE", "\n      FOR UPDATE)", ")"),
    Mutation("MERGE", "body", "WHERE b.ctid = g.body_tid", ""),
    Mutation("MERGE", "live row", "WHERE l.ctid = g.live_tid", ""),
    Mutation("CANCEL_PENDING", "id", "l.id = %s AND", "%s::uuid IS NOT NULL AND"),
    Mutation("CANCEL_PENDING", "unclaimed", "AND l.owner IS NULL", ""),
    Mutation("CANCEL_CLAIMED", "id", "l.id = %s AND", "%s::uuid IS NOT NULL AND"),
    Mutation("CANCEL_CLAIMED", "claimed", "AND l.owner IS NOT NULL", ""),
    Mutation("TOLD", "job", "WHERE c.job_id = ANY (%s::uuid[])", "WHERE %s::uuid[] IS NOT NULL"),
    Mutation("SWEEP_CANCELS", "id", "r.id = a.job_id AND r.owner", "r.owner"),
    Mutation("SWEEP_CANCELS", "unclaimed", "AND r.owner IS NULL", ""),
    Mutation("SWEEP_CANCELS", "SKIP LOCKED", "FOR UPDATE SKIP LOCKED", "FOR UPDATE"),
    Mutation("SWEEP_CANCELS", "rows", "WHERE r.ctid = ANY (ARRAY(SELECT tid FROM held))", ""),
    Mutation("SWEEP_CANCELS", "done with: cancelled", "a.job_id IN (SELECT id FROM gone)\n       OR", ""),
    Mutation("SWEEP_CANCELS", "done with: ended", "OR NOT EXISTS (SELECT FROM {q}.live r WHERE r.id = a.job_id)", ""),
    Mutation("SWEEP_CANCELS", "not done with", "WHERE r.id = a.job_id))", "WHERE false))"),
    Mutation("REQUEUE", "id", "(%s::uuid IS NULL OR x.id = %s)", "(%s::uuid IS NULL OR %s::uuid IS NOT NULL)"),
    Mutation("REQUEUE", "kind", "(%s::text[] IS NULL OR x.kind = ANY (%s))",
             "(%s::text[] IS NULL OR %s::text[] IS NOT NULL)"),
    Mutation("REQUEUE", "oldest", "ORDER BY x.died_at LIMIT", "ORDER BY x.died_at DESC LIMIT"),
    Mutation("REQUEUE", "limit", "x.died_at LIMIT %s", "x.died_at LIMIT %s + 100"),
    Mutation("REQUEUE", "SKIP LOCKED", "FOR UPDATE SKIP LOCKED", "FOR UPDATE"),
    Mutation("REQUEUE", "rows", "WHERE d.id = ANY (ARRAY(", "WHERE 1 > 0 OR d.id = ANY (ARRAY("),
    Mutation("REQUEUE", "own body", "WHERE b.id = r.id", ""),
    Mutation("REQUEUE", "own requests", "WHERE c.job_id IN (SELECT id FROM hot)", ""),
    Mutation("CLEANUP", "status", "AND o.outcome = ANY (%s::smallint[])", "AND %s::smallint[] IS NOT NULL"),
    Mutation("CLEANUP", "before", "AND o.recorded_at < %s", "AND %s::timestamptz IS NOT NULL"),
    Mutation("CLEANUP", "kind", "(%s::text[] IS NULL OR o.kind = ANY (%s))",
             "(%s::text[] IS NULL OR %s::text[] IS NOT NULL)"),
    Mutation("CLEANUP", "finished", "NOT EXISTS (SELECT FROM {q}.live l WHERE l.id = e.job_id OFFSET 0)", "true"),
    Mutation("CLEANUP", "last end", "AND n.id > e.id AND n.outcome IN (0, 3, 7, 8) OFFSET 0)", "AND false)"),
    Mutation("CLEANUP", "limit", "LIMIT %s", "LIMIT %s + 100"),
    Mutation("CLEANUP", "oldest first", "ORDER BY o.recorded_at", "ORDER BY o.recorded_at DESC"),
    Mutation("CLEANUP", "body", "WHERE b.id = e.job_id LIMIT", "LIMIT"),
    Mutation("CLEANUP", "grave", "WHERE e.outcome <> 3 OR g.held", ""),
    Mutation("CLEANUP", "own grave", "AND d.id = e.job_id LIMIT 1", "LIMIT 1"),
    Mutation("CLEANUP", "held grave", "FOR UPDATE SKIP LOCKED) g", ") g"),
    Mutation("CLEANUP", "SKIP LOCKED", "FOR UPDATE SKIP LOCKED) j", "FOR UPDATE) j"),
    Mutation("CLEANUP", "doomed bodies", "WHERE b.id = ANY (ARRAY(SELECT id FROM doomed))", ""),
    Mutation("CLEANUP", "doomed entries", "WHERE e.job_id = ANY (ARRAY(SELECT id FROM doomed))", ""),
    Mutation("CLEANUP", "doomed graves", "WHERE d.id = ANY (ARRAY(SELECT id FROM doomed))", ""),
]  # fmt: skip


Sources: t.TypeAlias = dict[str, str]
"""The text of each module of statements."""


def statement(source: str, name: str) -> re.Match[str] | None:
    """Where a module has the statement, as group 1."""
    plain = re.search(rf'^{name} = "(?:"")?(.*?)"(?:"")?$', source, re.DOTALL | re.MULTILINE)
    # Or one that is put together, and its variants.
    made = rf"^(def _{name.lower()}\(.*^{name}_\w+ = .*?)^\n"
    return plain or re.search(made, source, re.DOTALL | re.MULTILINE)


def mutated(sources: Sources, mutation: Mutation) -> Sources:
    """The modules without the condition.

    Raises:
        SystemExit: Its text is no longer in the statement, or more than once.
    """
    trouble = "no such statement"
    for module, source in sources.items():
        if found := statement(source, mutation.statement):
            if found[1].count(mutation.old) == 1:
                text = found[1].replace(mutation.old, mutation.new)
                return sources | {module: source[: found.start(1)] + text + source[found.end(1) :]}
            trouble = f"it is there {found[1].count(mutation.old)} times"
    raise SystemExit(f"{mutation.statement}, {mutation.guard}: {trouble}: {mutation.old!r}")


class Place(t.NamedTuple):
    """Where one mutation is tested at a time: a copy of the package, and a server."""

    folder: str
    dsn: str

    def test(self, sources: Sources, *arguments: str) -> tuple[int, str]:
        """Run tests with these modules of statements; exit status and output."""
        for module, source in sources.items():
            Path(self.folder, module).write_text(source)
        environment = os.environ | {
            "PYTHONPATH": self.folder, "PYTHONDONTWRITEBYTECODE": "1", "VENTURI_TEST_DATABASE_URL": self.dsn,
        }  # fmt: skip
        command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "--tb=short", *arguments]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST
            )
        except subprocess.TimeoutExpired:
            return 1, "the tests did not end"
        return done.returncode, done.stdout + done.stderr


@contextlib.contextmanager
def place() -> cabc.Generator[Place]:
    """A place for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="venturi-mutation-") as folder, embedded.server() as server:
        for name in ("venturi", "migrations"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        yield Place(folder, server.dsn)


def verdict(place: Place, sources: Sources, mutation: Mutation, tests: cabc.Sequence[str]) -> str:
    """What became of one mutation."""
    file, names = TESTS[mutation.statement]
    for arguments in [(*tests,)] if tests else [(file, "-k", names), EVERYTHING]:
        status, output = place.test(mutated(sources, mutation), *arguments)
        if status not in (0, 1) or BROKEN.search(output):
            return f"broken\n{output}"
        if status == 1:
            return "killed"
    return "survived"


def judged(sources: Sources, mutations: cabc.Sequence[Mutation], tests: cabc.Sequence[str], places: list[Place]) -> int:
    """Judge at several places at once; how many are not killed."""
    free: SimpleQueue[Place] = SimpleQueue()
    for place in places:
        free.put(place)

    def judge(mutation: Mutation) -> str:
        place = free.get()
        try:
            return verdict(place, sources, mutation, tests)
        finally:
            free.put(place)

    bad = 0
    with ThreadPoolExecutor(len(places)) as pool:
        for mutation, answer in zip(mutations, pool.map(judge, mutations), strict=True):
            expected = answer == "survived" and mutation.same
            bad += answer != "killed" and not expected
            reason = f", as it must: {mutation.same}" if expected else ""
            print(f"{mutation.statement:15} {mutation.guard:22} {answer}{reason}", flush=True)
    return bad


def main() -> int:
    """Judge the mutations; the exit status."""
    parser = argparse.ArgumentParser(description="Does a test fail without this condition?")
    parser.add_argument("statements", nargs="*", metavar="STATEMENT", help="only these, such as SETTLE")
    parser.add_argument("--tests", nargs="+", default=[], metavar="FILE", help="these tests, not each statement's own")
    given = parser.parse_args()
    sources = {module: (ROOT / module).read_text() for module in MODULES}
    for mutation in MUTATIONS:
        mutated(sources, mutation)
    chosen = [mutation for mutation in MUTATIONS if not given.statements or mutation.statement in given.statements]
    with place() as one, place() as two:
        status, output = one.test(sources, *(given.tests or EVERYTHING[:2]))
        if status:
            raise SystemExit(f"the tests fail without any mutation:\n{output}")
        bad = judged(sources, chosen, given.tests, [one, two])
    print(f"{len(chosen)} mutations, {bad} to be looked at")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
