"""Tensors that take no part in a backward pass: buckets do not wait for them."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.errors import GradientError, WorkerFailedError
from paceline.methods.bsp import BSP, BSPWorker
from tests.support.simulations import run

LAYERS = 6


class Model(nn.Module):
    """Layers, one that is computed again in backward, and one more that is used or not;
    counts the gradients of this pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.again = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)
        self.came = 0
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._count)

    def _count(self, _):
        self.came += 1

    def forward(self, x, extra=True, reentrant=None):
        for layer in self.layers:
            x = layer(x).tanh()
        if reentrant is None:
            x = self.again(x)
        else:
            x = checkpoint(self.again, x, use_reentrant=reentrant)
            # The first gradient is not the checkpoint's: that would be refused.
            x = x * self.extra.bias
        return (self.extra(x) if extra else x).square().sum()


@dataclass(frozen=True, kw_only=True)
class Watched(BSP):
    """Notes how many gradients there were when each bucket left."""

    name: ClassVar[str] = "watched"
    model: Model = None
    left: list[int] = field(default_factory=list)
    order: list[tuple[str, ...]] = field(default_factory=list)

    def start(self, run):
        return WatchedWorker(run, self)


class WatchedWorker(BSPWorker):
    def bucket_ready(self, bucket):
        self.method.left.append(self.method.model.came)
        self.method.order.append(bucket.names)
        super().bucket_ready(bucket)


def begin(buckets="wfbp"):
    model = Model()
    method = Watched(model=model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = paceline.distribute(model, inner, method=method, buckets=buckets)
    return model, optimizer, method


def step(model, optimizer, rank=0, **how):
    optimizer.zero_grad()
    model.came = 0
    x = torch.linspace(-1.0, 1.0, 8).view(2, 4) * (rank + 1)
    model(x, **how).backward()
    optimizer.step()


def test_buckets_leave_during_backward_whatever_takes_no_part():
    def body(rank):
        model, optimizer, method = begin()
        left = []
        for number in range(5):
            method.left.clear()
            step(model, optimizer, extra=number < 2)
            left.append(list(method.left))
        optimizer.finish()
        return left

    for _, all_used, first_time, *later in run(2, body):
        tensors = 2 * (LAYERS + 2)
        assert all_used == list(range(1, tensors + 1))
        # That some are unused is known when backward ends.
        assert set(first_time) == {tensors - 2}
        # The two that are unused leave with the first gradient.
        for left in later:
            assert left == [1, 1, *range(1, tensors - 1)]


def test_ranks_that_use_other_tensors_send_in_one_order_and_form_the_mean():
    def body(rank):
        model, optimizer, method = begin()
        for number in range(6):
            step(model, optimizer, rank, extra=(number + rank) % 2 == 0)
        optimizer.finish()
        return method.order, [p.detach() for p in model.parameters()]

    (order, first), (other_order, other) = run(2, body)
    assert order == other_order
    alone = Model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(6):
        plain.zero_grad()
        for rank in range(2):
            x = torch.linspace(-1.0, 1.0, 8).view(2, 4) * (rank + 1)
            (alone(x, extra=(number + rank) % 2 == 0) / 2).backward()
        plain.step()
    for ours, theirs, expected in zip(first, other, alone.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, expected.detach())


@pytest.mark.parametrize("buckets", ["wfbp", "single"])
def test_gradients_of_a_reentrant_checkpoint_are_waited_for(buckets):
    """They are in no graph but the checkpoint's own."""

    def trained(reentrant):
        def body(rank):
            model, optimizer, _ = begin(buckets)
            for number in range(6):
                step(model, optimizer, rank, extra=number < 2, reentrant=reentrant)
            optimizer.finish()
            return [p.detach() for p in model.parameters()]

        return run(2, body)

    for ours, theirs in zip(trained(True)[0], trained(False)[0], strict=True):
        assert torch.equal(ours, theirs)


def test_a_gradient_after_its_bucket_has_left_is_an_error():
    def body(rank):
        model, optimizer, _ = begin()
        for number in range(3):
            step(model, optimizer, extra=number < 1)
        step(model, optimizer, extra=False, reentrant=True)

    with pytest.raises(WorkerFailedError) as caught:
        run(2, body)
    error = caught.value.__cause__
    assert isinstance(error, GradientError)
    assert "'again." in str(error)
    assert "use_reentrant=False" in str(error)


def test_a_gradient_that_was_not_expected_is_taken_while_its_bucket_is_here():
    """One bucket of all leaves last: nothing is lost."""

    def body(rank, reentrant):
        model, optimizer, _ = begin("single")
        for number in range(3):
            step(model, optimizer, rank, extra=number < 1)
        for _ in range(3):
            step(model, optimizer, rank, extra=False, reentrant=reentrant)
        optimizer.finish()
        return [p.detach() for p in model.parameters()]

    ours, theirs = (run(2, lambda rank, r=r: body(rank, r))[0] for r in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_gradient_that_the_script_sets_in_a_hook_is_not_lost_in_silence():
    """Autograd knows nothing of it, and its bucket has left."""

    def body(rank):
        model, optimizer, _ = begin()

        def set_by_hand(_):
            model.extra.weight.grad = torch.ones(4, 4)

        for number in range(4):
            if number == 3:
                weight = model.layers[3].weight
                weight.register_post_accumulate_grad_hook(set_by_hand)
            step(model, optimizer, rank, extra=number < 1)

    with pytest.raises(WorkerFailedError) as caught:
        run(2, body)
    assert isinstance(caught.value.__cause__, GradientError)
    assert "'extra.weight'" in str(caught.value.__cause__)


def test_gradients_of_some_inputs_alone_are_sent_at_once():
    def body(rank):
        model, optimizer, method = begin()
        wanted = [*model.extra.parameters(), *model.layers[0].parameters()]
        for number in range(4):
            optimizer.zero_grad()
            model.came = 0
            method.left.clear()
            inputs = wanted if number else list(model.parameters())
            model(torch.ones(2, 4)).backward(inputs=inputs)
            optimizer.step()
        left = list(method.left)
        optimizer.finish()
        return left, model.again.weight.grad

    for left, unused in run(2, body):
        assert left == [1, *[2] * (2 * LAYERS + 1), 3, 4]
        assert unused is None
