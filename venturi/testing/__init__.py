"""Helpers for tests of code that uses venturi.

`call` runs one handler without a database. The others work on the test's own connection, inside its transaction:
nothing is committed, nothing sleeps, and a rollback leaves nothing. `using` takes in code that enqueues without
``conn=``, `queued` and `assert_enqueued` look at what is pending, `drain` runs it. Tasks, carry and evidence go through
the same encoding as in production, so that what cannot be stored fails in the test too.

`venturi.testing.plugin` is a pytest plugin with a server and such a connection, loaded by
``pytest_plugins = ["venturi.testing.plugin"]``.
"""

from venturi.testing.calling import Called, call
from venturi.testing.draining import Ran, drain
from venturi.testing.lending import using
from venturi.testing.looking import assert_enqueued, queued

__all__ = ["Called", "Ran", "assert_enqueued", "call", "drain", "queued", "using"]
