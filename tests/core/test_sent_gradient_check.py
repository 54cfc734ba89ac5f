"""Whether gradients that were sent have been changed since: writes, contents, types."""

import pytest
import torch
from torch import nn

from paceline.core.sent_gradient_check import WATCHED_STEPS, SentGradients
from paceline.interfaces.buckets import make_buckets


def buckets_of(dtype=torch.float32):
    """Two buckets, of one and of two tensors, with gradients in them."""
    torch.manual_seed(0)
    parameters = [
        (name, nn.Parameter(torch.zeros(size, dtype=dtype)))
        for name, size in (("a", 3), ("b", 5), ("c", 2))
    ]
    buckets = make_buckets(parameters, [[0], [1, 2]])
    for bucket in buckets:
        bucket.buffer.copy_(torch.randn(bucket.buffer.shape, dtype=dtype))
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            parameter.grad = view
    return buckets


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128],
    ids=str,
)
def test_what_was_written_counts_and_not_that_it_was(dtype):
    said = []
    sent, buckets = SentGradients(said.append), buckets_of(dtype)
    _, second = buckets
    sent.remember(buckets)
    assert sent.changed(buckets) is None
    assert not said
    for _ in range(2):
        sent.remember(buckets)
        second.parameters[0].grad.mul_(1.0)
        assert sent.changed(buckets) is None
    (sentence,) = said
    assert "clip_norm" in sentence
    for change in (
        lambda: second.parameters[0].grad.mul_(0.5),
        lambda: second.parameters[0].grad.neg_(),
        lambda: second.parameters[1].grad[-1].add_(1),
        lambda: second.buffer.zero_(),
    ):
        sent.remember(buckets)
        change()
        assert sent.changed(buckets) == "b"
        second.buffer.copy_(torch.randn(second.buffer.shape, dtype=dtype))


def test_another_tensor_in_its_place_is_named():
    sent, buckets = SentGradients(print), buckets_of()
    sent.remember(buckets)
    parameter = buckets[1].parameters[1]
    parameter.grad = parameter.grad.clone()
    assert sent.changed(buckets) == "c"
    parameter.grad = None  # zero_grad: nothing that could be taken for the gradient
    assert sent.changed(buckets) is None


def test_contents_are_summed_up_in_the_first_steps_and_while_scripts_write(monkeypatch):
    sent, buckets = SentGradients(lambda sentence: None), buckets_of()

    def step(write):
        sent.remember(buckets)
        if write:
            buckets[0].buffer.mul_(1.0)
        return bool(sent._contents), sent.changed(buckets)

    for _ in range(3 * WATCHED_STEPS):
        assert step(write=True) == (True, None)
    for _ in range(WATCHED_STEPS):
        assert step(write=False) == (True, None)
    assert step(write=False) == (False, None)
    # nothing to compare with: a write is taken for a change, as nothing else is safe
    assert step(write=True) == (False, "a")
