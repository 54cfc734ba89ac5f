"""Workload files: what is kept, what is worked out, and every refusal; and those that come with
paceline are what their scripts write.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import workloads as workload_scripts
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


def test_a_step_has_all_of_its_passes_and_one_update() -> None:
    assert make().compute_seconds == 66.5
    assert make(passes=3).compute_seconds == 3 * 66 + 0.5
    longer = make(passes=3, input=7.0, overhead=2.0)
    assert longer.compute_seconds == 7 + 2 + 3 * 66 + 0.5


# ---- what a workload may not be ----

LISTS = ("sizes", "forward", "backward")
NO_NUMBERS = (-1.0, math.nan, math.inf)
NO_TENSORS = dict.fromkeys(("names", *LISTS, "order"), ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (NO_TENSORS, "without tensors"),
        ({"names": ("a", "b", "b")}, "'b' is listed twice"),
        *(({key: (1, 2)}, f"{key}: ... 3 values ... got 2") for key in LISTS),
        *(
            ({key: (1, value, 3)}, f"{key} of tensor 'b' ... got {value}")
            for key in LISTS
            for value in NO_NUMBERS
        ),
        *(
            ({"order": order}, "order: ... each of 0 to 2 once")
            for order in ((0, 1), (0, 1, 1), (1, 2, 3), (0, 1, 2, 3))
        ),
        *(({"update": value}, f"update: ... got {value}") for value in NO_NUMBERS),
        *(
            ({"batch": value}, f"batch: ... got {value}")
            for value in (0.0, *NO_NUMBERS)
        ),
        *(({"passes": passes}, f"passes: ... got {passes}") for passes in (0, -1)),
        ({"cores": -1}, "cores: ... got -1"),
        *(
            ({"shapes": ((1,),) * count}, f"shapes: expected 3 ... got {count}")
            for count in (1, 4)
        ),
        # Of 8 bytes: 8, 4, 2 or 1 elements.
        *(
            ({"shapes": ((1,), shape, (4,))}, "tensor 'b' of 8 bytes cannot have shape")
            for shape in ((3,), (2, 3), (0,), (-2, -1), (16,))
        ),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    found = refusal(**changes)
    assert all(part in found for part in words.split(" ... ")), found


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_times_of_coding_are_zero_or_more(value) -> None:
    with pytest.raises(UsageError, match="coding: decode: expected"):
        CompressorTimes(encode=0.0, decode=value, decode_per_worker=0.0)


# ---- another model's ----


def test_the_same_model_matches() -> None:
    make().check_matches(["a", "b", "c"], [4, 8, 16], "file.json")


@pytest.mark.parametrize(
    ("names", "sizes", "first"),
    [
        ("axy", [4, 8, 16], "tensor 1 of this model is 'x' of 8 bytes"),
        ("abc", [4, 8, 12], "tensor 2 of this model is 'c' of 12 bytes"),
        ("ab", [4, 8], "tensor 2 of this model is missing"),
        ("abcd", [4, 8, 16, 1], "in the profile missing"),
    ],
)
def test_another_model_is_told_the_first_tensor_that_differs(
    names: str, sizes: list[int], first: str
) -> None:
    with pytest.raises(UsageError, match=r"file.json .* profile") as it:
        make().check_matches([*names], sizes, "file.json")
    assert first in str(it.value)
    assert "paceline profile" in str(it.value)


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({key: None}, f"`{key}`") for key in ("names", *LISTS)),
        ({"names": ["a", 1, "c"]}, "names[1]"),
        ({"sizes": [4, 8.5, 16]}, "sizes[1]"),
        ({"sizes": [4, -8, 16]}, "sizes of tensor 'b'"),
        ({"forward": "fast"}, "forward"),
        ({"source": 3}, "source"),
        ({"shapes": [[1], [1.5], [4]]}, "shapes"),
        ({"coding": {"int8": {"encode": 1}}}, "decode"),
        ({"forwards": [1.0]}, "unknown key 'forwards'. Did you mean 'forward'?"),
    ],
)
def test_a_file_with_a_key_that_is_wrong_or_missing_says_which(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    message = refused_file(file_with(tmp_path, **changes))
    assert "workload.json is not a workload" in message
    assert "paceline profile SCRIPT" in message
    assert words in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        *((content, "") for content in (b"", b"not JSON", b"\xff\xfe\x00")),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `format`"),
        (b'{"format": "paceline workload 1"}', "missing required field `workload`"),
        (b'{"format": "paceline workload 2", "workload": {}}', "paceline workload 2"),
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


def test_paths_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no such folder" / "workload.json"):
        with pytest.raises(UsageError, match="cannot write the workload") as caught:
            make().save(path)
        assert str(path) in str(caught.value)
    message = refused_file(tmp_path / "none.json")
    assert "cannot read the workload" in message
    assert "none.json" in message


def test_an_unknown_built_in_gets_a_suggestion() -> None:
    message = refused_file("resnet-50")
    assert "unknown built-in workload 'resnet-50'. Did you mean 'resnet50'?" in message
    assert all(name in message for name in builtin_names())


# ---- those that come with paceline ----

RATE = workload_scripts.ASSUMED_RATE


def test_each_has_a_script() -> None:
    assert builtin_names() == sorted(workload_scripts.WORKLOADS)


@pytest.mark.parametrize("name", workload_scripts.WORKLOADS)
def test_a_script_writes_the_packaged_file_byte_for_byte(
    name: str, tmp_path: Path
) -> None:
    output = tmp_path / "written.json"
    workload_scripts.WORKLOADS[name]().save(output)
    packaged = resources.files("paceline.cluster") / "workloads" / f"{name}.json"
    again = f"run: python -m benchmarks.workloads {name}"
    assert output.read_bytes() == packaged.read_bytes(), again


@pytest.mark.parametrize(
    ("name", "tensors", "parameters", "batch"),
    [
        ("googlenet-k80", 64, 13_379_136, 64),
        ("resnet50", 161, 25_557_032, 32),
        ("vgg16", 32, 138_357_544, 32),
        ("bert-base", 199, 109_482_240, 32),
        ("gpt-10m", 39, 10_745_088, 32),
    ],
)
def test_tensors_are_as_published(
    name: str, tensors: int, parameters: int, batch: int
) -> None:
    workload = Workload.load(name)
    assert len(workload.names) == tensors
    assert sum(workload.sizes) == 4 * parameters
    assert workload.batch == batch
    assert workload.update == 0
    assert workload.source


def test_googlenet_is_the_published_trace() -> None:
    workload = Workload.load("googlenet-k80")
    assert workload.names == tuple(f"layer{i}" for i in range(64))
    assert workload.order == tuple(range(64))[::-1]
    # The sum of the trace's microseconds; the forward pass is taken as half of it.
    assert workload.backward_seconds == pytest.approx(0.201531926, abs=1e-12)
    assert workload.forward_seconds == pytest.approx(0.100765963, abs=1e-12)
    # The first convolution's gradient is the last to be ready, the classifier's the first.
    assert workload.gradient_bytes[0] == 4 * 1_025_024
    assert workload.gradient_bytes[-1] == 4 * 9_472
    first = workload.ready_seconds[0] - workload.forward_seconds
    assert first == pytest.approx(456.416e-6, abs=1e-12)
    assert workload.backward[0] == 14_744.1 / 1e6


@pytest.mark.parametrize(
    ("name", "multiplications", "tolerance"),
    [
        # 10^9 for one image, as torchvision's pages give them with three digits.
        ("resnet50", 4.09e9, 1e-3),
        ("vgg16", 15.47e9, 1e-3),
        # Per token of a layer: four square matrices, two of four times their size, and
        # a row of the two products of attention; the pooler sees one token.
        (
            "bert-base",
            12 * 128 * (12 * 768**2 + 2 * 128 * 768) + 768**2,
            1e-12,
        ),
    ],
)
def test_forward_is_as_published(
    name: str, multiplications: float, tolerance: float
) -> None:
    workload = Workload.load(name)
    flops = 2 * multiplications * 32
    assert workload.forward_seconds * RATE == pytest.approx(flops, rel=tolerance)


def test_backward_is_twice_forward_but_for_the_first_layer() -> None:
    for name in ("resnet50", "vgg16"):
        workload = Workload.load(name)
        # Images need no gradient. Nothing but its first tensors belongs to a first layer.
        outputs = 112 * 112 * 64 * 49 if name == "resnet50" else 224 * 224 * 64 * 9
        saved = 2 * 32 * outputs * 3 / RATE
        assert workload.backward_seconds == pytest.approx(
            2 * workload.forward_seconds - saved
        )
    # Embeddings multiply nothing.
    workload = Workload.load("bert-base")
    assert workload.backward_seconds == pytest.approx(2 * workload.forward_seconds)


@pytest.mark.parametrize(
    ("name", "make", "example"),
    [
        # Smaller inputs and a narrower BERT have the same graph.
        ("resnet50", lambda: workload_scripts.ResNet50().eval(), (1, 3, 32, 32)),
        ("bert-base", lambda: workload_scripts.BertBase(width=24), (1, 2)),
    ],
)
def test_order_is_that_of_tensors_with_values(
    name: str, make: Any, example: tuple[int, ...]
) -> None:
    with torch.device("meta"):  # initial values would take most of the time
        module = make()
    module.to_empty(device="cpu")
    order: list[str] = []
    for tensor, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, tensor=tensor: order.append(tensor)
        )
    dtype = torch.float if name == "resnet50" else torch.long
    output = module(torch.zeros(example, dtype=dtype))
    sum(part.sum() for part in [*output]).backward()
    workload = Workload.load(name)
    assert order == [workload.names[i] for i in workload.order]
