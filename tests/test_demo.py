"""The demo: it indexes whatever folder it is given, and goes on after a kill."""

from __future__ import annotations

import collections.abc as cabc
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import typing as t

import psycopg
import pytest
from fixtures.waiting import eventually

import venturi

PACKAGE = pathlib.Path(venturi.__file__).parent


class Demo:
    """Starts ``venturi demo`` on the tests' database."""

    def __init__(self, dsn: str, started: contextlib.ExitStack) -> None:
        self._dsn = dsn
        self._started = started

    def start(self, *arguments: str | os.PathLike[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "venturi", "demo", *arguments],
            env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "VENTURI_DATABASE_URL": self._dsn},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.enter_context(process)
        self._started.callback(process.kill)
        return process

    def run(self, *arguments: str | os.PathLike[str]) -> str:
        """What a demo writes that comes to its end."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        return out

    def done(self) -> int:
        """How many files are indexed."""
        with psycopg.connect(self._dsn) as connection:
            if connection.execute("SELECT to_regclass('venturi_demo_index.files')").fetchone() == (None,):
                return 0
            rows = connection.execute("SELECT count(lines) FROM venturi_demo_index.files").fetchall()
            return int(rows[0][0])

    def runs(self) -> list[tuple[t.Any, ...]]:
        """How often each file was completed."""
        with psycopg.connect(self._dsn) as connection:
            return connection.execute(
                "SELECT evidence->>'file', count(*) FROM venturi_demo.all_entries"
                " WHERE kind = 'demo.index' AND outcome = 'completed' GROUP BY 1"
            ).fetchall()


@pytest.fixture
def demo(dsn: str) -> cabc.Iterator[Demo]:
    """The demo, without anything of an earlier one."""
    drop = "DROP SCHEMA IF EXISTS venturi_demo, venturi_demo_index CASCADE"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(drop)
    with contextlib.ExitStack() as started:
        yield Demo(dsn, started)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(drop)


@pytest.fixture
def many(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of files that keep a demo busy for a second."""
    source = "".join(f"def f{n}(a, b):\n    return a + b * {n}\n" for n in range(20))
    for number in range(250):
        (tmp_path / f"m{number}.py").write_text(source)
    return tmp_path


def odd_folder(folder: pathlib.Path) -> None:
    """Fill a folder with what a demo may meet."""
    deep = folder / "a" / "b"
    deep.mkdir(parents=True)
    (folder / "good.py").write_text("def f(a):\n    return a\n\nasync def longest():\n    x = 1\n\n    return x\n")
    (folder / "empty.py").touch()
    (deep / "new\nline '; -- \x1b[31m.py").write_text("y = 1\n")
    (deep / "notes.txt").write_text("one\ntwo\n")
    (deep / "picture.png").write_bytes(b"\x89PNG\0\0\xff")
    pathlib.Path(os.fsdecode(os.fsencode(deep) + b"/\xff\xfe.py")).write_text("y = 2\n")
    (deep / "syntax.py").write_text("def (:\n")
    (deep / "coding.py").write_text("# coding: nonsense\n")
    (deep / "null.py").write_bytes(b"a = 1\0\n")
    (deep / "latin.txt").write_bytes("é".encode("latin-1"))
    (deep / "nested.py").write_text("x = " + "-" * 100_000 + "1")
    (deep / "huge.txt").write_bytes(b"x\n" * 2_000_000)
    (deep / "loop").symlink_to("..")
    (deep / "broken").symlink_to("nowhere")
    (folder / "link.py").symlink_to("good.py")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "good.pyc").touch()
    os.mkfifo(deep / "pipe")


def test_it_indexes_whatever_a_folder_holds(demo: Demo, tmp_path: pathlib.Path) -> None:
    """What can be read is counted, what cannot is dead with its reason, and links, pipes and caches are passed over."""
    odd_folder(tmp_path)
    out = demo.run(os.path.relpath(tmp_path))
    assert out.endswith("The index stays in the schemas venturi_demo and venturi_demo_index of this database\n")
    assert "6 files, 11 lines, 2 functions" in out
    assert re.search(r"4 lines  longest  in .*good\.py", out)
    dead = dict(re.findall(r"^  \S+/(\w+\.\w+): (\w+)", out, re.MULTILINE))
    assert dead.keys() == {"syntax.py", "coding.py", "null.py", "latin.txt", "nested.py", "huge.txt"}
    assert dead["latin.txt"] == "UnicodeDecodeError"
    assert "\x1b" not in out


def test_an_empty_folder_is_done_at_once_and_a_second_call_begins_anew(demo: Demo, tmp_path: pathlib.Path) -> None:
    """A complete index is dropped, and said to be."""
    assert "0 files, 0 lines" in demo.run(tmp_path)
    (tmp_path / "one.py").write_text("x = 1\n")
    again = demo.run(tmp_path)
    assert "dropping the index" in again
    assert "1 files, 1 lines" in again


@pytest.mark.slow
def test_a_killed_demo_goes_on_where_it_stopped(demo: Demo, many: pathlib.Path) -> None:
    """It says how much was done, runs no finished file again, and loses none."""
    process = demo.start(many, "--concurrency", "1")
    eventually(lambda: demo.done() >= 50, 30, what="some files are indexed")
    process.kill()
    process.wait()
    done = demo.done()
    assert done < 250
    out = demo.run(many)
    assert (told := re.search(r"^continuing: (\d+) of 250 files were done$", out, re.MULTILINE))
    assert done <= int(told[1]) <= done + 1
    assert "250 files, 10,000 lines, 5,000 functions" in out
    runs = demo.runs()
    assert len(runs) == 250
    assert {number for _, number in runs} == {1}


def test_an_interrupted_demo_says_how_to_go_on(demo: Demo, many: pathlib.Path) -> None:
    """Ctrl-C stops it in order; nothing is left claimed, so that the next one need not wait for a lease."""
    process = demo.start(many, "--concurrency", "1")
    eventually(lambda: demo.done() >= 10, 30, what="some files are indexed")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert "start the demo again to go on" in out
    assert "continuing" in demo.run(many)


def test_two_demos_share_one_folder_and_refuse_another(demo: Demo, many: pathlib.Path) -> None:
    """A second process works on the same index; nobody drops it while somebody is at work."""
    first = demo.start(many, "--concurrency", "1")
    eventually(demo.done, 30, what="the first one is at work")
    other = demo.start(PACKAGE)
    assert other.wait(30) == 1
    assert other.communicate()[1].startswith("venturi: another demo")
    assert "continuing" in demo.run(many)
    assert first.wait(30) == 0
