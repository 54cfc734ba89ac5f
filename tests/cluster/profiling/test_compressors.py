"""What coding takes, and what it gains and loses, of compressors that are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from paceline import compression
from paceline.cluster.profiling import (
    CompressorCost,
    GradientDump,
    NotApplicable,
    coding_times,
    compressor_costs,
)
from paceline.cluster.profiling import compressors as coding
from paceline.cluster.profiling.compressors import (
    CompressorBenchmark,
    measure_coding,
    pays_below,
    repeat,
    traffic,
)
from paceline.compression import (
    COMPRESSORS,
    GradientCompression,
    Leg,
    NoCompression,
    full_spec,
    make,
)
from paceline.errors import UsageError
from tests.cluster.profiling.toys import (
    CLOCK,
    DECODE,
    ENCODE,
    PER_WORKER,
    SETTLED,
    Half,
    Slow,
)

SHAPES = ((48, 40), (40,), (30, 8, 9), ())


def gradient(seed: int = 0, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"tensor {i}", scale * torch.randn(shape, generator=generator))
        for i, shape in enumerate(SHAPES)
    ]


def tensors(named: list[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for _, tensor in named]


def kept(folder, *gradients) -> GradientDump:
    found = GradientDump(folder, len(gradients))
    for named in gradients:
        found.keep([name for name, _ in named], tensors(named))
    return found


@pytest.fixture
def toys(monkeypatch):
    for toy in (Slow, Half):
        monkeypatch.setitem(compression.COMPRESSORS, toy.name, toy)


def test_seconds_are_those_of_the_compressor_alone():
    times = measure_coding(Slow(), gradient(), CLOCK)
    assert (times.encode, times.decode, times.decode_per_worker) == pytest.approx(
        (ENCODE, DECODE, PER_WORKER)
    )
    assert times.after(5) == pytest.approx(DECODE + 5 * PER_WORKER)
    once = CompressorBenchmark(Slow(), gradient(), 5, CLOCK).mean(tensors(gradient()))
    assert (once.first, once.between, once.last) == pytest.approx(
        (ENCODE, DECODE, 5 * PER_WORKER)
    )


def test_a_compressor_is_timed_as_it_is_long_after_its_start():
    times = measure_coding(
        GradientCompression(Slow(), warmup_steps=1000), gradient(), CLOCK
    )
    assert times == measure_coding(Slow(), gradient(), CLOCK)
    assert times.encode == pytest.approx(ENCODE)


@pytest.mark.parametrize("workers", [2, 3])
def test_collectives_that_are_made_up_are_true_ones(workers):
    """All workers' gradients are equal, so the mean is one of them."""
    for compressor in (Slow(), NoCompression()):
        coders = CompressorBenchmark(
            compressor, gradient(), workers, CLOCK, coding=workers
        )
        coded = coders.mean(tensors(gradient()))
        for result, wanted in zip(coders.result, tensors(gradient()), strict=True):
            assert torch.allclose(result, wanted, atol=1e-6)
        legs = compressor.wire_bytes(SHAPES, torch.float32, workers)
        assert coded.legs == list(legs)
    few = CompressorBenchmark(NoCompression(), gradient(), 7, CLOCK)
    few.mean(tensors(gradient()))
    for result, wanted in zip(few.result, tensors(gradient()), strict=True):
        assert torch.allclose(result, wanted, atol=1e-6)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_codes_are_as_large_as_every_compressor_says(name, monkeypatch):
    monkeypatch.setattr(coding, "REPEATS", 1)
    compressor = make(SETTLED.get(name, name)).steady_state()
    coded = repeat(
        CompressorBenchmark(compressor, gradient(), 2, CLOCK), tensors(gradient())
    )
    said = compressor.code.wire_bytes(SHAPES, torch.float32, 2)
    assert traffic(coded.legs, 2) == pytest.approx(traffic(said, 2))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_full_spec_is_of_the_same_compressor(name):
    for text in (name, f"{name}:warmup_steps=9") if name != "none" else (name,):
        settled = make(text).steady_state()
        again = make(full_spec(make(text)))
        assert again.steady_state() == settled
        assert full_spec(again) == full_spec(settled)


def test_full_specs_tell_defaults():
    assert full_spec(
        GradientCompression(compression.BF16(), error_feedback=True, decay=0.5)
    ) == ("bf16:error_feedback=true,decay=0.5")
    assert (
        full_spec(GradientCompression(compression.BF16()))
        == "bf16:error_feedback=false"
    )


def test_traffic_is_that_of_rings():
    legs = [Leg("sum", 100), Leg("gather", 10), Leg("all-to-all", 40)]
    assert traffic(legs, 4) == pytest.approx(2 * 75 + 3 * 10 + 30)


def test_it_pays_below_where_both_take_equally_long():
    dense, compressed, coding = 1000.0, 250.0, 3.0
    bandwidth = pays_below(dense, compressed, coding)
    assert bandwidth is not None
    assert dense / bandwidth == pytest.approx(coding + compressed / bandwidth)
    assert pays_below(1000.0, 1000.0, 0.0) is None
    assert pays_below(1000.0, 250.0, 0.0) == math.inf


def test_times_are_by_full_specs_and_of_the_gradient_that_was_kept(tmp_path):
    found = coding_times([make("bf16")], kept(tmp_path, gradient()))
    assert list(found) == [full_spec(make("bf16"))]
    assert found[full_spec(make("bf16"))].encode > 0


def test_a_price_is_of_bytes_and_errors_of_these_gradients(toys, tmp_path):
    elements = sum(math.prod(shape) for shape in SHAPES)
    steps = kept(tmp_path, *(gradient(seed) for seed in range(6)))
    begun = []
    lossy, corrected = compressor_costs(
        ["half", "half:error_feedback=true"], steps, 4, begun.append
    )
    assert begun == ["half", "half:error_feedback=true"]
    assert isinstance(lossy, CompressorCost)
    assert isinstance(corrected, CompressorCost)
    assert lossy.dense_bytes == 4 * elements
    assert lossy.code_bytes == 2 * elements
    assert lossy.ratio == 2
    assert lossy.dense_traffic_bytes == pytest.approx(2 * 3 / 4 * 4 * elements)
    assert lossy.traffic_bytes == pytest.approx(lossy.dense_traffic_bytes / 2)
    assert lossy.error == pytest.approx(0.5, abs=0.01)
    assert lossy.error_of_sum == pytest.approx(0.5, abs=0.01)
    assert lossy.steps == 6
    assert corrected.error == pytest.approx(0.5, abs=0.01)
    # What is left of steps before: 1/2 of the last, 1/4 of the one before, ...
    left = math.sqrt(sum(0.25**n for n in range(1, 7)) / 6)
    assert corrected.error_of_sum == pytest.approx(left, abs=0.02)


def test_parts_of_others_are_really_theirs(toys, tmp_path):
    (row,) = compressor_costs(["slow"], kept(tmp_path, gradient()), 8)
    assert isinstance(row, CompressorCost)
    assert row.error < 1e-6


def test_what_changes_nothing_does_not_suit(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    rows = list(compressor_costs(["none", "bf16"], kept(folder, gradient()), 8))
    assert [type(row) for row in rows] == [NotApplicable, CompressorCost]
    assert rows[0].reason.startswith("sends every tensor of this model as it is")


@dataclass(frozen=True, kw_only=True)
class WithMomentum(Half):
    """Has one of its own."""

    name = "with-momentum"

    def check_optimizer(self, optimizer):
        if optimizer.param_groups[0]["momentum"]:
            raise UsageError(f"{type(optimizer).__name__} has a momentum, too")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_does_not_suit_the_optimizer_is_said(momentum, monkeypatch, tmp_path):
    monkeypatch.setitem(COMPRESSORS, WithMomentum.name, WithMomentum)
    steps = kept(tmp_path, gradient())
    assert steps.optimizer() is None
    parameter = torch.nn.Parameter(torch.zeros(1))
    steps.keep_optimizer(torch.optim.SGD([parameter], momentum=momentum))
    (row,) = compressor_costs(["with-momentum"], steps, 2)
    if momentum:
        assert isinstance(row, NotApplicable)
        assert row.reason == "SGD has a momentum, too"
    else:
        assert isinstance(row, CompressorCost)


def test_gradients_that_are_not_finite_are_left_out(toys, tmp_path):
    steps = kept(tmp_path, gradient(scale=math.inf), gradient(1), gradient(2))
    (row,) = compressor_costs(["half"], steps, 2)
    assert isinstance(row, CompressorCost)
    assert row.steps == 2


def test_nothing_to_price_is_said(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="no gradients were seen"):
        list(compressor_costs(["bf16"], GradientDump(empty), 8))
    bad = tmp_path / "bad"
    bad.mkdir()
    with pytest.raises(UsageError, match="1 recorded gradients"):
        list(compressor_costs(["bf16"], kept(bad, gradient(scale=math.nan)), 8))
    with pytest.raises(UsageError, match="unknown compression 'bf61'"):
        list(compressor_costs(["bf61"], kept(tmp_path, gradient()), 8))
