"""The workloads that come with paceline are what their scripts write."""

from __future__ import annotations

import itertools
import math
import runpy
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cluster.workload import Workload, builtin_names

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "workloads"
SCRIPT_OF = {
    "bert-base": "bert_base.py",
    "googlenet-k80": "googlenet_k80.py",
    "gpt-10m": "gpt_10m.py",
    "resnet50": "resnet50.py",
    "vgg16": "vgg16.py",
}
RATE = 1e13  # FLOP/s, that of the scripts


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder on the path, as it is when a script of it runs."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    yield SCRIPTS
    for name in ("common", "models"):
        sys.modules.pop(name, None)


def test_each_has_a_script() -> None:
    assert builtin_names() == sorted(SCRIPT_OF)


@pytest.mark.parametrize("name", sorted(SCRIPT_OF))
def test_a_script_writes_the_packaged_file_byte_for_byte(
    name: str, scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "written.json"
    script = str(scripts / SCRIPT_OF[name])
    monkeypatch.setattr(sys, "argv", [script, "--output", str(output)])
    runpy.run_path(script, run_name="__main__")
    packaged = resources.files("paceline.cluster") / "workloads" / f"{name}.json"
    assert output.read_bytes() == packaged.read_bytes(), f"run: python {script}"


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
        ("resnet50", lambda models: models["ResNet50"]().eval(), (1, 3, 32, 32)),
        ("bert-base", lambda models: models["BertBase"](width=24), (1, 2)),
    ],
)
def test_order_is_that_of_tensors_with_values(
    name: str, make: Any, example: tuple[int, ...], scripts: Path
) -> None:
    with torch.device("meta"):  # initial values would take most of the time
        module = make(runpy.run_path(str(scripts / "models.py")))
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


def test_times_are_finite_and_ready_times_never_fall() -> None:
    for name in builtin_names():
        ready = Workload.load(name).ready_seconds
        assert all(a <= b for a, b in itertools.pairwise(ready))
        assert math.isfinite(ready[-1])
