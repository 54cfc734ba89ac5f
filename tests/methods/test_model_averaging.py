"""Means of models: by weight, in float32, and counters by maximum."""

import math
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.communicator import Communicator
from paceline.methods.model_averaging import FlatTensors, ModelAverager
from paceline.runtimes.join import join_runtime
from tests.support.profiles import examples
from tests.support.simulations import run
from tests.support.training import train

KINDS = (torch.float32, torch.bfloat16, torch.complex64)


def tensors_of(rank, seed=0):
    """Parameters of several kinds and shapes, and buffers of all that models have."""
    random = torch.Generator().manual_seed(100 * seed + rank)
    shapes = ((3, 2), (), (4,))
    parameters = [
        [torch.randn(shape, generator=random).to(kind) for shape in shapes]
        for kind in KINDS
    ]
    buffers = [
        torch.randn(5, generator=random),
        torch.randn(2, generator=random).half(),
        torch.tensor(rank),
        torch.tensor([rank == 1, False]),
        torch.zeros(0),
    ]
    return parameters, buffers


def averaged(shares, statistics_shares=None, spoil=None):
    """Each worker's tensors after the mean of all."""

    def body(rank):
        parameters, buffers = tensors_of(rank)
        if rank == spoil:
            for tensor in (*chain.from_iterable(parameters), *buffers[:2]):
                tensor.fill_(math.nan)
        model = ModelAverager(parameters, buffers)
        comm = Communicator(join_runtime(), "test")
        model.mean(comm, shares[rank], statistics_shares and statistics_shares[rank])
        return list(chain.from_iterable(parameters)), buffers

    return run(len(shares), body)


def expected(shares, place):
    """The weighted sum of one of the tensors, in double precision."""
    rows = []
    for rank, share in enumerate(shares):
        parameters, buffers = tensors_of(rank)
        tensor = [*chain.from_iterable(parameters), *buffers][place]
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        rows.append(share * tensor.to(wide))
    return sum(rows)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any))
@settings(max_examples=examples(10))
def test_models_are_averaged_by_weight(weights):
    shares = [weight / sum(weights) for weight in weights]
    for parameters, buffers in averaged(shares):
        for place, tensor in enumerate([*parameters, *buffers[:2]]):
            exact = expected(shares, place)
            # Half precision is rounded once: the sum itself is formed in float32.
            near = exact.to(
                torch.complex64 if tensor.is_complex() else torch.float32
            ).to(tensor.dtype)
            bits = tensor.dtype in (torch.bfloat16, torch.float16)
            limit = torch.finfo(tensor.dtype).eps if bits else 1e-6
            assert ((tensor - near).abs() <= limit * (near.abs() + 1e-3)).all()


def test_a_mean_of_half_precision_is_rounded_once():
    """Added to 1 in bfloat16 each of the small terms would be lost; together they are not."""

    def body(rank):
        tensor = torch.tensor([1.0 if rank == 0 else 2**-8], dtype=torch.bfloat16)
        model = ModelAverager([[tensor]])
        model.mean(Communicator(join_runtime(), "test"), 1.0)
        return tensor.item()

    assert run(5, body) == [1 + 4 / 256] * 5


def test_statistics_may_have_a_weight_of_their_own_and_counters_take_the_maximum():
    shares, others = (0.5, 0.5, 0.0), (0.0, 0.25, 0.75)
    for parameters, buffers in averaged(shares, others):
        torch.testing.assert_close(parameters[0].double(), expected(shares, 0))
        place = len(parameters)
        torch.testing.assert_close(buffers[0].double(), expected(others, place))
        assert buffers[2].item() == 2
        assert buffers[3].tolist() == [True, False]


@pytest.mark.parametrize("spoil", range(3))
def test_a_worker_without_weight_only_learns_the_mean(spoil):
    """Whatever its numbers are: it may have left the training long ago."""
    shares = [0.0 if rank == spoil else 0.5 for rank in range(3)]
    plain = averaged(shares)
    for (parameters, _), (others, _) in zip(
        averaged(shares, spoil=spoil), plain, strict=True
    ):
        for one, other in zip(parameters, others, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("method", "equal_after"),
    [
        ("local-sgd:sync_every=2", {1, 3, 5}),
        ("daso:sync_every=3,delay=0,group=2", {2, 5}),
        ("sel-sync:delta=inf,window=3", {0, 1}),
        ("ds-sync:size=4", {0, 1, 2, 3, 4, 5}),
        ("streaming-diloco:sync_every=4,fragments=1,delay=2", None),
        ("daso:group=2,sync_every=4,delay=3", None),
        ("ds-sync:overlap=step", None),
    ],
)
def test_batchnorm_s_statistics_are_averaged_with_the_parameters(method, equal_after):
    """Counters are the largest: a mean that is late takes no step from one."""
    means, counts = {}, {}

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3))

    def watch(rank, step, model, optimizer):
        means[step, rank] = model[1].running_mean.clone()
        counts[step, rank] = model[1].num_batches_tracked.item()

    for one in train(method, 4, 6, make=make, watch=watch):
        assert one.model[1].num_batches_tracked.item() == 6
    assert all(number == step + 1 for (step, _), number in counts.items())
    equal = {
        step
        for step in range(6)
        if all(torch.equal(means[step, rank], means[step, 0]) for rank in range(4))
    }
    assert equal_after is None or equal == equal_after


def test_a_snapshot_puts_back_every_bit():
    parameters, buffers = tensors_of(0)
    model = ModelAverager(parameters, buffers)
    restore = model.snapshot()
    tensors = [*chain.from_iterable(parameters), *buffers]
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.fill_(1)
    restore()
    assert all(map(torch.equal, tensors, before))


def test_counters_that_were_sent_do_not_set_back_a_worker_that_went_on():
    count = torch.tensor([3, 3])
    model = ModelAverager([], [count])
    model.counters[0].buffer.copy_(torch.tensor([5, 2]))
    model.scatter_counters()
    assert count.tolist() == [5, 3]


def test_messages_follow_parameters_to_other_memory():
    parameter = torch.nn.Parameter(torch.zeros(3))
    flat = FlatTensors([parameter])
    parameter.data = torch.ones(3)
    flat.gather_in()
    assert flat.views[0].tolist() == [1, 1, 1]
    flat.buffer.fill_(2)
    flat.scatter_out()
    assert parameter.tolist() == [2, 2, 2]
