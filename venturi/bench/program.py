"""The whole of a benchmark: what is asked for, measured one after the other, with what it depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from venturi.bench.measures import MEASURES, Bench, Figures
from venturi.bench.options import Options
from venturi.bench.scratch import scratch
from venturi.bench.settings import describe
from venturi.bench.tasks import CHUNK
from venturi.errors import ConfigError

__all__ = ["Result", "measure"]


@attrs.frozen
class Result:
    """What was measured.

    Attributes:
        settings: Of the machine, the server and the benchmark.
        figures: By measure: ``per_s``, ``p50_ms`` and ``p99_ms``, as they apply.
        ratios: By measure: its figure divided by that of the measure it is compared with.
    """

    settings: dict[str, object]
    figures: dict[str, Figures]
    ratios: dict[str, float]


def measure(options: Options, tell: Callable[[str], None]) -> Result:
    """Take the measures in a scratch schema.

    Args:
        options: What to measure, and how.
        tell: Is given lines about what goes on.

    Raises:
        ConfigError: An option is wrong.
        VenturiError: A worker process has ended.
        psycopg.Error: The database cannot be reached, or the role may not create schemas.
    """
    names = _with_references(options.only)
    with scratch(options.dsn, tell) as made:
        chosen = attrs.asdict(options, filter=attrs.filters.exclude("dsn", "only"))
        settings = {**describe(made.connection), **chosen, "batch": CHUNK}
        bench = Bench(made, options)
        figures: dict[str, Figures] = {}
        for name in names:
            tell(f"measures {name}")
            made.empty()
            figures[name] = MEASURES[name].take(bench)
    return Result(settings, figures, {name: ratio for name in names if (ratio := _ratio(name, figures)) is not None})


def _with_references(only: Sequence[str]) -> list[str]:
    """The names asked for and what they are compared with, in the order in which they are measured."""
    if unknown := sorted(set(only) - MEASURES.keys()):
        raise ConfigError(f"only={unknown[0]!r}: must be some of {', '.join(MEASURES)}")
    wanted = set(only or MEASURES)
    wanted |= {against for name in wanted if (against := MEASURES[name].against)}
    return [name for name in MEASURES if name in wanted]


def _ratio(name: str, figures: dict[str, Figures]) -> float | None:
    _, against, by = MEASURES[name]
    return None if against is None else round(figures[name][by] / figures[against][by], 2)
