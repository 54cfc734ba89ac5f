"""Specs: ``"name:key=value,other=value"``, typed by the dataclass that they fill."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import UsageError, unknown

_SPEC = re.compile(r"([a-z0-9-]+)(?::(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Spec:
    """A name and the texts of its keys."""

    name: str
    values: dict[str, str]

    def __str__(self) -> str:
        pairs = ",".join(f"{key}={value}" for key, value in self.values.items())
        return f"{self.name}:{pairs}" if pairs else self.name


def parse(text: str) -> Spec:
    """Split a spec into its name and its keys' texts; raises `UsageError`."""
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"expected NAME or NAME:key=value,key=value, got {text!r}: "
            "names are lower case with hyphens"
        )
    values: dict[str, str] = {}
    for part in match[2].split(",") if match[2] is not None else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals or not value:
            raise UsageError(f"in spec {text!r}: expected key=value, got {part!r}")
        if key in values:
            raise UsageError(f"in spec {text!r}: key {key!r} is given twice")
        values[key] = value
    return Spec(match[1], values)


def nested(key: str, values: Mapping[str, str]) -> tuple[Spec | None, dict[str, str]]:
    """What ``key=NAME,key.OPTION=VALUE`` among *values* says, as a spec, and the rest.

    Raises `UsageError` where options come without the name of what they are for.
    """
    start = f"{key}."
    own = {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}
    rest = {k: v for k, v in values.items() if k != key and not k.startswith(start)}
    if key in values:
        return Spec(values[key], own), rest
    if own:
        first = next(iter(own))
        raise UsageError(
            f"key '{start}{first}' without {key!r}: expected {key}=NAME beside it"
        )
    return None, rest


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def convert_fields(
    cls: type, values: Mapping[str, str], owner: str = ""
) -> dict[str, Any]:
    """Texts to values of the types that *cls*'s fields have; raises `UsageError`, which says
    whose keys they are where there is an *owner*."""
    types = field_types(cls)
    try:
        return {key: convert(key, text, types[key]) for key, text in values.items()}
    except UsageError as error:
        raise UsageError(f"{owner}: {error}" if owner else str(error)) from None


def convert(key: str, text: str, wanted: Any) -> Any:
    """One text to a value of type *wanted*: bool, int, float, str or a Literal; or one of these, or
    None where nothing is said."""
    if type(None) in typing.get_args(wanted):
        (wanted,) = set(typing.get_args(wanted)) - {type(None)}
    if typing.get_origin(wanted) is Literal:
        choices = typing.get_args(wanted)
        if text not in choices:
            raise UsageError(unknown(f"value for {key}", text, choices))
        return text
    if wanted is bool:
        if text not in ("true", "false"):
            raise UsageError(f"{key}: expected true or false, got {text!r}")
        return text == "true"
    if wanted in (int, float):
        try:
            return wanted(text)
        except ValueError:
            kind = "a whole number" if wanted is int else "a number"
            raise UsageError(f"{key}: expected {kind}, got {text!r}") from None
    assert wanted is str, f"a field of type {wanted} cannot be written in a spec"
    return text


def check_values(owner: str, fields: Any) -> None:
    """Check the values of a dataclass instance that Python code has made.

    Only fields are checked that a spec can set: numbers, switches, texts and choices.

    Args:
        owner: The name of what has these fields, for the error.
        fields: A method or a compressor, for example.

    Raises:
        UsageError: A field has a value of another type, or none of its choices.
    """
    for key, wanted in field_types(fields.__class__).items():
        value = getattr(fields, key)
        if type(None) in typing.get_args(wanted):
            if value is None:
                continue
            (wanted,) = set(typing.get_args(wanted)) - {type(None)}
        if typing.get_origin(wanted) is Literal:
            if value not in typing.get_args(wanted):
                choices = typing.get_args(wanted)
                message = unknown(f"value for {key}", str(value), choices)
                raise UsageError(f"{owner}: {message}")
        elif wanted in _KINDS:
            kind, allowed = _KINDS[wanted]
            is_switch = isinstance(value, bool)
            if not isinstance(value, allowed) or is_switch != (wanted is bool):
                raise UsageError(f"{owner}: {key}: expected {kind}, got {value!r}")


_KINDS: dict[Any, tuple[str, type]] = {
    bool: ("True or False", bool),
    int: ("a whole number", numbers.Integral),
    float: ("a number", numbers.Real),
    str: ("a text", str),
}


def spec_of(name: str, fields: Any, **others: str) -> Spec:
    """The full spec of a dataclass instance and of some other keys; without the switches,
    and the empty texts, that stand as they do by default."""
    values = {
        f.name: _text(value)
        for f in dataclasses.fields(fields)
        for value in [getattr(fields, f.name)]
        if not ((isinstance(value, bool) or value == "") and value == f.default)
    }
    return Spec(name, values | others)


def changed(fields: Any) -> dict[str, str]:
    """The keys of a dataclass instance that are not as by default."""
    return {
        f.name: _text(value)
        for f in dataclasses.fields(fields)
        for value in [getattr(fields, f.name)]
        if value != f.default
    }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
