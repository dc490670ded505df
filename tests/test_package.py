"""The package as it is built, installed and imported."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
import typing as t
import zipfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import venturi
import venturi.errors
import venturi.outcome
import venturi.values

ROOT = Path(__file__).parent.parent
PACKAGE = Path(venturi.__file__).parent

LAYERS = (
    ("backoff", "checks", "errors", "ids", "log", "outcome", "text", "values"),
    ("_forms", "carry", "codec", "context", "registry", "task"),
    ("store",),
    ("telemetry",),
    ("enqueuing", "merging", "operating", "queue"),
    ("worker",),
    ("__main__", "bench", "cli", "demo", "embedded", "testing"),
)
RANKS = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
TOP = len(LAYERS) - 1

NOT_IMPORTED = (
    "flask",
    "opentelemetry.sdk",
    "pytest",
    "rich",
    "venturi.bench",
    "venturi.cli",
    "venturi.demo",
    "venturi.embedded",
    "venturi.testing",
    "yoyo",
)

PROBE = """
import json, logging, os, signal, sys, threading, warnings

WATCHED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.putenv", "_thread.start_new_thread")
events = []
sys.addaudithook(lambda event, arguments: event.startswith(WATCHED) and events.append(event))

def state():
    return {
        "threads": [thread.name for thread in threading.enumerate()],
        "signals": {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "logging": [logging.root.level, logging.root.disabled, repr(logging.root.handlers), repr(logging.lastResort)],
        "warnings": repr(warnings.filters),
        "environment": dict(os.environ),
        "hooks": [repr(sys.excepthook), repr(threading.excepthook)],
    }

before = state()
%s
after = state()
changes = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
print(json.dumps({"changes": changes, "events": events, "modules": sorted(sys.modules)}))
"""

FIRST_USE = """
import venturi

@venturi.task("mail.welcome", priority=venturi.Priority.HIGH)
class Welcome:
    user_id: int

@venturi.handler(cap=4)
def welcome(task: Welcome) -> None: ...

venturi.Queue("billing", dsn="host=192.0.2.1")
"""


EVERYTHING = """
import importlib, pkgutil, venturi

for module in pkgutil.walk_packages(venturi.__path__, "venturi."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@attrs.frozen
class Import:
    """An import statement: the full name, and whether it waits for a call or serves the type checker alone."""

    name: str
    deferred: bool

    @property
    def room(self) -> str:
        return self.name.split(".")[1]


def probe(statements: str) -> dict[str, t.Any]:
    """What the statements change in a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", PROBE % statements], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    report: dict[str, t.Any] = json.loads(result.stdout)
    return report


def build(target: str, source: Path, folder: Path) -> Path:
    """The wheel or sdist that the build backend makes of a source tree, without network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    (built,) = folder.iterdir()
    return built


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def modules() -> Iterator[tuple[str, str]]:
    """The dotted name and the source of every module of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts), path.read_text()


def imports(module: str, node: ast.AST, deferred: bool = False) -> Iterator[Import]:
    """The imports from venturi below a node of a module's syntax tree."""
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, deferred) for alias in node.names if alias.name.startswith("venturi."))
        yield from (Import("venturi.", deferred) for alias in node.names if alias.name == "venturi")
    elif isinstance(node, ast.ImportFrom):
        package = module.rpartition(".")[0]
        origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        if origin == "venturi":
            yield from (Import(f"venturi.{alias.name}", deferred) for alias in node.names)
        elif origin.startswith("venturi."):
            yield Import(origin, deferred)
    deferred = (
        deferred
        or isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    )
    for child in ast.iter_child_nodes(node):
        yield from imports(module, child, deferred)


def wrong_imports(module: str, source: str) -> list[str]:
    """The imports of a module that point up the layers; what is no layer is the package itself, above them all."""
    room = module.split(".")[1]
    rank = RANKS["worker"] if room == "__init__" else RANKS[room]
    return [
        f"{module} imports {found.name}"
        for found in imports(module, ast.parse(source))
        if RANKS.get(found.room, TOP) > rank and not (found.deferred and (room, found.room) == ("queue", "worker"))
    ]


@pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="outside tox the checkout itself may be under test")
def test_the_installed_package_is_the_one_under_test() -> None:
    """Under tox the tests import the built wheel and never the checkout."""
    assert PACKAGE != ROOT / "venturi"
    assert ROOT not in map(Path, sys.path)


def test_the_wheel_holds_the_migrations_and_the_typing_marker(tmp_path: Path) -> None:
    """An installed wheel needs no checkout to migrate, and type checkers trust its annotations."""
    migrations = {f"venturi/migrations/{path.name}" for path in (ROOT / "migrations").glob("*.sql")}
    assert migrations
    assert names_in(build("wheel", ROOT, tmp_path)) >= migrations | {"venturi/py.typed"}


def test_a_wheel_built_from_the_sdist_holds_the_same_files(tmp_path: Path) -> None:
    """What is published as source is complete."""
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    subprocess.run([sys.executable, "-m", "tarfile", "--extract", sdist, tmp_path / "source"], timeout=60, check=True)
    (source,) = (tmp_path / "source").iterdir()
    from_sdist = build("wheel", source, tmp_path / "from_sdist")
    assert names_in(from_sdist) == names_in(build("wheel", ROOT, tmp_path / "from_tree"))


@pytest.mark.conformance(22)
@pytest.mark.parametrize("statements", [FIRST_USE, EVERYTHING], ids=["first use", "every module"])
def test_importing_and_declaring_have_no_side_effects(statements: str) -> None:
    """Import, task, handler and Queue start and open nothing, and leave the process's settings as they were.

    Case 035.
    """
    report = probe(statements)
    assert report["changes"] == {}
    assert report["events"] == []


def test_importing_loads_nothing_that_only_some_programs_need() -> None:
    """A producer pays for neither migrations, displays, servers nor the telemetry SDK."""
    loaded = probe("import venturi")["modules"]
    assert [name for name in NOT_IMPORTED if name in loaded] == []


@pytest.mark.conformance(247)
def test_every_public_name_imports_from_the_package() -> None:
    """The package's names are its sorted __all__, and hold every public error, value and outcome."""
    public = {
        name
        for name, value in vars(venturi).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(venturi.__all__)
    assert venturi.__all__ == sorted(venturi.__all__)
    for module in (venturi.errors, venturi.outcome, venturi.values):
        assert public >= set(module.__all__), module.__name__


@pytest.mark.conformance(247)
def test_imports_follow_the_layers() -> None:
    """No module imports one of a layer above it, but for the queue's work(), which builds a worker when called."""
    assert [problem for module, source in modules() for problem in wrong_imports(module, source)] == []


def test_nothing_reads_the_wall_clock() -> None:
    """Waits, deadlines and leases go by the monotonic clock; only ids look at the other one (case 093)."""
    wall = re.compile(r"time\.(time|time_ns|localtime|gmtime)\(|datetime\.(now|utcnow|today)\(|date\.today\(")
    read = {module for module, source in modules() if wall.search(source)}
    assert read == {"venturi.ids"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("venturi.store.sql", "import venturi.queue"),
        ("venturi.store.sql", "from ..worker import slots"),
        ("venturi.task", "def late():\n    from venturi.store import sql"),
        ("venturi.queue", "from venturi.worker import Worker"),
        ("venturi.codec", "from venturi import Queue"),
        ("venturi.codec", "import venturi"),
        ("venturi.__init__", "from venturi import testing"),
    ],
)
def test_an_import_against_the_layers_is_found(module: str, source: str) -> None:
    """The check of the layers sees each form of import."""
    assert len(wrong_imports(module, source)) == 1


@pytest.mark.conformance(247)
def test_the_store_imports_without_worker_or_registry() -> None:
    """Whoever writes a worker of their own gets the store without what lies above it or beside it."""
    probe(
        f"""
import importlib, pkgutil, types
package = types.ModuleType("venturi")  # without running the real one, which imports everything
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["venturi"] = package
for room in ("context", "queue", "registry", "task", "worker"):
    sys.modules["venturi." + room] = None  # an import of it fails
store = importlib.import_module("venturi.store")
for module in pkgutil.walk_packages(store.__path__, "venturi.store."):
    importlib.import_module(module.name)
"""
    )


def test_continuous_integration_runs_what_the_readme_says() -> None:
    """The README's "Test it" block and .ci/run are the same commands."""
    block = re.search(r"Test it.*?```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md has no sh block under Test it"
    script = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert [line for line in block[1].splitlines() if line not in script] == []


def test_no_page_names_the_other_distribution() -> None:
    """The name venturi on the package index is somebody else's; ours is venturi-queue."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *PACKAGE.rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert [
        page.name for page in pages if re.search(r"pip install[^&;|\n]*\bventuri\b(?!-queue)", page.read_text())
    ] == []
