"""Helpers for tests of code that uses venturi.

`call` runs one handler without a database. `drain`, `queued` and `assert_enqueued` work on the test's own connection,
inside
its transaction: nothing is committed, nothing sleeps, and a rollback leaves nothing. Tasks, carry and evidence go
through the same encoding as in production, so that what cannot be stored fails in the test too.

`venturi.testing.plugin` is a pytest plugin with a server, loaded by ``pytest_plugins = ["venturi.testing.plugin"]``.
"""

from venturi.testing.calling import Called, call
from venturi.testing.draining import Drained, Ran, drain
from venturi.testing.looking import assert_enqueued, queued

__all__ = ["Called", "Drained", "Ran", "assert_enqueued", "call", "drain", "queued"]
