"""How each type is stored: for every annotation a pair of functions, made once, that convert and check in one pass.

What such a pair stores comes back equal by construction. Where code of the user has a say (hooks, and classes with
converters, validators or an ``__init__`` or ``__setattr__`` of their own), and where union members or keys could be
mixed up, the value is read back at once and compared.
"""

from __future__ import annotations

import collections.abc as abc
import enum
import pathlib
import types
import typing as t

import attrs
import cattrs

from venturi._forms.composites import (
    collection,
    dump_plain,
    enumeration,
    first_of,
    fixed_tuple,
    literal,
    mapping,
    optional,
    verified,
)
from venturi._forms.records import Record, arguments_of, fields, filled, is_record, is_required, runs_code
from venturi._forms.scalars import SCALARS, Convert, Form, Refused, name, unchanged
from venturi.text import describe

__all__ = ["Refused", "converter", "form"]

_CONTAINERS: dict[object, type[t.Any]] = {
    list: list,
    abc.Sequence: list,
    abc.MutableSequence: list,
    tuple: tuple,
    set: set,
    abc.Set: set,
    abc.MutableSet: set,
    frozenset: frozenset,
    dict: dict,
    abc.Mapping: dict,
    abc.MutableMapping: dict,
}

_forms: dict[t.Any, Form] = {}


def form(type_: t.Any) -> Form:
    """How values of that annotation are stored; the user's hooks go first."""
    known = _forms.get(type_)
    if known is None:
        known = _forms[type_] = _new_form(type_)
    return known


def _new_form(type_: t.Any) -> Form:
    native = _native(type_)
    dump, load = converter.get_unstructure_hook(type_), converter.get_structure_hook(type_)
    if isinstance(dump, _NativeDump) and load is _native_load:
        return native
    hooked = Form(
        native.dump if isinstance(dump, _NativeDump) else _guarded(type_, dump),
        native.load if load is _native_load else _guarded(type_, lambda data: load(data, type_)),
    )
    return verified(Form(lambda value: dump_plain(hooked.dump(value)), hooked.load))


def _native(type_: t.Any) -> Form:
    origin, arguments = t.get_origin(type_), t.get_args(type_)
    cls: t.Any = origin or type_
    if type_ is None or type_ in SCALARS:
        return SCALARS[type_ or types.NoneType]
    if type_ in (t.Any, object) or isinstance(type_, t.TypeVar):
        return Form(dump_plain, unchanged)
    if isinstance(type_, t.NewType):
        return form(type_.__supertype__)
    if hasattr(cls, "__value__"):  # a named alias, which may hold itself
        return Form(lambda value: _aliased(type_).dump(value), lambda data: _aliased(type_).load(data))
    if origin in (t.Annotated, t.Final):
        return form(arguments[0])
    if origin in (t.Union, types.UnionType):
        return _union(arguments)
    if origin is t.Literal:
        return literal([(form(type(choice)).dump(choice), choice) for choice in arguments])
    if cls in _CONTAINERS:
        return _container(_CONTAINERS[cls], origin, arguments)
    if isinstance(cls, type) and issubclass(cls, enum.Enum):
        return enumeration(cls)
    if is_record(cls):
        record = Record(type_, form)
        made = Form(record.dump, record.load)
        return verified(made) if runs_code(record.cls) else made
    return _unsupported(type_)


def _aliased(type_: t.Any) -> Form:
    return form(filled((t.get_origin(type_) or type_).__value__, arguments_of(type_)))


def _union(members: tuple[t.Any, ...]) -> Form:
    # In an order of its own: A | B equals B | A, so both must be read alike.
    some = sorted((member for member in members if member is not types.NoneType), key=_breadth)
    inner = form(some[0]) if len(some) == 1 else verified(first_of([form(member) for member in some]))
    return optional(inner) if types.NoneType in members else inner


def _breadth(member: t.Any) -> tuple[bool, bool, int, int, str]:
    """Sorts the members of a union: who takes less data goes first."""
    cls = t.get_origin(member) or member
    own = fields(cls) if is_record(cls) else ()
    required = sum(map(is_required, own))
    return member is str, member is float, -required, -len(own), str(member)


def _container(cls: type[t.Any], origin: t.Any, arguments: tuple[t.Any, ...]) -> Form:
    if cls is dict:
        key, item = arguments or (str, t.Any)
        return mapping(form(key), form(item), numeric=_is_numeric(key))
    if cls is tuple and origin is not None and arguments[1:] != (...,):
        return fixed_tuple([form(argument) for argument in arguments])
    return collection(cls, form(arguments[0] if arguments else t.Any))


def _is_numeric(key: t.Any) -> bool:
    """Whether keys of that type are read as ints first."""
    while isinstance(key, t.NewType):
        key = key.__supertype__
    if isinstance(key, type) and issubclass(key, enum.Enum):
        return all(type(member._value_) is int for member in key)
    return key is int


def _unsupported(type_: t.Any) -> Form:
    def refuse(_: t.Any) -> t.NoReturn:
        raise Refused(f"{name(type_)} cannot be stored; register hooks for it on venturi.codec.converter")

    return Form(refuse, refuse)


@attrs.frozen
class _NativeDump:
    """What the converter answers for a type without a hook of the user's; None: for the type of the value."""

    annotation: t.Any = None

    def __call__(self, value: t.Any) -> t.Any:
        return form(self.annotation or type(value)).dump(value)


def _native_load(data: t.Any, type_: t.Any) -> t.Any:
    return form(type_).load(data)


def _any(_: t.Any) -> bool:
    return True


def _find_native_load(_: t.Any) -> abc.Callable[[t.Any, t.Any], t.Any]:
    return _native_load


def _new_converter() -> cattrs.Converter:
    made = cattrs.Converter()
    made.register_unstructure_hook_factory(_any, _NativeDump)
    made.register_structure_hook_factory(_any, _find_native_load)
    # A converter has hooks of its own for these (older ones for Enum), which would go first, for their subclasses too.
    ours: tuple[type[t.Any], ...] = (str, bytes, int, float, pathlib.Path, enum.Enum)
    for cls in ours:
        made.register_unstructure_hook(cls, _NativeDump())
        made.register_structure_hook(cls, _native_load)
    return made


converter: cattrs.Converter = _new_converter()
"""Where users register hooks for types of their own; for all others it converts as strictly as the codec does."""


def _guarded(type_: t.Any, hook: Convert) -> Convert:
    def call(value: t.Any) -> t.Any:
        try:
            return hook(value)
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"the hook for {name(type_)} failed: {describe(error)}") from error

    return call
