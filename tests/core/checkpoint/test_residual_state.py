"""What compressors keep of each tensor: saved by name, and divided as they say."""

import pytest
import torch

from paceline.compression import GradientCompression
from paceline.compression.casts import BF16
from paceline.compression.quantization import Int8
from paceline.core.checkpoint.worker_state import ResidualState
from paceline.errors import UsageError
from tests.support.one_worker import OneWorker, compressed_average

PARAMETERS = [
    ("weight", torch.nn.Parameter(torch.zeros(2, 2))),
    ("bias", torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))),
]


def owner(compressor, rank=0, steps=0):
    """After some steps of a worker alone, whose gradients are of no round numbers."""
    codes = compressed_average(compressor, rank)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        for name, parameter in PARAMETERS:
            part = torch.randn(parameter.shape, generator=generator)
            send(codes, part.to(parameter.dtype), name)
    return ResidualState(codes, rank, PARAMETERS), codes


def send(codes, part, name):
    """One tensor to itself, through a code; returns what arrives."""
    codes.sum(OneWorker(), part, [part], [name])
    return part


@pytest.mark.parametrize("code", [Int8(), BF16()], ids=lambda code: code.name)
def test_a_worker_goes_on_with_the_same_bits(code):
    saver, codes = owner(
        GradientCompression(code, error_feedback=True), rank=1, steps=3
    )
    loader, again = owner(GradientCompression(code, error_feedback=True), rank=1)
    assert loader.name == saver.name == f"compression.{code.name}"
    saved = saver.save()
    assert set(saved) == {"weight", "bias"}
    loader.load({name: _copied(state) for name, state in saved.items()})
    for _ in range(3):
        gradient = torch.randn(2, 2)
        here = send(codes, gradient.clone(), "weight")
        assert torch.equal(send(again, gradient.clone(), "weight"), here)
        assert not torch.equal(here, gradient)


def _copied(state):
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_the_sum_of_residuals_is_kept(workers):
    parts = [
        owner(GradientCompression(Int8(), error_feedback=True), rank, steps=2)[0].save()
        for rank in (0, 1)
    ]
    whole = sum(part["weight"]["residual"] for part in parts)
    assert whole.abs().max() > 0
    total = torch.zeros(2, 2)
    for rank in range(workers):
        loader, codes = owner(GradientCompression(Int8(), error_feedback=True), rank)
        loader.load(loader.redistribute(iter(parts), workers))
        assert codes.states.keys() == {"weight", "bias"}
        total += codes.states["weight"]["residual"]
    assert torch.allclose(total, whole, atol=1e-7)


def test_a_tensor_that_is_no_parameter_has_no_share():
    _, codes = owner(GradientCompression(BF16(), error_feedback=True))
    send(codes, torch.full((3,), 0.3), "momentum")
    saved = ResidualState(codes, 0, PARAMETERS).save()
    loader, _ = owner(GradientCompression(BF16(), error_feedback=True))
    with pytest.raises(UsageError, match="'momentum'"):
        loader.redistribute([saved], 2)


def test_parts_of_a_parameter_have_their_shares():
    """OSP sends pieces, which are named by the elements that they hold."""
    parts = []
    for rank in (0, 1):
        saver, codes = owner(GradientCompression(BF16(), error_feedback=True), rank)
        send(codes, torch.full((1, 3), 0.3), "weight[1:4]")
        parts.append(saver.save())
    loader, _ = owner(GradientCompression(BF16(), error_feedback=True))
    given = loader.redistribute(iter(parts), 1)["weight[1:4]"]["residual"]
    kept = [part["weight[1:4]"]["residual"] for part in parts]
    assert given.shape == (1, 3)
    assert given.any()
    assert torch.equal(given, kept[0] + kept[1])
