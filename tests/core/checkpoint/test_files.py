"""Nested states as data, and back: nothing is mixed up, nothing changes its type."""

import enum
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.checkpoint import files
from paceline.core.checkpoint.files import as_data
from paceline.errors import UsageError
from tests.support.profiles import examples


def there_and_back(state):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.pt")
        files.write({"x": as_data(state, "x")}, file)
        return files.read(file)["x"]


def one(value):
    return torch.tensor([float(value)])


@pytest.mark.parametrize(
    "state",
    [
        {"a/b": one(1), "a": {"b": one(2)}},
        {1: one(1), "1": one(2)},
        {"a~2": one(1), "a": one(2), "a/": one(3), "": {"": one(4)}},
        {"": {"structure": one(1)}, "/structure": one(2)},
        [(one(1),), [one(2)], {0: one(3), (0, "0"): one(4)}],
    ],
    ids=str,
)
def test_entries_whose_paths_look_alike_are_kept_apart(state):
    def values(found):
        if isinstance(found, torch.Tensor):
            return found.item()
        if isinstance(found, dict):
            return {key: values(entry) for key, entry in found.items()}
        return type(found)(values(entry) for entry in found)

    assert values(there_and_back(state)) == values(state)


KEYS = st.one_of(
    st.text("ab/~1", max_size=3), st.integers(0, 2), st.none(), st.tuples(st.text("a/"))
)
STATES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        st.text(max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=8,
)


@given(STATES)
@settings(max_examples=examples(60))
def test_what_is_data_comes_back_as_it_was(state):
    assert repr(there_and_back(state)) == repr(state)


class Phase(enum.IntEnum):
    WARM = 3


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(1.5), 1.5),
        (np.float32(0.5), 0.5),
        (np.int64(-7), -7),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("min"), "min"),
        (Phase.WARM, 3),
        (Name("rel"), "rel"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_and_texts_of_other_types_become_pythons(value, expected):
    found = there_and_back({"best": value, value: [value]})
    assert found == {"best": expected, expected: [expected]}
    assert type(found["best"]) is type(expected)


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3).T, np.array(4, "int32"), np.array([], "bool")],
    ids=str,
)
def test_arrays_stay_arrays(array):
    found = there_and_back((array, 1))[0]
    assert isinstance(found, np.ndarray)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert (found == array).all()


def test_a_reduce_on_plateau_fed_with_numpy_goes_on():
    parameter = torch.nn.Parameter(torch.zeros(1))

    def schedule():
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    first, second = schedule(), schedule()
    for metric in (2.0, 1.0):
        first.step(np.float64(metric))
    second.load_state_dict(there_and_back(first.state_dict()))
    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, object()]}, "cannot save x/a/1: .* got object"),
        ({"a": 1j}, "cannot save x/a: .* got complex"),
        ({"a": {1, 2}}, "cannot save x/a: .* got set"),
        ({"a": 2**64}, "cannot save x/a: .* at most 64 bits, got 18446744073709551616"),
        ({"a": np.array(["b"])}, "cannot save x/a: can't convert"),
        ({"a": {(one(1),): 2}}, "cannot save x/a, the key .* got Tensor"),
        ({"a": np.longdouble(1)}, "cannot save x/a: .* got longdouble"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_is_no_data_is_refused_by_its_place(state, message):
    with pytest.raises(UsageError, match=message):
        as_data(state, "x")


def test_a_part_of_a_large_tensor_is_written_alone(tmp_path):
    large = torch.arange(1_000_000.0)
    files.write({"x": as_data({"part": large[3:5]}, "x")}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 10_000
    assert files.read(tmp_path / "x.pt")["x"]["part"].tolist() == [3.0, 4.0]


def test_data_of_one_state_is_not_copied():
    """A model that fits once can be saved."""
    state = {"w": torch.ones(3), "more": [torch.nn.Parameter(torch.ones(2))]}
    data = as_data(state, "x")
    assert data["w"].data_ptr() == state["w"].data_ptr()
    assert data["more"][0].data_ptr() == state["more"][0].data_ptr()
    assert type(data["more"][0]) is torch.Tensor


def test_what_was_read_outlives_its_file(tmp_path):
    files.write({"x": as_data(torch.arange(4.0), "x")}, tmp_path / "x.pt")
    found = files.read(tmp_path / "x.pt")["x"]
    (tmp_path / "x.pt").write_bytes(b"")
    assert found.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_only_what_is_wanted_is_read_and_what_is_missing_is_named(tmp_path):
    files.write({"a": as_data(1, "a"), "b": as_data([2], "b")}, tmp_path / "x.pt")
    assert files.read(tmp_path / "x.pt", ["b"]) == {"b": [2]}
    with pytest.raises(UsageError, match="holds no c"):
        files.read(tmp_path / "x.pt", ["c"])
