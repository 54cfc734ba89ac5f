"""`paceline list`: what it says of the registries' rows."""

import pytest

from paceline.cli.list import list_
from paceline.cli.registry_entries import ENTRIES, settings_keys
from paceline.errors import UnknownNameError

ROWS = [
    pytest.param(entry, id=f"{kind}-{entry.name}")
    for kind, entries in ENTRIES.items()
    for entry in entries()
]


@pytest.mark.parametrize("entry", ROWS)
def test_a_description_is_complete(entry):
    assert 0 < len(entry.summary.purpose) <= 80
    assert entry.summary.purpose.endswith(".")
    if entry.consistency:
        assert entry.use_when
    assert all(text for _, text in entry.facts)
    assert all(limit.endswith(".") for limit in entry.summary.limits)


@pytest.mark.parametrize("entry", ROWS)
def test_each_key_has_a_type_a_default_and_a_meaning(entry):
    for key in entry.keys:
        assert key.type, key
        assert key.default, key
        assert key.meaning.endswith("."), key


def test_each_key_of_all_methods_has_a_meaning():
    assert all(key.meaning.endswith(".") for key in settings_keys())


@pytest.mark.parametrize("kind", ENTRIES)
def test_the_table_has_a_line_for_each(kind, capsys):
    list_(kind)
    lines = capsys.readouterr().out.splitlines()
    starts = [line.split()[0] for line in lines[2:-2]]
    assert starts == [entry.name for entry in ENTRIES[kind]()]


def test_one_is_described(capsys):
    list_("methods", "gssp")
    said = capsys.readouterr().out
    for part in ("Sun et al.", "number_of_groups", "1.25", "waits for", "--survive"):
        assert part in said
    assert "`" not in said


def test_a_misspelt_name_is_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'gssp'"):
        list_("methods", "gsp")
