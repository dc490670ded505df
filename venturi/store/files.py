"""The SQL files of ``migrations/``: the only ones are those named like ``0001.queue.sql``."""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from importlib.resources.abc import Traversable

import attrs
from psycopg import sql

from venturi.errors import SchemaError

__all__ = ["NAME", "File", "load", "number_of", "render"]

NAME = re.compile(r"[0-9]{4}\.[a-z0-9_-]+")
_FILE = re.compile(NAME.pattern + r"\.sql")


@attrs.frozen
class File:
    """One migration: its name without the suffix, and its text, in which ``{schema}`` stands for the quoted schema."""

    name: str
    text: str = attrs.field(repr=False)

    @property
    def number(self) -> int:
        return number_of(self.name)

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def record(self) -> str:
        return f"INSERT INTO {{schema}}.migrations (name, checksum) VALUES ('{self.name}', '{self.checksum}');\n"


def load(source: Traversable | None) -> list[File]:
    """The migrations of a folder, oldest first."""
    folder = _folder() if source is None else source
    paths = [path for path in folder.iterdir() if _FILE.fullmatch(path.name)] if folder.is_dir() else []
    if not paths:
        raise SchemaError(f"the installation of venturi is incomplete: no migrations in {folder}")
    found = (File(path.name.removesuffix(".sql"), path.read_text("utf-8").rstrip() + "\n") for path in paths)
    return sorted(found, key=lambda file: file.name)


def _folder() -> Traversable:
    """Where the migrations are: inside a package that was built, beside one that is a checkout."""
    package = resources.files("venturi")
    inside = package / "migrations"
    return inside if inside.is_dir() else package / ".." / "migrations"


def render(template: str, schema: str) -> str:
    """SQL with the quoted name of the schema; lines of comment stay as they are, as a name may have line breaks."""
    quoted = sql.Identifier(schema).as_string()
    lines = template.splitlines(keepends=True)
    return "".join(line if line.startswith("--") else line.replace("{schema}", quoted) for line in lines)


def number_of(name: str) -> int:
    """The number that the name of a migration begins with."""
    return int(name[:4])
