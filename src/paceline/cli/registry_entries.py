"""Descriptions of the methods, compressors and collectives that there are, as data.

`paceline list` prints them, and `website/docs_tables.py` makes docs/reference/methods.md, compressors.md and
collectives.md of them. Texts are the registered classes' `summary`; keys are their fields.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.compression import Compressor
    from paceline.interfaces import AllReduceAlgorithm, Method

UPDATES = {
    "worker": "each worker",
    "method": "each worker, bucket by bucket",
    "server": "the servers, which hold the parameters",
}
GRADIENTS = {
    "mean": "the mean over workers",
    "local": "the worker's own gradient",
    "sent": "the worker's own gradient, which is already sent, so the script must not change it",
}
CLIPPED = {"mean": "the mean gradient", "own": "each worker's own gradient"}
STATES = {
    "none": "none",
    "own": "each worker's own",
    "common": "equal on all workers",
}
TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text"}
SHARED_MEANINGS = {
    "warmup_steps": "First steps in which gradients are sent uncompressed.",
    "error_feedback": "Add the compression error of a step to the next gradient.",
    "decay": "Factor on the error that error feedback carries over; below 1 the error fades.",
}
NO_DEFAULT = "(empty)"


class Key(NamedTuple):
    """A key of a spec."""

    name: str
    type: str
    default: str
    meaning: str


class Entry(NamedTuple):
    """The description of one registered class.

    Attributes:
        name: Its name in the registry.
        summary: Its texts: purpose, source and limits.
        consistency: Empty for collectives.
        use_when: Completes "Use it when ..."; empty for collectives.
        keys: Its own keys, and those that it shares with others.
        facts: Pairs of a label and a text.
        forms: By spec, the facts that differ in another form of it.
        inherits: The entry that has the same keys with other defaults; empty: none.
    """

    name: str
    summary: Any
    consistency: str
    use_when: str
    keys: tuple[Key, ...]
    facts: tuple[tuple[str, str], ...]
    forms: Mapping[str, tuple[tuple[str, str], ...]] = {}
    inherits: str = ""


def methods() -> list[Entry]:
    """Return the methods, those with the strongest consistency first.

    Raises:
        UsageError: A method's class has no `summary`.
    """
    from paceline.interfaces.method import CONSISTENCIES
    from paceline.methods import METHODS

    entries = [_method(cls) for _, cls in sorted(METHODS.items())]
    order: list[str] = list(CONSISTENCIES)
    return sorted(
        entries, key=lambda one: (order.index(one.consistency), one.name != "bsp")
    )


def compressors() -> list[Entry]:
    """Return the compressors by name, those to compare with last."""
    from paceline.compression import COMPRESSORS, CONTRIB

    entries = [_compressor(name, cls) for name, cls in sorted(COMPRESSORS.items())]
    return sorted(entries, key=lambda one: (one.name != "none", one.name in CONTRIB))


def collectives() -> list[Entry]:
    """Return the collectives by name, the default first."""
    from paceline.collectives.registry import COLLECTIVES

    entries = [_collective(name, cls) for name, cls in sorted(COLLECTIVES.items())]
    return sorted(entries, key=lambda one: one.name != "native")


ENTRIES = {"methods": methods, "compressors": compressors, "collectives": collectives}


def settings_keys() -> tuple[Key, ...]:
    """Return the keys that every method has."""
    from paceline.core.settings import Settings

    found = {key.name: key for key in _own_keys(Settings)}
    meaning = found["compression"].meaning.partition(" `UNSET`")[0]
    found["compression"] = Key("compression", "compressor", "none", meaning)
    for name, kind in (("collective", "collective"), ("buckets", "bucket rule")):
        found[name] = found[name]._replace(type=kind)
    return tuple(found.values())


# ---- methods ----


def _method(cls: type[Method]) -> Entry:
    summary = getattr(cls, "summary", None)
    if summary is None:
        raise UsageError(
            f"method {cls.name!r} has no `summary`, which describes it: expected a "
            "`paceline.interfaces.MethodSummary` as an attribute of its class"
        )
    from paceline.methods.local_updates import LocalSGD, LocalUpdates

    method = cls()
    facts = _method_facts(method)
    forms = {}
    for form in getattr(cls, "forms", ()):
        values = ",".join(f"{key}={value}" for key, value in form.items())
        other = _method_facts(cls(**form))
        forms[f"{cls.name}:{values}"] = tuple(
            fact for fact in other if fact not in facts
        )
    preset = issubclass(cls, LocalUpdates) and cls is not LocalSGD
    return Entry(
        cls.name,
        summary,
        getattr(method, "consistency", "asynchronous"),
        summary.use_when,
        tuple(_own_keys(cls)),
        facts,
        forms,
        LocalSGD.name if preset else "",
    )


def _method_facts(method: Method) -> tuple[tuple[str, str], ...]:
    summary: Any = getattr(method, "summary", None)
    facts = [
        ("consistency", getattr(method, "consistency", "asynchronous")),
        ("waits for", summary.waits_for),
        ("sends", summary.sends),
        ("optimizer runs on", UPDATES[method.updates_on]),
        ("`.grad` after backward", GRADIENTS[method.visible_gradient]),
        ("`clip_norm` limits", CLIPPED[method.clips]),
        ("compression", _compression(method)),
        ("collectives", _collectives(method)),
        ("a worker out of data", _out_of_data(method)),
        ("evaluate and save", _evaluation(method)),
        ("`--survive`", "yes" if method.updates_on == "server" else "no"),
    ]
    return tuple(facts)


def _compression(method: Method) -> str:
    if method.updates_on == "server":
        if getattr(method, "compressible_pushes", False):
            return "of pushes; with `replies=deltas` also of replies"
        return "refused"
    if getattr(method, "sends_halves", False):
        return "refused"
    compressed_by: Any = getattr(method, "compressed_by", None)
    if compressed_by is None:
        return "of gradients"
    try:
        compressed_by("int8")
    except UsageError:
        return "refused"
    default = getattr(method, "default_compression", "")
    own = f"; by default `{default}`" if default else ""
    return f"of the change of the parameters{own}"


def _collectives(method: Method) -> str:
    from paceline.collectives import registry
    from paceline.collectives.reduce_scatter import check_halves

    if method.updates_on == "server":
        return "none: workers send to servers and receive from them"
    if "collective" in {field.name for field in dataclasses.fields(method)}:  # type: ignore[arg-type]
        return "values of the key `collective`"
    if getattr(method, "sends_halves", False):
        names = []
        for name, cls in sorted(registry.COLLECTIVES.items()):
            try:
                check_halves(cls())
            except UsageError:
                continue
            names.append(f"`{name}`")
        return ", ".join(names)
    if method.rounds.groups:
        return "all but `parameter-server`"
    return "all"


def _out_of_data(method: Method) -> str:
    if method.updates_on == "server":
        return "leaves, and no worker waits for it"
    return "takes part with weight 0 until all workers finish, as under DDP's `Join`"


def _evaluation(method: Method) -> str:
    if getattr(method, "consolidates_together", False):
        return "inside `optimizer.consolidated()`, which all workers enter"
    if method.updates_on == "worker" and not method.rounds.models_may_differ:
        return "at any time"
    if getattr(method, "consistency", "") == "exact":
        return "at any time"
    return "inside `optimizer.consolidated()`"


# ---- compressors and collectives ----


def _compressor(name: str, cls: type[Compressor]) -> Entry:
    from paceline.compression import GradientCompression, shared_keys

    shape: Any = cls
    one = shape()
    shared = [
        Key(key, _type_of_text(text), text, SHARED_MEANINGS[key])
        for key, text in shared_keys(cls).items()
    ]
    try:
        one.check_differences()
        local = "yes"
    except UsageError:
        local = "no"
    pushed = GradientCompression(one).decodes_per_worker
    facts = [
        ("consistency", one.consistency),
        ("sends", one.summary.sends),
        ("loses", one.summary.loses),
        ("added up by", _added_up(one)),
        ("rounds", str(one.rounds)),
        ("expected result is exact", "yes" if one.unbiased else "no"),
        ("state", STATES[one.state]),
        ("pushes to servers", "yes" if pushed else "no"),
        ("local methods", local),
    ]
    keys = (*_own_keys(cls), *shared)
    return Entry(
        name, one.summary, one.consistency, one.summary.use_when, keys, tuple(facts)
    )


def _added_up(compressor: Any) -> str:
    from paceline.compression.quantization import Int8

    if compressor.linear:
        return "an all-reduce (linear)"
    if isinstance(compressor, Int8):
        return "one worker for each part; all workers then gather the sums"
    return "every worker, of all others' (gathered)"


def _collective(name: str, cls: type[AllReduceAlgorithm]) -> Entry:
    from paceline.collectives.reduce_scatter import check_halves

    summary = cls.summary
    try:
        check_halves(cls())
        halves = "yes"
    except UsageError:
        halves = "no"
    facts = (
        ("sums are formed by", summary.formed_by),
        ("sends", summary.sends),
        ("good for", summary.good_for),
        ("needs servers", "yes" if cls.needs == "servers" else "no"),
        ("splits into halves", halves),
    )
    return Entry(name, summary, "", "", (), facts)


# ---- keys ----


def _own_keys(cls: Any) -> Iterable[Key]:
    from paceline.spec import field_types

    types, meanings = field_types(cls), _meanings(cls)
    for field in dataclasses.fields(cls):
        name, default = field.name, str(field.default).lower()
        meaning = meanings.get(name, "")
        yield Key(name, _type_text(types[name]), default or NO_DEFAULT, meaning)


def _type_text(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    return TYPES.get(kind, "text")


def _type_of_text(text: str) -> str:
    if text in ("true", "false"):
        return TYPES[bool]
    return TYPES[int] if text.isdecimal() else TYPES[float]


def _meanings(cls: type) -> dict[str, str]:
    """Return the meaning of each field, from the ``Attributes`` of the class's docstring and its bases'.

    Empty under ``python -OO``, which drops docstrings.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = (inspect.cleandoc(base.__doc__ or "") + "\n").partition(
            "\nAttributes:\n"
        )[2]
        block = section.partition("\n\n")[0]
        for name, text in re.findall(
            r"^    (\w+): (.*(?:\n {8,}.*)*)", block, re.MULTILINE
        ):
            words = re.sub(r"\s+", " ", text).replace("``", "`").strip()
            found[name] = re.sub(r"\*(\w+)\*", r"`\1`", words)
    return found
