"""The codec's promise: equal in value and type after a trip through jsonb, or refused with the path."""

from __future__ import annotations

import collections.abc as cabc
import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import pathlib
import sys
import typing as t
import uuid
import zoneinfo

import attrs
import psycopg
import pytest
from fixtures.naming import stable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

import venturi.codec
from venturi.codec import decode, encode, plain
from venturi.errors import ConfigError, PayloadError

if t.TYPE_CHECKING:
    from fractions import Fraction

Connection: t.TypeAlias = psycopg.Connection[tuple[t.Any, ...]]
Trip: t.TypeAlias = cabc.Callable[[object, t.Any], t.Any]

T = t.TypeVar("T")
U = t.TypeVar("U")
NEW_YORK = zoneinfo.ZoneInfo("America/New_York")
UserId = t.NewType("UserId", int)
Amounts = TypeAliasType("Amounts", dict[str, list[int]])
Number = TypeAliasType("Number", int)
Pair = TypeAliasType("Pair", tuple[T, T], type_params=(T,))
Reference = t.NewType("Reference", int)
new_type: t.Any = t.NewType  # checkers take only a class for the second argument
Ticket: t.Any = new_type("Ticket", t.Annotated[int, "positive"])


class Colour(enum.Enum):
    RED = "red"
    NONE = None
    ONE = 1


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mood(enum.StrEnum):
    GOOD = "good"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Masked(enum.Enum):
    """Shows another value than the one its members have."""

    FIRST = 1
    SECOND = 2

    @property
    def value(self) -> str:  # type: ignore[override]
        return "masked"


class Mixed(enum.Enum):
    NUMBER = 1
    WORD = "word"


class Twins(enum.Enum):
    NUMBER = 1
    DIGIT = "1"


class Coded(enum.IntEnum):
    """Stored by name, by hooks."""

    FIRST = 1


class Text(str):
    __slots__ = ()


@attrs.frozen
class Item:
    name: str
    price: decimal.Decimal = decimal.Decimal("1.10")


@attrs.frozen
class Special(Item):
    pass


@attrs.frozen
class Wide:
    name: str
    depth: int


@attrs.define
class Node:
    value: int
    following: Node | None = None
    children: list[Node] = attrs.Factory(list["Node"])


@attrs.frozen
class Link:
    following: Link | None


@attrs.frozen
class Box(t.Generic[T]):
    content: T
    more: list[T] = attrs.Factory(list[T])


@attrs.frozen
class IntBox(Box[int]):
    pass


@attrs.frozen
class Crate(Box[list[T]], t.Generic[T]):
    """Uses the variable of its base for something else."""

    label: T = attrs.field(kw_only=True)


@attrs.frozen
class Shipment(Crate[dt.datetime]):
    pass


@attrs.frozen
class Relayed(Box[U], t.Generic[U]):
    pass


@attrs.frozen
class Dated(Relayed[dt.datetime]):
    pass


@attrs.frozen
class Carrier:
    crate: Crate[int]
    pair: Pair[dt.date]


# Declares a field again, without an annotation.
Renumbered: t.Any = attrs.frozen(type("Renumbered", (Wide,), {"name": attrs.field(type=int)}))
Made: t.Any = attrs.make_class(
    "Made", {"at": attrs.field(type=dt.date, kw_only=True)}, bases=(Box[dt.datetime],), frozen=True
)


@dataclasses.dataclass(slots=True)
class DataBox(t.Generic[T]):
    content: T


@dataclasses.dataclass(slots=True)
class DataCrate(DataBox[list[T]], t.Generic[T]):
    label: T


@attrs.frozen
class Private:
    _token: str
    other: int = attrs.field(alias="another", default=1)


@attrs.frozen
class Derived:
    side: int
    area: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "area", self.side**2)


def _shout(text: str) -> str:
    return f"{text}!"


@attrs.frozen
class Shouting:
    text: str = attrs.field(converter=_shout)


@attrs.define
class Loud:
    """Shouts whatever is assigned to it."""

    text: str

    def __setattr__(self, field: str, value: str) -> None:
        object.__setattr__(self, field, _shout(value))


@attrs.define
class Louder(Loud):
    more: str = ""


@attrs.define
class Echoing:
    """Shouts whenever it is read."""

    text: str

    def __getattribute__(self, field: str) -> t.Any:
        value = object.__getattribute__(self, field)
        return _shout(value) if field == "text" else value


@attrs.define(slots=False)
class Counted:
    number: int


def _number(counting: t.Any) -> t.Any:
    return t.cast("t.Any", vars(counting))["number"]


def _count(counting: t.Any, value: int) -> None:
    vars(counting)["number"] = value + 1


# Counts up whatever is assigned to it.
Counting: t.Any = attrs.define(slots=False)(type("Counting", (Counted,), {"number": property(_number, _count)}))


@attrs.define
class Patient:
    """Checks what is assigned, with code of attrs alone."""

    number: int = attrs.field(on_setattr=attrs.setters.validate)


def _floats(numbers: t.Iterable[int]) -> set[t.Any]:
    return set(map(float, numbers))


def _float_keys(numbers: t.Mapping[int, int]) -> dict[t.Any, int]:
    return {float(number): value for number, value in numbers.items()}


@attrs.define
class Floating:
    numbers: set[int] = attrs.field(factory=set[int], converter=_floats)
    by_number: dict[int, int] = attrs.field(factory=dict[int, int], converter=_float_keys)


@attrs.frozen
class Positive:
    number: int = attrs.field(validator=attrs.validators.gt(0))


@attrs.frozen
class Stubborn:
    """Raises what it is told to."""

    number: int = 0
    error: t.ClassVar[BaseException | None] = None

    def __attrs_post_init__(self) -> None:
        if Stubborn.error is not None:
            raise Stubborn.error


@attrs.frozen
class OwnInit:
    number: int

    def __init__(self, number: int) -> None:
        t.cast("t.Any", self).__attrs_init__(number + 1)


@dataclasses.dataclass
class Data:
    number: int
    names: list[str] = dataclasses.field(default_factory=list[str])


@attrs.frozen
class TaggedAdd:
    left: Expression
    right: Expression
    kind: t.Literal["add"] = "add"


@attrs.frozen
class TaggedNegate:
    left: Expression
    right: Expression
    kind: t.Literal["negate"] = "negate"


Expression: t.TypeAlias = "TaggedAdd | TaggedNegate | int"


@attrs.frozen
class Unresolved:
    ratio: Fraction


@attrs.frozen
class Anything:
    value: t.Any


class Money:
    """A type of the user's own, known to the codec by its hooks alone."""

    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and other.cents == self.cents

    def __hash__(self) -> int:
        return hash(self.cents)


class Lossy(Money):
    """One whose hooks lose something."""


def _read_money(data: t.Any, _: t.Any) -> Money:
    return Money(int(data.removesuffix("c")))


def _write_money(money: Money) -> str:
    return f"{money.cents}c"


def _read_lossy(data: t.Any, _: t.Any) -> Lossy:
    return Lossy(data // 100)


def _write_lossy(money: Lossy) -> int:
    return money.cents


venturi.codec.converter.register_structure_hook(Money, _read_money)
venturi.codec.converter.register_unstructure_hook(Money, _write_money)


def _read_reference(data: t.Any, _: t.Any) -> Reference:
    return Reference(int(data.removeprefix("r")))


def _write_reference(reference: Reference) -> str:
    return f"r{reference}"


def _read_coded(data: t.Any, _: t.Any) -> Coded:
    return Coded[data]


def _write_coded(coded: Coded) -> str:
    return coded.name


venturi.codec.converter.register_structure_hook(Reference, _read_reference)
venturi.codec.converter.register_unstructure_hook(Reference, _write_reference)
venturi.codec.converter.register_structure_hook(Coded, _read_coded)
venturi.codec.converter.register_unstructure_hook(Coded, _write_coded)
venturi.codec.converter.register_structure_hook(Lossy, _read_lossy)
venturi.codec.converter.register_unstructure_hook(Lossy, _write_lossy)


class Repeating(dt.tzinfo):
    """A zone of another library, whose offset depends on the fold."""

    def utcoffset(self, moment: dt.datetime | None, /) -> dt.timedelta:
        return dt.timedelta(hours=1 if moment is not None and moment.fold else 2)

    def dst(self, moment: dt.datetime | None, /) -> None:
        return None

    def tzname(self, moment: dt.datetime | None, /) -> str:
        return "repeating"


@pytest.fixture
def trip(connect: cabc.Callable[..., Connection]) -> Trip:
    """Encodes a value, stores it as jsonb, and decodes what the server prints."""
    connection = connect(autocommit=True)

    def trip(value: object, type_: t.Any) -> t.Any:
        row = connection.execute("SELECT %s::jsonb::text", (encode(value, type_),)).fetchone()
        assert row is not None
        return decode(row[0], type_)

    return trip


def refusal(value: object, type_: t.Any) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        encode(value, type_)
    return caught.value


def misfit(text: str, type_: t.Any) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        decode(text, type_)
    return caught.value


INSTANT = dt.datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=dt.UTC)
STORABLE: list[tuple[t.Any, t.Any]] = [
    (None, None),
    (True, bool),
    (2**53 + 1, int),
    (-(10**600) + 1, int),
    (0.1, float),
    (2.0, float),
    (1e16, float),
    (1e22, float),
    (1.2345678901234567e25, float),
    (sys.float_info.max, float),
    (5e-324, float),
    ("", str),
    ('emoji 🙂, "quotes", \\u0000 spelled out, \x7f', str),
    (b"\x00\xff", bytes),
    (INSTANT, dt.datetime),
    (dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=-5))), dt.datetime),
    (INSTANT.astimezone(dt.timezone(dt.timedelta(seconds=3601, microseconds=7))), dt.datetime),
    (INSTANT.astimezone(NEW_YORK), dt.datetime),
    (INSTANT.replace(tzinfo=zoneinfo.ZoneInfo("UTC")), dt.datetime),
    (dt.date.max, dt.date),
    (dt.time(1, 2, 3, 4), dt.time),
    (dt.time(1, tzinfo=dt.timezone(dt.timedelta(hours=1))), dt.time),
    (dt.timedelta.max, dt.timedelta),
    (dt.timedelta.min, dt.timedelta),
    (dt.timedelta(microseconds=-1), dt.timedelta),
    (uuid.UUID(int=5), uuid.UUID),
    (decimal.Decimal("1.10"), decimal.Decimal),
    (decimal.Decimal("1E+5000"), decimal.Decimal),
    (pathlib.Path("a/b c"), pathlib.Path),
    (Colour.RED, Colour),
    (Colour.NONE, Colour),
    (Level.HIGH, Level),
    (Mood.GOOD, Mood),
    (Rights.READ | Rights.WRITE, Rights),
    ({1, 2}, set[int]),
    (frozenset({Mood.GOOD}), frozenset[Mood]),
    ((1, "a"), tuple[int, str]),
    ((), tuple[()]),
    ((1, 2, 3), tuple[int, ...]),
    ([{"a": [1, None, True, 0.5]}], list),
    ([1], cabc.Sequence[int]),
    ({"a": 1}, cabc.Mapping[str, int]),
    ({"": 1, "a": 2, "A": 3}, dict[str, int]),
    ({-1: "a", 10: "b"}, dict[int, str]),
    ({UserId(7): None}, dict[UserId, None]),
    ({uuid.UUID(int=5): 1}, dict[uuid.UUID, int]),
    ({Level.LOW: 1}, dict[Level, int]),
    ({Mood.GOOD: 1}, dict[Mood, int]),
    ({dt.date.min: 1}, dict[dt.date, int]),
    ({dt.timedelta.min: 1}, dict[dt.timedelta, int]),
    ({-7: "a"}, dict[Number, str]),
    ({-7: "a"}, t.cast("t.Any", dict)[Ticket, str]),
    ({2: "a", "x": "b"}, dict[t.Literal[1, 2, "x"], str]),
    ({7: "a", uuid.UUID(int=5): "b"}, dict[int | uuid.UUID, str]),
    ({Mixed.NUMBER: 1, Mixed.WORD: 2}, dict[Mixed, int]),
    ({Rights.READ | Rights.WRITE: 1}, dict[Rights, int]),
    ({Reference(7): "a"}, dict[Reference, str]),
    ({Coded.FIRST: 1}, dict[Coded, int]),
    (Masked.SECOND, Masked),
    ({Masked.SECOND: 1}, dict[Masked, int]),
    (None, int | None),
    (0, t.Optional[int]),  # noqa: UP045
    (1, int | str),
    ("1", int | str),
    (1.0, int | float),
    (1, float | int),
    (uuid.UUID(int=5), str | uuid.UUID),
    ("b", t.Literal["a", "b", 1]),
    (1, t.Literal["a", True, 1]),
    (Mood.GOOD, t.Literal[Mood.GOOD]),
    (UserId(3), UserId),
    (3, t.Annotated[int, "positive"]),
    (Item("a", decimal.Decimal("2.00")), Item),
    (Item("a"), Item | Wide),
    (Wide("a", 1), Item | Wide),
    (Node(1, Node(2), [Node(3)]), Node),
    (Box(1, [2]), Box[int]),
    (Box("x"), Box[str]),
    (Box([1.0, None]), Box),
    (IntBox(1, [2]), IntBox),
    ([Box(Box(1))], list[Box[Box[int]]]),
    (Crate([1], label=2), Crate[int]),
    (Shipment([INSTANT], label=INSTANT), Shipment),
    (Dated(INSTANT, [INSTANT]), Dated),
    (Carrier(Crate([1], label=2), (dt.date.min, dt.date.max)), Carrier),
    (Renumbered(depth=1, name=2), Renumbered),
    (Made(INSTANT, at=dt.date.min), Made),
    (DataCrate([INSTANT], INSTANT), DataCrate[dt.datetime]),
    ((INSTANT, INSTANT), Pair[dt.datetime]),
    (Patient(1), Patient),
    (Private("t", 2), Private),
    (Derived(3), Derived),
    (Positive(1), Positive),
    (Data(1, ["a"]), Data),
    (TaggedAdd(1, TaggedNegate(2, 3)), Expression),
    ({"a": [1]}, Amounts),
    (Money(150), Money),
    ({Money(1): [Money(2)]}, dict[Money, list[Money]]),
    (Anything({"a": [1, 2.5, "x", None, False]}), Anything),
]


@pytest.mark.parametrize(("value", "type_"), STORABLE, ids=stable)
def test_a_value_comes_back_from_jsonb_equal_in_value_and_type(trip: Trip, value: object, type_: t.Any) -> None:
    """Every supported type survives the column, ints beyond 2**53 and trailing zeros included (case 007)."""
    if isinstance(type_, str):
        type_ = t.cast("t.Any", TaggedAdd | TaggedNegate | int)
    back = trip(value, type_)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value) or isinstance(value, (Money, dict, set))


def test_trailing_zeros_and_the_sign_of_zero_are_kept(trip: Trip) -> None:
    """What equality does not show comes back too (case 007)."""
    assert str(trip(decimal.Decimal("-0.00"), decimal.Decimal)) == "-0.00"
    assert math.copysign(1, trip(-0.0, float)) == -1


@pytest.mark.parametrize("fold", [0, 1])
@pytest.mark.parametrize("hour", ["2024-11-03T01:30", "2024-03-10T02:30"])
def test_repeated_and_skipped_hours_keep_their_zone_and_fold(trip: Trip, fold: int, hour: str) -> None:
    """A local time that exists twice, or not at all, is the same one afterwards."""
    moment = dt.datetime.fromisoformat(hour).replace(tzinfo=NEW_YORK, fold=fold)
    back = trip(moment, dt.datetime)
    assert (back, back.utcoffset(), back.tzinfo, back.fold) == (moment, moment.utcoffset(), NEW_YORK, fold)


def test_a_zone_whose_rules_have_changed_keeps_the_instant() -> None:
    """The stored offset wins over the local time."""
    back = decode('"2024-07-01T12:00:00+00:00[America/New_York]"', dt.datetime)
    assert back == dt.datetime(2024, 7, 1, 12, tzinfo=dt.UTC)
    assert back.tzinfo is NEW_YORK


UNSTORABLE: list[tuple[t.Any, t.Any, str]] = [
    (math.nan, float, "$"),
    (math.inf, float, "$"),
    ([0.5, -math.inf], list[float], "$[1]"),
    ({"a": math.nan}, dict, "$.a"),
    ("x\0y", str, "$"),
    ({"a\0": 1}, dict[str, int], "$['a\\x00']"),
    ({"a": [{"b": "\0"}]}, t.Any, "$.a[0].b"),
    ("\ud83d", str, "$"),
    ("\ud83d\ude42", str, "$"),
    ({"\udfff": 1}, t.Any, "$['\\udfff']"),
    (pathlib.Path("\udcff"), pathlib.Path, "$"),
    (10**600, int, "$"),
    ([1, 1e16], list, "$[1]"),
    ({1: 2}, t.Any, "$[1]"),
    ({"a": (1,)}, t.Any, "$.a"),
    ({(1,): 2}, dict[tuple[int], int], "$[tuple]"),
    ({1.5: 2}, dict[float, int], "$[float]"),
    ({True: 2}, dict[int, int], "$[True]"),
    ({1: 2}, dict[int | str, int], "$[1]"),
    ({1: 2}, dict[t.Literal[1, "1"], int], "$[1]"),
    ({Twins.NUMBER: 2}, dict[Twins, int], "$[Twins]"),
    (1, str, "$"),
    ("1", int, "$"),
    (True, int, "$"),
    (1, bool, "$"),
    (1, float, "$"),
    (None, str, "$"),
    ("abc", list[str], "$"),
    ((1,), list[int], "$"),
    ([1], tuple[int], "$"),
    ((1, 2), tuple[int], "$"),
    (Text("a"), str, "$"),
    (Mood.GOOD, str, "$"),
    (Level.LOW, int, "$"),
    (1, Level, "$"),
    (Special("a"), Item, "$"),
    (Anything(Item("a")), Anything, "$.value"),
    ([Item("a"), Item(t.cast("str", 2))], list[Item], "$[1].name"),
    (dt.datetime(2024, 1, 1), dt.datetime, "$"),
    (dt.datetime(2024, 1, 1, tzinfo=Repeating(), fold=1), dt.datetime, "$"),
    (INSTANT, dt.date, "$"),
    (dt.time(1, tzinfo=NEW_YORK), dt.time, "$"),
    (decimal.Decimal("NaN"), decimal.Decimal, "$"),
    (bytearray(b"a"), bytes, "$"),
    ("c", t.Literal["a", "b"], "$"),
    (True, t.Literal[1], "$"),
    (str(uuid.UUID(int=5)), uuid.UUID | str, "$"),
    (1e22, int | float, "$"),
    (Colour.NONE, Colour | None, "$"),
    (Shouting("a"), Shouting, "$"),
    (OwnInit(1), OwnInit, "$"),
    (Loud("a"), Loud, "$"),
    (Louder("a"), Louder, "$"),
    (Echoing("a"), Echoing, "$"),
    (Counting(1), Counting, "$"),
    (Crate[t.Any]([1], label="a"), Crate[int], "$.label"),
    (Crate[t.Any](["a"], label=1), Crate[int], "$.content[0]"),
    (lambda: None, cabc.Callable[[], None], "$"),
    ([print], list, "$[0]"),
    (object(), object, "$"),
    (Lossy(150), Lossy, "$"),
    (t.cast("t.Any", 5), Money, "$"),
]


@pytest.mark.parametrize(("value", "type_", "path"), UNSTORABLE, ids=stable)
def test_what_would_not_come_back_is_refused_with_its_path(value: object, type_: t.Any, path: str) -> None:
    """Nothing is coerced, and the error says where (cases 001, 003, 007)."""
    assert refusal(value, type_).path == path


def test_a_refusal_names_the_types_and_never_the_value() -> None:
    """A payload does not leak into logs through the codec's own messages."""
    problem = refusal([Item(t.cast("str", b"secret"))], list[Item])
    assert str(problem) == "$[0].name: expected str, got bytes"


@pytest.mark.parametrize("levels", [101, 200, 900, 5000])
def test_deep_values_are_refused_both_ways(levels: int) -> None:
    """The bound is a number of levels and not the interpreter's stack (case 004)."""
    deep: list[t.Any] = []
    chain = Node(0)
    for _ in range(levels - 1):
        deep, chain = [deep], Node(0, chain)
    for value, type_ in ((deep, list), (chain, Node)):
        assert "deeper than 100 levels" in refusal(value, type_).problem
    assert "deeper than 100 levels" in misfit("[" * levels + "]" * levels, list).problem
    assert "deeper than 100 levels" in misfit('{"value": 1, "new": ' + "[" * levels + "]" * levels + "}", Node).problem


def test_a_hundred_levels_are_stored(trip: Trip) -> None:
    """The bound itself works, for plain data, for optional members and for unions."""
    deep: list[t.Any] = []
    chain, formula = Link(None), TaggedNegate(1, 1)
    for _ in range(99):
        deep, chain, formula = [deep], Link(chain), TaggedNegate(formula, 1)
    assert trip(deep, list) == deep
    assert trip(chain, Link) == chain
    assert trip(formula, TaggedAdd | TaggedNegate | int) == formula


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement came with 3.12")
def test_a_type_alias_may_hold_itself() -> None:
    """``type Tree = dict[str, Tree]`` is resolved as far as the value goes."""
    names: dict[str, t.Any] = {}
    exec("type Tree = dict[str, Tree]", names)
    assert decode(encode({"a": {"b": {}}}, names["Tree"]), names["Tree"]) == {"a": {"b": {}}}
    assert refusal({"a": {"b": 1}}, names["Tree"]).path == "$.a.b"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax came with 3.12")
def test_classes_and_aliases_may_declare_their_variables_in_brackets() -> None:
    """``class Outer[T](Inner[list[T]])`` and ``type Pair[T]`` have variables like any other."""
    names: dict[str, t.Any] = {"attrs": attrs}
    source = (
        "@attrs.frozen\nclass Inner[T]:\n  x: T\n"
        "@attrs.frozen\nclass Outer[T](Inner[list[T]]):\n  y: T\n"
        "type Pair[T] = tuple[T, T]"
    )
    exec(compile(source, "<source>", "exec", dont_inherit=True), names)  # early 3.12 does not find T by its name
    type_, pair = names["Outer"][dt.date], (dt.date.min, dt.date.max)
    value = names["Outer"]([*pair], dt.date.min)
    assert decode(encode(value, type_), type_) == value
    assert decode(encode(pair, names["Pair"][dt.date]), names["Pair"][dt.date]) == pair


def test_brackets_inside_strings_are_no_levels() -> None:
    """Long flat data with many brackets is not taken for deep."""
    assert decode(encode(["[{" * 500], list), list) == ["[{" * 500]
    flat: list[list[int]] = [[]] * 500
    assert decode(encode(flat, list), list) == flat


def test_a_value_that_holds_itself_is_refused() -> None:
    """A cycle ends in a PayloadError and not in a RecursionError."""
    cycle: list[t.Any] = []
    cycle.append(cycle)
    node = Node(1)
    node.following = node
    assert "holds itself" in refusal(cycle, list).problem
    assert "holds itself" in refusal(node, Node).problem


def test_a_value_too_large_is_refused() -> None:
    """16 MiB of JSON text are the bound, to the byte."""
    most = "x" * (venturi.codec.MAX_BYTES - 2)
    assert len(encode(most, str)) == venturi.codec.MAX_BYTES
    assert "16777217 bytes" in refusal(most + "x", str).problem


MISFITS: list[tuple[str, t.Any, str]] = [
    ("[]", Item, "$"),
    ("null", Item, "$"),
    ("5", Item, "$"),
    ('"str"', Item, "$"),
    ("{}", Item, "$.name"),
    ('{"name": 1}', Item, "$.name"),
    ('{"name": "a", "price": 1.1}', Item, "$.price"),
    ('{"name": "a", "price": "NaN"}', Item, "$.price"),
    ('{"value": 1, "children": [{"value": 1}, {"value": "1"}]}', Node, "$.children[1].value"),
    ("1", str, "$"),
    ('"1"', int, "$"),
    ("1", bool, "$"),
    ("true", int, "$"),
    ("1.0", int, "$"),
    ("9007199254740993", float, "$"),
    ("1e400", float, "$"),
    ("NaN", float, "$"),
    ("1" + "0" * 400, float, "$"),
    ("1" * 5000, int, "$"),
    ("{", dict, "$"),
    ("", dict, "$"),
    ('{"01": 1}', dict[int, int], "$['01']"),
    ('{"١": 1}', dict[int, int], "$['\\u0661']"),
    ('{"1.0": 1}', dict[Level, int], "$['1.0']"),
    ("true", Colour, "$"),
    ("[]", Colour, "$"),
    ("true", Level, "$"),
    ('"purple"', Colour, "$"),
    ('"2024-01-01T00:00"', dt.datetime, "$"),
    ('"2024-01-01T00:00+00:00[Nowhere/Atall]"', dt.datetime, "$"),
    ('"2024-01-01T00:00+00:00[../../etc/passwd]"', dt.datetime, "$"),
    ("1" + "0" * 30, dt.timedelta, "$"),
    ('"not base64"', bytes, "$"),
    ('"x"', uuid.UUID, "$"),
    ("[1]", tuple[int, int], "$"),
    ("[[1]]", set[t.Any], "$"),
    ("[1]", int | str, "$"),
    ('"x"', Money, "$"),
    ("5", Money, "$"),
    ("null", cabc.Callable[[], None], "$"),
]


@pytest.mark.parametrize(("text", "type_", "path"), MISFITS, ids=stable)
def test_stored_data_of_another_shape_is_a_payload_error(text: str, type_: t.Any, path: str) -> None:
    """Whatever a row holds, decoding it raises no other exception, and coerces nothing."""
    assert misfit(text, type_).path == path


@pytest.mark.conformance(25)
def test_payloads_of_newer_and_older_producers_are_read() -> None:
    """Unknown fields are ignored, absent ones get their default, and without one the error names the field.

    Case 157.
    """
    assert decode('{"name": "a", "colour": "red"}', Item) == Item("a")
    assert decode('{"number": 1}', Data) == Data(1)
    one, other = decode('{"value": 1}', Node), decode('{"value": 1}', Node)
    assert one.children is not other.children
    problem = misfit('{"price": "1.10"}', Item)
    assert (problem.path, problem.problem) == ("$.name", "absent, and it has no default")


def test_every_decode_gives_a_fresh_value() -> None:
    """What a handler does to its task cannot reach the next run."""
    text = encode(Data(1, ["a"]), Data)
    decode(text, Data).names.clear()
    assert decode(text, Data) == Data(1, ["a"])


def test_equal_items_of_another_type_are_not_the_same() -> None:
    """A class that makes floats of ints is refused, although 1 == 1.0."""
    numbers, by_number = Floating(), Floating()
    numbers.numbers.add(1)
    by_number.by_number[1] = 1
    assert decode(encode(Floating(), Floating), Floating) == Floating()
    assert "not come back as it is" in refusal(numbers, Floating).problem
    assert "not come back as it is" in refusal(by_number, Floating).problem


def test_encoding_leaves_the_value_alone() -> None:
    """A class that changes its lists while it is built does not change the caller's when it is checked."""

    @attrs.frozen
    class Sorting:
        numbers: t.Any

        def __attrs_post_init__(self) -> None:
            self.numbers.sort()

    numbers = [2, 1]
    value = Sorting(numbers)
    numbers.reverse()
    refusal(value, Sorting)
    assert numbers == [2, 1]


def test_fields_may_have_any_name(trip: Trip) -> None:
    """No field name collides with one of the library's own (case 010)."""
    names = "task job ctx context cls kind priority carry queue delay conn payload note attempt dedup_key id type_"
    names += " data value field arguments form"
    fields = {name: attrs.field(type=str) for name in names.split()}
    fields["self"] = attrs.field(type=str, alias="own")
    crowd: t.Any = attrs.make_class("Crowd", fields, frozen=True)
    value = crowd(*fields)
    assert trip(value, crowd) == value


def test_what_a_class_raises_is_the_cause_of_a_payload_error() -> None:
    """Exceptions of validators and __attrs_post_init__ become the cause; the text says what they said."""
    problem = misfit('{"number": 0}', Positive)
    assert isinstance(problem.__cause__, ValueError)
    assert str(problem.__cause__) in str(problem)


def test_base_exceptions_of_users_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt in user code is not made into something else."""
    monkeypatch.setattr(Stubborn, "error", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        decode("{}", Stubborn)


@pytest.mark.parametrize("error", [ValueError("no"), RecursionError(), StopIteration(), ConfigError("odd")])
def test_any_exception_of_a_class_is_a_payload_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Both directions, for encoding reads such a class back."""
    value = Stubborn()
    monkeypatch.setattr(Stubborn, "error", error)
    assert misfit("{}", Stubborn).__cause__ is error
    assert refusal(value, Stubborn).__cause__ is error


def test_a_hook_that_fails_is_the_cause_of_a_payload_error() -> None:
    """A hook's own exception is told and chained, at the place of the value."""
    problem = misfit('["1c", "x"]', list[Money])
    assert problem.path == "$[1]"
    assert isinstance(problem.__cause__, ValueError)


def test_hooks_may_use_the_converter_for_their_parts() -> None:
    """The converter is as strict as the codec."""
    assert venturi.codec.converter.structure(["a"], list[str]) == ["a"]
    assert venturi.codec.converter.unstructure(Item("a")) == {"name": "a", "price": "1.10"}
    with pytest.raises(PayloadError):
        venturi.codec.converter.structure([1], list[str])


def test_an_annotation_that_does_not_resolve_is_named() -> None:
    """A name that exists for type checkers only is a ConfigError naming class and field, at first use (case 033)."""
    with pytest.raises(ConfigError, match=r"Unresolved\.ratio: .* Fraction"):
        encode(Unresolved(t.cast("t.Any", 1)), Unresolved)
    with pytest.raises(ConfigError, match=r"Unresolved\.ratio: .* Fraction"):
        decode('{"ratio": 1}', Unresolved)


def test_a_class_inside_a_function_may_hold_itself() -> None:
    """Its own name resolves, although it is no global, and in a subclass too (case 033)."""

    @attrs.frozen
    class Chain:
        following: Chain | None = None

    @attrs.frozen
    class Anchored(Chain):
        depth: int = 0

    @attrs.frozen
    class Broken:
        following: Broken | None = None
        ratio: Fraction | None = None

    assert decode(encode(Chain(Chain()), Chain), Chain) == Chain(Chain())
    assert decode(encode(Anchored(Chain(), 1), Anchored), Anchored) == Anchored(Chain(), 1)
    with pytest.raises(ConfigError, match=r"Broken\.ratio: .* Fraction"):
        encode(Broken(), Broken)


def test_unions_read_alike_in_either_order() -> None:
    """A | B equals B | A, so a worker reads what a producer wrote with the other order."""
    unions: list[t.Any] = [Item | Wide, Wide | Item]
    for union in unions:
        assert decode(encode(Wide("a", 1), union), union) == Wide("a", 1)
        assert decode(encode(Item("a"), union), union) == Item("a")


def test_tagged_unions_are_read_in_good_time() -> None:
    """A tree of thirty levels is not tried in all combinations."""
    formula: TaggedAdd | TaggedNegate | int = 1
    for _ in range(30):
        formula = TaggedNegate(formula, 1)
    union = t.cast("t.Any", TaggedAdd | TaggedNegate | int)
    assert decode(encode(formula, union), union) == formula


def test_equal_sets_are_stored_alike() -> None:
    """The text of a set does not depend on the order it was filled in."""
    assert encode({8, 0}, set[int]) == encode({0, 8}, set[int]) == "[0,8]"


def test_plain_data_is_checked_for_the_journal(trip: Trip) -> None:
    """Evidence is plain JSON, or refused with its path."""
    evidence: dict[str, t.Any] = {"pages": 3, "urls": ["a", None], "share": 0.25}
    assert decode(plain(evidence), dict) == trip(evidence, dict) == evidence
    with pytest.raises(PayloadError) as caught:
        plain({"when": {"at": INSTANT}})
    assert caught.value.path == "$.when.at"


@attrs.frozen
class Rich:
    """One field of each kind, for the property."""

    flag: bool
    number: int
    ratio: float
    text: str
    blob: bytes
    at: dt.datetime
    day: dt.date
    hour: dt.time
    span: dt.timedelta
    key: uuid.UUID
    price: decimal.Decimal
    level: Level
    tags: frozenset[str]
    pair: tuple[int, str | None]
    many: tuple[float, ...]
    names: dict[str, list[int]]
    by_id: dict[uuid.UUID, Level]
    by_number: dict[int, float]
    either: int | str | Item | None
    free: t.Any
    _hidden: Private


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
ints = st.integers(-(10**600) + 1, 10**600 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
decimals = st.decimals(allow_nan=False, allow_infinity=False)
# In whole seconds: Python itself does not read back what it prints of an offset below one.
offsets = st.integers(-86399, 86399).map(lambda seconds: dt.timedelta(seconds=seconds))
zones = st.timezones() | st.builds(dt.timezone, offsets)
datetimes = st.datetimes(timezones=zones)
free = st.recursive(
    st.none() | st.booleans() | ints | st.floats(-9e15, 9e15) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
riches = st.builds(
    Rich,
    flag=st.booleans(),
    number=ints,
    ratio=floats,
    text=texts,
    blob=st.binary(max_size=20),
    at=datetimes,
    day=st.dates(),
    hour=st.times().map(lambda hour: hour.replace(fold=0)),
    span=st.timedeltas(),
    key=st.uuids(),
    price=decimals,
    level=st.sampled_from(Level),
    tags=st.frozensets(texts, max_size=3),
    pair=st.tuples(ints, st.none() | texts),
    many=st.lists(floats, max_size=3).map(tuple),
    names=st.dictionaries(texts, st.lists(ints, max_size=3), max_size=3),
    by_id=st.dictionaries(st.uuids(), st.sampled_from(Level), max_size=3),
    by_number=st.dictionaries(ints, floats, max_size=3),
    either=st.none() | ints | texts | st.builds(Item, texts, decimals),
    free=free,
    hidden=st.builds(Private, texts, ints),
)


def types_of(value: t.Any) -> list[t.Any]:
    """The types of a value and of all that it holds, and the offsets of times."""
    found: list[t.Any] = [value.__class__, value.utcoffset() if value.__class__ is dt.datetime else None]
    inner: list[t.Any] = []
    if attrs.has(value.__class__):
        inner = [getattr(value, field.name) for field in attrs.fields(value.__class__)]
    elif value.__class__ in (list, tuple):
        inner = [*value]
    elif value.__class__ is dict:
        inner = sorted(value.items(), key=repr)
    return found + [types_of(part) for part in inner]


def test_random_values_come_back_equal_in_value_and_type(trip: Trip) -> None:
    """decode(jsonb(encode(x))) == x, with the same types all the way down."""

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(riches)
    def check(value: Rich) -> None:
        back = trip(value, Rich)
        assert back == value
        assert types_of(back) == types_of(value)

    check()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-9e15, 9e15) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.sampled_from(["name"]), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, database=None)
@given(json_values, st.sampled_from([type_ for _, type_ in STORABLE if not isinstance(type_, str)]))
def test_foreign_data_is_read_or_refused_and_nothing_else(data: t.Any, type_: t.Any) -> None:
    """Any JSON as any type gives a value that encodes again, or a PayloadError."""
    try:
        value = decode(json.dumps(data), type_)
    except PayloadError:
        return
    encode(value, type_)
