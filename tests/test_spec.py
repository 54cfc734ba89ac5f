"""Specs: text to name and keys, keys to typed fields, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.spec import (
    Spec,
    changed,
    check_values,
    convert_fields,
    field_types,
    parse,
    spec_of,
)


@dataclass(frozen=True)
class Fields:
    """One field of each type that a spec can carry."""

    staleness: int = 3
    share: float = 0.5
    overlap: bool = False
    collective: Literal["ring", "native"] = "ring"
    label: str = "x"


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("bsp", "bsp", {}),
        (" bsp ", "bsp", {}),
        ("local-sgd:steps=8", "local-sgd", {"steps": "8"}),
        (
            "ssp:staleness=3,buckets=wfbp",
            "ssp",
            {"staleness": "3", "buckets": "wfbp"},
        ),
        (
            "ssp: staleness = 3 , buckets = wfbp",
            "ssp",
            {"staleness": "3", "buckets": "wfbp"},
        ),
        ("a:path=b=c", "a", {"path": "b=c"}),
        ("a:time=1:30", "a", {"time": "1:30"}),
    ],
)
def test_parse(text: str, name: str, values: dict[str, str]) -> None:
    assert parse(text) == Spec(name, values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected NAME"),
        ("BSP", "lower case"),
        ("local_sgd", "lower case with hyphens"),
        ("ssp staleness=3", "NAME:key=value"),
        (":a=1", "expected NAME"),
        ("ssp:", "expected key=value, got ''"),
        ("ssp:staleness", "expected key=value, got 'staleness'"),
        ("ssp:staleness=", "expected key=value, got 'staleness='"),
        ("ssp:=3", "expected key=value, got '=3'"),
        ("ssp:a=1,", "expected key=value, got ''"),
        ("ssp:a=1,,b=2", "expected key=value, got ''"),
        ("ssp:a=1,a=2", "key 'a' is given twice"),
    ],
)
def test_refused_spec_is_quoted(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert repr(text) in str(caught.value)
    assert said in str(caught.value)


def test_fields_get_their_types() -> None:
    texts = {
        "staleness": "7",
        "share": "1e-3",
        "overlap": "true",
        "collective": "native",
        "label": "7",
    }
    values = convert_fields(Fields, texts)
    assert Fields(**values) == Fields(7, 1e-3, True, "native", "7")
    assert type(values["staleness"]) is int
    assert list(field_types(Fields)) == list(texts)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("staleness", "3.5", "expected a whole number"),
        ("staleness", "many", "expected a whole number"),
        ("share", "half", "expected a number"),
        ("overlap", "True", "expected true or false"),
        ("overlap", "1", "expected true or false"),
        ("collective", "rign", "Did you mean 'ring'? Known: native, ring"),
    ],
)
def test_refused_value_names_key_and_value(key: str, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        convert_fields(Fields, {key: text})
    assert key in str(caught.value)
    assert repr(text) in str(caught.value)
    assert said in str(caught.value)


def test_only_what_is_not_as_by_default_is_changed() -> None:
    assert changed(Fields()) == {}
    assert changed(Fields(overlap=True, share=0.25)) == {
        "share": "0.25",
        "overlap": "true",
    }


def test_spec_of_an_instance_names_every_field() -> None:
    spec = spec_of("x", Fields(overlap=True), buckets="ddp")
    assert str(spec) == (
        "x:staleness=3,share=0.5,overlap=true,collective=ring,label=x,buckets=ddp"
    )


_words = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=8)
_values = st.text("abcXYZ019.=:_-+/", min_size=1, max_size=8)


@given(_words, st.dictionaries(_words, _values, max_size=4))
def test_parse_reads_back_what_a_spec_prints(name: str, values: dict[str, str]) -> None:
    assert parse(str(Spec(name, values))) == Spec(name, values)


@given(
    st.builds(
        Fields,
        st.integers(),
        st.floats(allow_nan=False),
        st.booleans(),
        st.sampled_from(["ring", "native"]),
        _words,
    )
)
def test_fields_survive_text(fields: Fields) -> None:
    text = str(spec_of("x", fields))
    assert Fields(**convert_fields(Fields, parse(text).values)) == fields


def test_values_that_code_has_set_are_checked_as_texts_are() -> None:
    check_values("fields", Fields(staleness=0, share=1, label=""))
    wrong: list[tuple[Any, str]] = [
        (Fields(staleness=0.5), "staleness: expected a whole number, got 0.5"),  # type: ignore[arg-type]
        (Fields(staleness=True), "staleness: expected a whole number, got True"),
        (Fields(share="much"), "share: expected a number, got 'much'"),  # type: ignore[arg-type]
        (Fields(overlap=1), "overlap: expected True or False, got 1"),  # type: ignore[arg-type]
        (Fields(label=3), "label: expected a text, got 3"),  # type: ignore[arg-type]
        (Fields(collective="rings"), "unknown value for collective 'rings'"),  # type: ignore[arg-type]
    ]
    for fields, message in wrong:
        with pytest.raises(UsageError, match=f"fields: {message}"):
            check_values("fields", fields)
