"""``venturi bench``: what a queue does on a server of the user's, beside what that server does without one."""

from venturi.bench.measures import MEASURES
from venturi.bench.options import Options
from venturi.bench.program import Result, measure

__all__ = ["MEASURES", "Options", "Result", "measure"]
