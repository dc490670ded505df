"""How a command tells of an error: in one line, without secrets."""

from __future__ import annotations

import re
import sys

from venturi.errors import VenturiError

__all__ = ["tell"]

# What is not understood of a connection string is repeated by libpq and psycopg, and may be a part of the password.
_SECRET = re.compile(r'\S*@\S*|(?<=value )"[^"]*"')


def tell(error: Exception) -> None:
    """Write an error to stderr as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    # Errors of our own repeat no connection string, but names that may look like one.
    print("venturi:", text if isinstance(error, VenturiError) else _SECRET.sub("...", text), file=sys.stderr)
