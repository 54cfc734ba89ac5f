"""Methods whose workers have something of their own between rounds: what a checkpoint keeps of it,
anywhere in a round, for other buckets and for another number of workers."""

from functools import cache

import pytest
import torch
from torch import nn

from paceline.errors import WorkerFailedError
from paceline.testing.problems import Counting
from tests.methods.local_updates.helpers import (
    CLOSE,
    adam,
    apart,
    count,
    double,
    momentum,
    sgd,
    train,
)
from tests.methods.local_updates.test_rounds import to_own, wide
from tests.support.tables import crossed, sampled
from tests.support.training import flat, inputs

STEPS = 9
ROWS = {
    "diloco:sync_every=4": 2,
    "local-sgd:sync_every=3,state=average": 2,
    "streaming-diloco:sync_every=6,fragments=2,delay=2": 2,
    "daso:sync_every=4,delay=3,group=2": 4,
    "ds-sync:groups=digits,swa_from=1,swa_every=2": 4,
    "ds-sync:groups=digits,overlap=forward": 8,
    "ds-sync:groups=digits,overlap=step": 4,
}
"""Each with a number of workers; sums are of two, which are the same whatever buckets are."""
COMPRESSED = [
    "diloco:sync_every=4,compression=ef-sign",
    "diloco:sync_every=4,compression=int4",
    "streaming-diloco:sync_every=6,fragments=2,delay=2,compression=int4,"
    "compression.error_feedback=true",
    "sel-sync:delta=0.01,window=2,compression=int8,compression.error_feedback=true",
    "sparse-loco:sync_every=4",
]


def with_statistics():
    """Statistics of BatchNorm, and half-precision weights, are among what is trained."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3).bfloat16())


def loss_of(model, rank, step):
    x = inputs(rank, step)
    hidden = model[1](model[0](x)).bfloat16()
    return (model[2](hidden).float() - x[:, :3]).square().mean()


PLAIN = {"make": with_statistics, "loss": loss_of, "optimizer": adam}
WIDE = {"make": wide, "loss": to_own, "optimizer": momentum}


@cache
def straight(method, workers):
    """What the training ends with that is not stopped."""
    return state_of(train(method, workers, STEPS, **keys_of(method)))


def keys_of(method):
    return PLAIN if method in ROWS else WIDE


def state_of(trained):
    return [[*one.model.state_dict().values()] for one in trained]


def check_restart(method, workers, at, folder, buckets):
    keys = keys_of(method)
    train(method, workers, at, save=folder, **keys)
    resumed = train(
        method, workers, STEPS - at, first=at, load=folder, buckets=buckets, **keys
    )
    for one, other in zip(straight(method, workers), state_of(resumed), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize(("method", "at"), crossed(6, ROWS, [1, 2, 3, 4, 5, 6]))
def test_a_restart_in_other_buckets_anywhere_in_a_round_changes_no_bit(
    method, at, tmp_path
):
    """Also with a mean under way. (An average over time is one of all four workers at the end: its
    sums are those of its buckets.)"""
    buckets = "wfbp" if "swa" in method else "ddp"
    check_restart(method, ROWS[method], at, tmp_path / "saved", buckets)


@pytest.mark.parametrize(("method", "at"), crossed(2, COMPRESSED, [3, 5]))
def test_a_restart_keeps_what_compression_left_out(method, at, tmp_path):
    """Codes of whole tensors may have other buckets. What a worker owns of a sum is a part of a
    bucket: in another one what int8 loses of it is in another's residual."""
    buckets = "ddp" if "ef-sign" in method else "wfbp"
    check_restart(method, 2, at, tmp_path / "saved", buckets)


OTHER_SIZES = [
    ("diloco:sync_every=2", 2, 3),
    ("local-sgd:sync_every=3", 2, 3),
    ("streaming-diloco:sync_every=4,fragments=1,delay=2,keep_local=0", 2, 3),
    ("diloco:sync_every=4,compression=ef-sign", 2, 3),
    ("daso:sync_every=3,delay=2,group=2", 4, 2),
    ("daso:sync_every=3,delay=2,group=2", 4, 6),
    ("ds-sync:groups=digits", 4, 3),
]


@pytest.mark.parametrize(("method", "before", "after"), sampled(3, OTHER_SIZES))
def test_another_number_of_workers_goes_on_from_the_common_model(
    method, before, after, tmp_path
):
    """All begin with what an evaluation showed when it was saved, and end with one model."""
    shown, begun = [], []

    def look(rank, step, model, optimizer):
        if step == 4:  # something is under way
            with optimizer.consolidated():
                shown.append(flat(model))

    def first_loss(model, rank, step):
        if step == 5:
            begun.append(flat(model))
        return to_own(model, rank, step)

    keys = {"make": wide, "optimizer": momentum}
    train(method, before, 5, loss=to_own, save=tmp_path / "saved", watch=look, **keys)
    ends = train(
        method, after, 6, first=5, loss=first_loss, load=tmp_path / "saved", **keys
    )
    assert len(begun) == after
    assert apart(begun, [shown[0]] * after) < CLOSE
    assert all(torch.equal(one.end, ends[0].end) for one in ends)


@pytest.mark.parametrize(
    ("method", "before", "after"),
    [row for row in OTHER_SIZES if "sign" not in row[0] and "daso" not in row[0]],
)
def test_with_equal_data_another_number_of_workers_changes_nothing(
    method, before, after, tmp_path
):
    """Anchors and their momentum go on: the job ends as one of the first size would."""
    keys = {"make": lambda: Counting().double(), "loss": count, "optimizer": sgd}
    straight = train(method, before, 8, **keys)
    train(method, before, 4, save=tmp_path / "saved", **keys)
    for one in train(method, after, 4, first=4, load=tmp_path / "saved", **keys):
        assert apart([one.end], [straight[0].end]) < CLOSE


@pytest.mark.parametrize(
    "other", ["local-sgd:sync_every=2", "local-sgd:sync_every=4,fragments=2"]
)
def test_a_checkpoint_of_other_options_is_refused(other, tmp_path):
    keys = {"make": double}
    saved = "local-sgd:sync_every=2,outer_learning_rate=0.5"
    train(saved, 2, 1, save=tmp_path / "saved", **keys)
    with pytest.raises(WorkerFailedError, match="the options"):
        train(other, 2, 1, load=tmp_path / "saved", **keys)
