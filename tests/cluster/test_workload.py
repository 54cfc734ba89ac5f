"""Workload files: what is kept, what is worked out, and every refusal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.workload import CompressorTimes, Workload, builtin_names
from paceline.errors import UsageError

GOOD: dict[str, Any] = {
    "names": ("a", "b", "c"),
    "sizes": (4, 8, 16),
    "forward": (1.0, 2.0, 3.0),
    "backward": (10.0, 20.0, 30.0),
    "order": (2, 0, 1),
    "update": 0.5,
    "batch": 32.0,
    "source": "made up",
}


def make(**changes: Any) -> Workload:
    return Workload(**(GOOD | changes))


def refusal(**changes: Any) -> str:
    with pytest.raises(UsageError) as caught:
        make(**changes)
    return str(caught.value)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    names = draw(st.lists(st.text(), min_size=1, max_size=6, unique=True))
    n = len(names)
    shapes = draw(
        st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=n, max_size=n)
    )
    itemsizes = draw(
        st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=n, max_size=n)
    )
    sizes = [
        math.prod(shape) * size for shape, size in zip(shapes, itemsizes, strict=True)
    ]
    times = st.builds(
        CompressorTimes,
        encode=st.floats(0, 1e6),
        decode=st.floats(0, 1e6),
        decode_per_worker=st.floats(0, 1e6),
    )
    known = draw(st.booleans())
    seconds = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=n, max_size=n).map(
        tuple
    )
    return Workload(
        names=tuple(names),
        sizes=tuple(sizes)
        if known
        else tuple(draw(st.lists(st.integers(0, 2**53), min_size=n, max_size=n))),
        forward=draw(seconds),
        backward=draw(seconds),
        order=tuple(draw(st.permutations(range(n)))),
        update=draw(st.floats(0, 1e6)),
        batch=draw(st.none() | st.floats(1e-3, 1e6)),
        source=draw(st.text()),
        shapes=tuple(tuple(shape) for shape in shapes) if known else (),
        coding=draw(st.dictionaries(st.text(), times, max_size=3)),
        passes=draw(st.none() | st.integers(1, 64)),
        uses_gradients=draw(st.none() | st.booleans()),
        cores=draw(st.integers(0, 64)),
        input=draw(st.floats(0, 1e6)),
        overhead=draw(st.floats(0, 1e6)),
    )


# ---- what is worked out ----


def test_ready_seconds_and_gradient_bytes_are_in_ready_order() -> None:
    workload = make()
    assert workload.forward_seconds == 6
    assert workload.backward_seconds == 60
    assert workload.gradient_bytes == [16, 4, 8]
    assert workload.ready_seconds == [36, 46, 66]


def test_left_out_the_last_tensor_is_ready_first() -> None:
    workload = Workload(
        names=("a", "b"), sizes=(4, 8), forward=(0.0, 1.0), backward=(2.0, 3.0)
    )
    assert workload.order == (1, 0)
    assert (workload.update, workload.batch, workload.source) == (0.0, None, "")
    assert workload.gradient_bytes == [8, 4]
    assert workload.ready_seconds == [4, 6]


@given(workloads())
def test_ready_seconds_never_fall_and_end_with_the_backward_pass(
    workload: Workload,
) -> None:
    ready = workload.ready_seconds
    assert ready == sorted(ready)
    assert ready[0] >= workload.forward_seconds
    assert ready[-1] == pytest.approx(
        workload.forward_seconds + workload.backward_seconds
    )
    assert sum(workload.gradient_bytes) == sum(workload.sizes)


@given(
    st.lists(st.integers(1, 10**9), min_size=1, max_size=8),
    st.floats(0, 1e3),
    st.floats(0, 1e3),
)
def test_spread_is_by_bytes(sizes: list[int], forward: float, backward: float) -> None:
    names = [f"tensor {i}" for i in range(len(sizes))]
    workload = Workload.spread(names, sizes, forward, backward)
    assert workload.names == tuple(names)
    assert workload.forward_seconds == pytest.approx(forward)
    assert workload.backward_seconds == pytest.approx(backward)
    for size, seconds in zip(sizes, workload.backward, strict=True):
        assert seconds * sum(sizes) == pytest.approx(backward * size)


# ---- what a workload may not be ----


def test_a_workload_has_tensors() -> None:
    message = refusal(names=(), sizes=(), forward=(), backward=(), order=())
    assert "without tensors" in message


def test_names_are_unique() -> None:
    assert "tensor 'b' is listed twice" in refusal(names=("a", "b", "b"))


@pytest.mark.parametrize("key", ["sizes", "forward", "backward"])
def test_every_list_has_a_value_per_tensor(key: str) -> None:
    message = refusal(**{key: (1, 2)})
    assert message == f"{key}: expected 3 values, one per tensor, got 2"


@pytest.mark.parametrize("key", ["sizes", "forward", "backward"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_every_value_is_zero_or_more(key: str, value: float) -> None:
    message = refusal(**{key: (1, value, 3)})
    assert message == f"{key} of tensor 'b': expected zero or more, got {value}"


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (1, 2, 3), (0, 1, 2, 3)])
def test_order_has_every_tensor_once(order: tuple[int, ...]) -> None:
    assert "order: expected each of 0 to 2 once" in refusal(order=order)


@pytest.mark.parametrize("update", [-0.1, math.nan, math.inf])
def test_update_is_zero_or_more(update: float) -> None:
    assert f"update: expected zero or more seconds, got {update}" == refusal(
        update=update
    )


@pytest.mark.parametrize("batch", [0.0, -1.0, math.nan, math.inf])
def test_batch_is_more_than_zero(batch: float) -> None:
    assert f"batch: expected more than zero samples, got {batch}" == refusal(
        batch=batch
    )


@pytest.mark.parametrize("passes", [0, -1])
def test_passes_are_one_or_more(passes: int) -> None:
    assert f"passes: expected one or more an update, got {passes}" == refusal(
        passes=passes
    )


def test_cores_are_none_or_more() -> None:
    assert refusal(cores=-1) == "cores: expected 0 or more, got -1"


def test_a_step_has_all_of_its_passes_and_one_update() -> None:
    assert make().compute_seconds == 66.5
    assert make(passes=3).compute_seconds == 3 * 66 + 0.5
    longer = make(passes=3, input=7.0, overhead=2.0)
    assert longer.compute_seconds == 7 + 2 + 3 * 66 + 0.5


@pytest.mark.parametrize("shapes", [((1,),), ((1,),) * 4])
def test_shapes_are_of_all_tensors_or_of_none(shapes) -> None:
    message = refusal(shapes=shapes)
    assert message == (
        f"shapes: expected 3, one per tensor, or none at all, got {len(shapes)}"
    )


@pytest.mark.parametrize(
    "shape", [(3,), (2, 3), (0,), (-2, -1), (16,)], ids=lambda shape: str(shape)
)
def test_shapes_are_those_of_the_bytes(shape) -> None:
    """Of 8 bytes: 8, 4, 2 or 1 elements."""
    message = refusal(shapes=((1,), shape, (4,)))
    assert "shapes: tensor 'b' of 8 bytes cannot have shape" in message
    assert "expected one with 1, 2, 4, 8 or 16 bytes an element" in message


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_times_of_coding_are_zero_or_more(value) -> None:
    with pytest.raises(UsageError, match="coding: decode: expected"):
        CompressorTimes(encode=0.0, decode=value, decode_per_worker=0.0)


# ---- another model's ----


def test_the_same_model_matches() -> None:
    make().check_matches(["a", "b", "c"], [4, 8, 16], "file.json")


@pytest.mark.parametrize(
    ("names", "sizes", "first"),
    [
        (["a", "x", "y"], [4, 8, 16], "tensor 1 of this model is 'x' of 8 bytes"),
        (["a", "b", "c"], [4, 8, 12], "tensor 2 of this model is 'c' of 12 bytes"),
        (["a", "b"], [4, 8], "tensor 2 of this model is missing"),
        (["a", "b", "c", "d"], [4, 8, 16, 1], "in the profile missing"),
    ],
    ids=["name", "size", "fewer", "more"],
)
def test_another_model_is_told_the_first_tensor_that_differs(
    names: list[str], sizes: list[int], first: str
) -> None:
    with pytest.raises(UsageError, match="profile of another model") as caught:
        make().check_matches(names, sizes, "file.json")
    message = str(caught.value)
    assert message.startswith("file.json is the profile")
    assert first in message
    assert "paceline profile" in message


# ---- files ----


@given(workload=workloads())
def test_a_file_gives_back_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, workload: Workload
) -> None:
    path = tmp_path_factory.mktemp("workloads") / "workload.json"
    workload.save(path)
    assert Workload.load(path) == workload
    assert Workload.load(str(path)) == workload


def file_with(tmp_path: Path, **changes: Any) -> Path:
    """A good file with keys of its workload changed, or with None left out."""
    workload = {k: v for k, v in (GOOD | changes).items() if v is not None}
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"format": "paceline workload 1", "workload": workload}))
    return path


def refused_file(path: Path | str) -> str:
    with pytest.raises(UsageError) as caught:
        Workload.load(path)
    return str(caught.value)


def test_a_file_may_leave_out_what_has_a_default(tmp_path: Path) -> None:
    path = file_with(tmp_path, order=None, update=None, batch=None, source=None)
    assert Workload.load(path) == make(
        order=(2, 1, 0), update=0.0, batch=None, source=""
    )


def test_what_is_not_known_is_not_in_the_file(tmp_path: Path) -> None:
    """So files are what they were before anybody asked for shapes."""
    make().save(tmp_path / "workload.json")
    content = json.loads((tmp_path / "workload.json").read_text())
    assert content["workload"].keys() == GOOD.keys()


@pytest.mark.parametrize("key", ["names", "sizes", "forward", "backward"])
def test_a_file_without_a_key_says_which(tmp_path: Path, key: str) -> None:
    message = refused_file(file_with(tmp_path, **{key: None}))
    assert "workload.json is not a workload" in message
    assert f"`{key}`" in message
    assert "paceline profile SCRIPT" in message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("names", ["a", 1, "c"], "names[1]"),
        ("sizes", [4, 8.5, 16], "sizes[1]"),
        ("sizes", [4, -8, 16], "sizes of tensor 'b': expected zero or more, got -8"),
        ("forward", "fast", "forward"),
        ("forward", [1, 2], "forward: expected 3 values"),
        ("backward", [1, -2, 3], "backward of tensor 'b'"),
        ("order", [0, 1, 1], "order: expected each of 0 to 2 once"),
        ("update", -1, "update: expected zero or more"),
        ("batch", 0, "batch: expected more than zero"),
        ("source", 3, "source"),
        ("shapes", [[1], [3], [4]], "shapes: tensor 'b' of 8 bytes"),
        ("shapes", [[1], [1.5], [4]], "shapes"),
        ("coding", {"int8": {"encode": 1}}, "decode"),
    ],
)
def test_a_file_with_a_bad_value_says_where(
    tmp_path: Path, key: str, value: Any, expected: str
) -> None:
    message = refused_file(file_with(tmp_path, **{key: value}))
    assert "workload.json is not a workload" in message
    assert expected in message


def test_a_file_with_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    message = refused_file(file_with(tmp_path, forwards=[1.0, 2.0, 3.0]))
    assert "unknown key 'forwards'. Did you mean 'forward'?" in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not a workload"),
        (b"not JSON", "is not a workload"),
        (b"\xff\xfe\x00", "is not a workload"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `format`"),
        (b'{"format": "paceline workload 1"}', "missing required field `workload`"),
        (
            b'{"format": "paceline workload 2", "workload": {}}',
            "its format is 'paceline workload 2', not 'paceline workload 1'",
        ),
    ],
)
def test_what_is_no_workload_file(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    message = refused_file(path)
    assert "other.json is not a workload" in message
    assert expected in message


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no such folder" / "workload.json"):
        with pytest.raises(UsageError, match="cannot write the workload") as caught:
            make().save(path)
        assert str(path) in str(caught.value)


def test_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    message = refused_file(tmp_path / "none.json")
    assert "cannot read the workload" in message
    assert "none.json" in message


def test_an_unknown_built_in_gets_a_suggestion() -> None:
    message = refused_file("resnet-50")
    assert "unknown built-in workload 'resnet-50'. Did you mean 'resnet50'?" in message
    for name in builtin_names():
        assert name in message
