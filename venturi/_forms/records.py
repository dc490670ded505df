"""How attrs classes and dataclasses are stored: as an object of their fields."""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import functools
import inspect
import typing as t

import attrs

from venturi._forms.scalars import SCALARS, Convert, Form, Refused, check, name
from venturi.errors import ConfigError
from venturi.text import describe

__all__ = ["Record", "arguments_of", "compared", "fields", "filled", "is_record", "is_required", "runs_code"]

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
    """Whether making or reading an instance may run more than what attrs writes."""
    methods = ("__attrs_init__", "__attrs_pre_init__", "__attrs_post_init__")
    return (
        "__attrs_attrs__" not in vars(cls)
        or any(hasattr(cls, method) for method in methods)
        or any(field.converter or field.validator or not field.init for field in attrs.fields(cls))
        or _has_own_access(cls)
    )


def _has_own_access(cls: t.Any) -> bool:
    """Whether instances are created, or their fields assigned or read, in a way of the class's own."""
    setter = cls.__setattr__
    return (
        type(cls).__call__ is not type.__call__
        or cls.__new__ is not object.__new__
        or cls.__getattribute__ is not object.__getattribute__
        # attrs writes a setter for frozen classes and for hooks, and makes instances without calling it.
        or not (setter is object.__setattr__ or getattr(setter, "__globals__", None) is attrs.fields.__globals__)
        or any(isinstance(getattr(cls, field.name, None), property) for field in attrs.fields(cls))
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
    """The resolved annotation of every field, with the arguments of generic classes filled in."""
    resolved, known = _resolved(cls), _known(type_, cls)
    hints: dict[str, t.Any] = {}
    for field in fields(cls):
        owner = next((base for base in cls.__mro__ if field.name in _declared(base)), cls)
        annotated = field.name in inspect.get_annotations(owner)
        hint = resolved[field.name] if annotated else field.type or t.Any
        hints[field.name] = filled(hint, known.get(owner, {}))
    return hints


def _declared(cls: type) -> set[str]:
    """The fields of the class itself, without those of its bases; attrs allows some that have no annotation."""
    own = [field.name for field in vars(cls).get("__attrs_attrs__", ()) if not field.inherited]
    return {*own, *inspect.get_annotations(cls)}


def _known(type_: t.Any, cls: type) -> dict[type, dict[t.Any, t.Any]]:
    """What the type variables of the class and of each of its bases stand for; two of them may use the same one."""
    known = {cls: arguments_of(type_)}
    for owner in cls.__mro__:
        own = known.setdefault(owner, {})
        for base in vars(owner).get("__orig_bases__", ()):
            given = {variable: filled(hint, own) for variable, hint in arguments_of(base).items()}
            known.setdefault(t.get_origin(base) or base, given)
    return known


def arguments_of(type_: t.Any) -> dict[t.Any, t.Any]:
    """What the variables of a generic type stand for; empty for one without arguments."""
    return dict(zip(getattr(t.get_origin(type_), "__parameters__", ()), t.get_args(type_), strict=False))


def filled(hint: t.Any, known: dict[t.Any, t.Any]) -> t.Any:
    """The annotation with its type variables replaced; one that stands for nothing known is Any."""
    if isinstance(hint, t.TypeVar):
        return known.get(hint, t.Any)
    parameters = getattr(hint, "__parameters__", ()) if t.get_origin(hint) else ()
    return hint[tuple(known.get(parameter, t.Any) for parameter in parameters)] if parameters else hint


def _resolved(cls: type, known: dict[str, type] | None = None) -> dict[str, t.Any]:
    try:
        return t.get_type_hints(cls, localns=known)
    except NameError as error:
        own = {base.__name__: base for base in reversed(cls.__mro__)}
        if known is None and error.name in own:  # a class made inside a function, which holds itself
            return _resolved(cls, own)
        field = next((field.name for field in fields(cls) if str(error.name) in str(field.type)), "?")
        raise ConfigError(
            f"{cls.__qualname__}.{field}: its annotation names {error.name}, which does not exist at run time; "
            "import it outside of TYPE_CHECKING"
        ) from error
    except Exception as error:
        raise ConfigError(f"{cls.__qualname__}: its annotations do not resolve: {describe(error)}") from error
