"""How attrs classes and dataclasses are stored: as an object of their fields."""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import functools
import typing as t

import attrs

from venturi._forms.scalars import SCALARS, Convert, Form, Refused, check, name
from venturi.errors import ConfigError
from venturi.text import describe

__all__ = ["Record", "compared", "fields", "is_record", "is_required", "runs_code"]

Field: t.TypeAlias = "attrs.Attribute[t.Any] | dataclasses.Field[t.Any]"


def is_record(cls: t.Any) -> bool:
    """Whether it is an attrs class or a dataclass."""
    return isinstance(cls, type) and (attrs.has(cls) or dataclasses.is_dataclass(cls))


def fields(cls: t.Any) -> tuple[Field, ...]:
    """The fields of such a class."""
    return attrs.fields(cls) if attrs.has(cls) else dataclasses.fields(cls)


@functools.cache
def compared(cls: t.Any) -> list[str]:
    """The fields that take part in equality."""
    return [field.name for field in fields(cls) if (field.eq if isinstance(field, attrs.Attribute) else field.compare)]


def is_required(field: Field) -> bool:
    """Whether it has no default."""
    if isinstance(field, attrs.Attribute):
        return field.default is attrs.NOTHING
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def runs_code(cls: type) -> bool:
    """Whether making an instance may run more than the assignments that attrs writes."""
    methods = ("__attrs_init__", "__attrs_pre_init__", "__attrs_post_init__")
    return (
        "__attrs_attrs__" not in vars(cls)
        or any(hasattr(cls, method) for method in methods)
        or any(field.converter or field.validator or not field.init for field in attrs.fields(cls))
    )


class Record:
    """The two directions of one class. Annotations are resolved at first use, so that a class may hold itself.

    Args:
        type_: The class, or a generic one with its arguments.
        form: Gives the form of a field's annotation.
    """

    def __init__(self, type_: t.Any, form: abc.Callable[[t.Any], Form]) -> None:
        self.type = type_
        self.cls: t.Any = t.get_origin(type_) or type_
        self.form = form
        stored = [field for field in fields(self.cls) if field.init]
        self.required = [field.name for field in stored if is_required(field)]
        self.arguments = {field.name: getattr(field, "alias", field.name) for field in stored}

    @functools.cached_property
    def forms(self) -> dict[str, Form]:
        hints = _hints(self.type, self.cls)
        # Tags and scalars first: they tell the members of a union apart before anything nested is read. Otherwise a
        # tree of such members would be read once for each combination of them.
        ordered = sorted(self.arguments, key=lambda field: not _is_single(hints[field]))
        return {field: self.form(hints[field]) for field in ordered}

    @functools.cached_property
    def dumps(self) -> list[tuple[str, Convert]]:
        return [(field, form.dump) for field, form in self.forms.items()]

    @functools.cached_property
    def loads(self) -> list[tuple[str, str, Convert]]:
        return [(field, self.arguments[field], form.load) for field, form in self.forms.items()]

    def dump(self, value: t.Any) -> dict[str, t.Any]:
        check(value, self.cls, self.cls)
        data: dict[str, t.Any] = {}
        field = ""
        try:
            for field, dump in self.dumps:
                data[field] = dump(getattr(value, field))
        except Refused as refused:
            refused.steps.append(f".{field}")
            raise
        return data

    def load(self, data: t.Any) -> t.Any:
        check(data, dict, self.cls)
        for field in self.required:
            if field not in data:
                raise Refused("absent, and it has no default", f".{field}")
        return self._build(self._arguments(data))

    def _arguments(self, data: dict[str, t.Any]) -> dict[str, t.Any]:
        arguments: dict[str, t.Any] = {}
        field = ""
        try:
            for field, argument, load in self.loads:
                if field in data:
                    arguments[argument] = load(data[field])
        except Refused as refused:
            refused.steps.append(f".{field}")
            raise
        return arguments

    def _build(self, arguments: dict[str, t.Any]) -> t.Any:
        try:
            return self.cls(**arguments)
        except Exception as error:
            raise Refused(f"{name(self.cls)} refused it: {describe(error)}") from error


def _is_single(hint: t.Any) -> bool:
    return hint in SCALARS or t.get_origin(hint) is t.Literal


def _hints(type_: t.Any, cls: type) -> dict[str, t.Any]:
    """The resolved annotation of every field, with the arguments of a generic class filled in."""
    resolved = _resolved(cls)
    known: dict[t.Any, t.Any] = {}
    for alias in (type_, *getattr(cls, "__orig_bases__", ())):
        known.update(zip(getattr(t.get_origin(alias), "__parameters__", ()), t.get_args(alias), strict=False))
    return {field.name: _filled(resolved.get(field.name, field.type or t.Any), known) for field in fields(cls)}


def _filled(hint: t.Any, known: dict[t.Any, t.Any]) -> t.Any:
    if isinstance(hint, t.TypeVar):
        return known.get(hint, t.Any)
    parameters = getattr(hint, "__parameters__", ()) if t.get_origin(hint) else ()
    return hint[tuple(known.get(parameter, t.Any) for parameter in parameters)] if parameters else hint


def _resolved(cls: type) -> dict[str, t.Any]:
    try:
        return t.get_type_hints(cls)
    except NameError as error:
        if error.name == cls.__name__:  # a class made inside a function, which holds itself
            return t.get_type_hints(cls, localns={cls.__name__: cls})
        field = next((field.name for field in fields(cls) if str(error.name) in str(field.type)), "?")
        raise ConfigError(
            f"{cls.__qualname__}.{field}: its annotation names {error.name}, which does not exist at run time; "
            "import it outside of TYPE_CHECKING"
        ) from error
    except Exception as error:
        raise ConfigError(f"{cls.__qualname__}: its annotations do not resolve: {describe(error)}") from error
