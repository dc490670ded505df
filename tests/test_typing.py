"""The types as users meet them: their right uses pass, and their mistakes are found before anything runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest

import venturi

pytest.importorskip("mypy", reason="the tox environment `typing` has the type checkers")

PACKAGE = Path(venturi.__file__).parent
FILES = Path(__file__).parent / "typing"

Finding: t.TypeAlias = tuple[str, int]
"""File name and line."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project: the two files, and no configuration of ours."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("ok.py", "bad.py"):
        shutil.copy(FILES / name, folder)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    return folder


def check(project: Path, *command: str) -> str:
    """What a checker prints; packages are found where this process finds them."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # pyright asks the first python there
        "PYTHONPATH": str(PACKAGE.parent),
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
    }
    result = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return result.stdout


def mypy(project: Path) -> set[Finding]:
    printed = check(project, "mypy", "--strict", "--cache-dir", os.devnull, "ok.py", "bad.py")
    return {(name, int(line)) for name, line in re.findall(r"^(\S+?):(\d+): error:", printed, re.MULTILINE)}


def pyright(project: Path) -> set[Finding]:
    printed = check(project, "pyright", "--outputjson")
    return {
        (Path(found["file"]).name, found["range"]["start"]["line"] + 1)
        for found in json.loads(printed)["generalDiagnostics"]
        if found["severity"] == "error"
    }


@pytest.mark.conformance(245)
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_right_uses_pass_and_each_wrong_one_is_refused(
    checker: t.Callable[[Path], set[Finding]], project: Path
) -> None:
    """A checker finds an error on every line marked as bad, and on no other line of either file."""
    lines = enumerate((project / "bad.py").read_text().splitlines(), 1)
    marked = {("bad.py", number) for number, line in lines if line.endswith("# bad")}
    assert len(marked) > 40
    found = checker(project)
    assert sorted(marked - found) == [], "wrong uses that pass"
    assert sorted(found - marked) == [], "right uses that are refused"


@pytest.mark.conformance(245)
def test_every_public_symbol_has_a_known_type(project: Path) -> None:
    """pyright finds the type of all that the package exports without inferring any of it."""
    printed = check(project, "pyright", "--verifytypes", "venturi", "--ignoreexternal", "--outputjson")
    report = json.loads(printed)["typeCompleteness"]
    unknown = [
        s["name"] for s in report["symbols"] if s["isExported"] and not (s["isTypeKnown"] and not s["isTypeAmbiguous"])
    ]
    assert unknown == []
    assert report["completenessScore"] == 1
