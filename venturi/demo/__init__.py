"""A demonstration: index a folder of source code, one job a file. ``venturi demo`` runs it.

It is written as a user's program would be, with nothing but what ``import venturi`` gives. Read `tasks` first, then
`handlers`, then `program`, which starts a worker beside a display. `tables` holds SQL of the demo's own, `source` looks
into files.

Kill it at any moment, by ``kill -9`` if you like, and start it again: it goes on where it stopped. Start it on the same
folder in a second terminal, and two workers share the work. Started when the index is complete, or on another folder,
it begins anew, and drops the index of before.
"""

from venturi.demo.program import run

__all__ = ["run"]
