"""How trainings end, restart and are looked at; statistics, and what optimizers keep."""

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError, WorkerFailedError
from paceline.methods.local_updates import StreamingDiLoCo
from paceline.testing import inspect
from tests.methods.local_updates.helpers import adam, double, momentum, sgd, train
from tests.methods.local_updates.test_laws import CLOSE, counting
from tests.support.tables import crossed
from tests.support.training import flat, loss_of, simulate

# ---- ends, restarts, loads (laws 13 and 17) ----


@pytest.mark.parametrize(
    "method",
    [
        "local-sgd:sync_every=3",
        "post-local-sgd:sync_every=3,sync_each_step_until=3",
        "hierarchical-local-sgd:sync_every=6,group=2,group_every=2",
        "slowmo:sync_every=3",
        "diloco:sync_every=3",
        "streaming-diloco:sync_every=3,fragments=1,delay=0,keep_local=0",
    ],
)
def test_where_nobody_has_trained_since_the_last_mean_the_end_moves_nothing(method):
    for one in train(method, 2, 6):
        assert torch.equal(one.end, one.steps[-1])


@pytest.mark.parametrize("method", ["slowmo:sync_every=4", "diloco:sync_every=4"])
def test_a_last_round_that_is_not_full_is_a_plain_mean(method):
    first, second = train(method, 2, 7)
    plain = (first.steps[-1] + second.steps[-1]) / 2
    assert (first.end - plain).abs().max() < CLOSE


def test_what_is_under_way_at_the_end_is_used():
    """Sent after step 4, it would be there after step 7; training ends after step 5."""
    method = "streaming-diloco:sync_every=4,fragments=1,delay=3,keep_local=0"
    gone_on = train(method, 2, 7)
    for ended in train(method, 2, 5):
        assert not torch.equal(ended.end, ended.steps[-1])
        assert torch.equal(ended.end, gone_on[0].steps[6])


def test_to_settle_twice_is_to_settle_once():
    method = StreamingDiLoCo(sync_every=4, fragments=2, delay=0)
    seen = {}

    def watch(rank, step, model, optimizer):
        if step != 4:
            return
        training = inspect(optimizer)
        with torch.no_grad():
            for number in range(2):
                training.worker._finish_fragments()
                seen[rank, number] = flat(model)

    train(method, 2, 5, watch=watch)
    assert all(torch.equal(one, seen[0, 0]) for one in seen.values())


STRAIGHT = {}
"""By method: what training without a restart ends with."""


@pytest.mark.parametrize(
    ("method", "at"),
    crossed(
        2,
        [
            "diloco:sync_every=4",
            "local-sgd:sync_every=3,state=average",
            "streaming-diloco:sync_every=6,fragments=2,delay=2",
        ],
        [1, 2, 3, 4, 5, 6],
    ),
)
def test_a_restart_anywhere_in_a_round_changes_no_bit(method, at, tmp_path):
    """Also with a mean under way. Statistics of BatchNorm, and half-precision weights, among
    what is trained."""

    def body(rank, first, last, folder):
        # Two workers' sums are the same whatever the buckets are, and so are restarts.
        buckets = "wfbp" if first else "ddp"
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3).bfloat16()
        )
        inner = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = paceline.distribute(model, inner, method=method, buckets=buckets)
        if first:
            paceline.load(folder)
        for step in range(first, last):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * rank + step)
            x = torch.randn(8, 6, generator=generator)
            hidden = model[1](model[0](x)).bfloat16()
            (model[2](hidden).float() - x[:, :3]).square().mean().backward()
            optimizer.step()
        if last < 9:
            paceline.save(folder)
        optimizer.finish()
        return [t.clone() for t in model.state_dict().values()]

    folder = tmp_path / "checkpoint"
    if method not in STRAIGHT:
        STRAIGHT[method] = simulate(2, lambda rank: body(rank, 0, 9, folder))
    straight = STRAIGHT[method]
    simulate(2, lambda rank: body(rank, 0, at, folder))
    resumed = simulate(2, lambda rank: body(rank, at, 9, folder))
    for one, other in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for a, b in zip(*straight, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "method",
    [
        "diloco:sync_every=2",
        "local-sgd:sync_every=3",
        "streaming-diloco:sync_every=4,fragments=1,delay=2,keep_local=0",
    ],
)
def test_another_number_of_workers_goes_on_from_the_anchor_with_its_momentum(
    method, tmp_path
):
    """Three workers with equal data continue what two began as two would."""

    def body(rank, first, last):
        model = counting()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, inner, method=method)
        if first:
            paceline.load(tmp_path / "checkpoint")
        for _ in range(first, last):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        if last == 4:
            paceline.save(tmp_path / "checkpoint")
        optimizer.finish()
        return flat(model)

    straight = simulate(2, lambda rank: body(rank, 0, 8))
    simulate(2, lambda rank: body(rank, 0, 4))
    for one in simulate(3, lambda rank: body(rank, 4, 8)):
        assert (one - straight[0]).abs().max() < CLOSE


@pytest.mark.parametrize(
    "other", ["local-sgd:sync_every=2", "local-sgd:sync_every=4,fragments=2"]
)
def test_a_checkpoint_of_another_program_is_refused(other, tmp_path):
    """It has the same name, and other options."""

    def body(method, loads):
        model = counting()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, inner, method=method)
        if loads:
            paceline.load(tmp_path / "checkpoint")
        else:
            paceline.save(tmp_path / "checkpoint")
        optimizer.finish()

    simulate(
        2, lambda rank: body("local-sgd:sync_every=2,outer_learning_rate=0.5", False)
    )
    with pytest.raises(WorkerFailedError, match="the options"):
        simulate(2, lambda rank: body(other, True))


def test_parameters_that_a_script_loads_begin_a_round():
    """The anchor is theirs, and there is no momentum from before."""
    after = {}

    def watch(rank, step, model, optimizer):
        if step == 4:
            model.load_state_dict(double().state_dict())
            after[rank] = flat(model)

    loaded = train("diloco:sync_every=2", 2, 8, watch=watch, optimizer=sgd)
    assert torch.equal(after[0], flat(double()))

    def later(model, rank, step):
        return loss_of(model, rank, step + 5)

    # Steps 6 and 8 hold rounds: the first of these after one step.
    with_one = train("diloco:sync_every=2", 2, 1, loss=later, optimizer=sgd)
    moved = (with_one[0].steps[0] + with_one[1].steps[0]) / 2 - flat(double())
    expected = flat(double()) + 0.7 * 1.9 * moved
    assert (loaded[0].steps[5] - expected).abs().max() < CLOSE


@pytest.mark.parametrize(
    "method",
    [
        "streaming-diloco:sync_every=4,fragments=1,delay=3",
        "daso:group=2,sync_every=4,delay=3",
    ],
)
def test_what_is_under_way_is_over_before_a_checkpoint_takes_its_place(
    method, tmp_path
):
    """Until it is in, whoever moves it writes into the buffers that the checkpoint's goes to."""
    left = []

    def watch(rank, step, model, optimizer):
        worker = inspect(optimizer).worker
        if step == 0:
            paceline.save(tmp_path / "checkpoint")
        if step == 4:
            flying = worker.exchange if "daso" in method else worker.pending[0]
            sent = [*flying.pending]
            paceline.load(tmp_path / "checkpoint")
            left.append((len(sent), len(flying.pending)))

    train(method, 4, 6, watch=watch)
    assert any(sent for sent, _ in left)
    assert all(not pending for _, pending in left)


@pytest.mark.parametrize(
    "method",
    [
        "local-sgd:sync_every=4",
        "streaming-diloco:sync_every=4,fragments=1,delay=2",
        "daso:group=2,sync_every=4,delay=3",
        "ds-sync:overlap=step",
    ],
)
def test_a_mean_that_is_late_takes_no_step_from_a_counter(method):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()

    for one in train(method, 4, 14, make=make):
        assert one.model[1].num_batches_tracked.item() == 14


def test_an_evaluation_sees_the_anchor_whoever_looks_alone():
    """Where the outer optimizer keeps one; and the statistics of its round."""
    seen = {}

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()

    def watch(rank, step, model, optimizer):
        if step == 3:
            seen[rank, "round"] = [t.clone() for t in model.state_dict().values()]
        if step == 5 and rank == 1:
            before = flat(model)
            with optimizer.consolidated():
                seen[rank, "shown"] = [t.clone() for t in model.state_dict().values()]
            assert torch.equal(flat(model), before)

    train("diloco:sync_every=4", 2, 6, make=make, watch=watch)
    shown, there = seen[1, "shown"], seen[0, "round"]
    *floating, counter = range(len(there))
    assert all(torch.equal(shown[i], there[i]) for i in floating)
    assert shown[counter] == 6


def test_without_an_anchor_an_evaluation_sees_the_mean_of_all():
    seen = {}

    def watch(rank, step, model, optimizer):
        if step == 5:
            seen[rank] = flat(model)
            with optimizer.consolidated():
                seen[rank, "shown"] = flat(model)

    train("local-sgd:sync_every=4", 2, 7, watch=watch)
    assert not torch.equal(seen[0], seen[1])
    for rank in range(2):
        assert (seen[rank, "shown"] - (seen[0] + seen[1]) / 2).abs().max() < CLOSE


# ---- statistics, and what optimizers keep ----


def with_statistics(buffers, steps=4):
    def body(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(
            model, inner, method="local-sgd:sync_every=2", buffers=buffers
        )
        own = []
        for step in range(steps - rank):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if step == 1:
                own.append(model[1].running_mean.clone())
            optimizer.step()
            own.append(model[1].running_mean.clone())
        optimizer.finish()
        return own, model[1].running_mean, model[1].num_batches_tracked.item()

    return simulate(2, body)


def test_statistics_of_batchnorm_are_averaged_in_rounds_and_counters_are_the_largest():
    (first, end, steps), (second, other_end, other_steps) = with_statistics("rank0")
    assert not torch.equal(first[0], second[0])
    mean = (first[1] + second[1]) / 2
    assert (first[2] - mean).abs().max() < CLOSE
    assert torch.equal(first[2], second[2])
    assert torch.equal(end, other_end)
    assert steps == other_steps == 4


def test_they_stay_each_workers_own_where_that_is_wanted():
    (first, *_), (second, *_) = with_statistics("local")
    assert torch.equal(first[1], first[2])
    assert not torch.equal(first[2], second[2])


def moments_after_each_step(method, optimizer, steps=4):
    seen = {}

    def watch(rank, step, model, wrapped):
        state = wrapped.state[next(iter(model.parameters()))]
        seen[rank, step] = {
            name: value.clone()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim()
        }

    train(method, 2, steps, optimizer=optimizer, watch=watch)
    return seen


def test_what_adam_keeps_stays_each_workers_own():
    seen = moments_after_each_step("local-sgd:sync_every=2", adam)
    assert not torch.equal(seen[0, 1]["exp_avg"], seen[1, 1]["exp_avg"])


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [(adam, {"exp_avg", "exp_avg_sq"}), (momentum, {"momentum_buffer"})],
)
def test_or_is_averaged_too_in_each_round(optimizer, names):
    method = "local-sgd:sync_every=2,state=average"
    seen = moments_after_each_step(method, optimizer)
    own = moments_after_each_step("local-sgd:sync_every=2", optimizer)
    for name in names:
        equal = [torch.equal(seen[0, n][name], seen[1, n][name]) for n in range(4)]
        assert equal == [False, True, False, True]
        mean = (own[0, 1][name] + own[1, 1][name]) / 2
        assert (seen[0, 1][name] - mean).abs().max() < CLOSE


def test_an_optimizer_that_keeps_nothing_has_nothing_to_average():
    with pytest.raises(WorkerFailedError, match="SGD keeps none of") as caught:
        train("local-sgd:state=average", 2, 1, optimizer=sgd)
    assert isinstance(caught.value.__cause__, UsageError)


def test_an_optimizer_that_cannot_be_tried_is_refused_in_words():
    with pytest.raises(WorkerFailedError, match="LBFGS cannot be tried") as caught:
        train("local-sgd:state=average", 2, 1, optimizer=lambda p: torch.optim.LBFGS(p))
    assert isinstance(caught.value.__cause__, UsageError)


def test_who_has_not_trained_yet_has_moments_of_nought_and_weighs_nothing():
    ends = train("local-sgd:sync_every=2,state=average", 2, (4, 0), optimizer=adam)
    alone = train("local-sgd:sync_every=2", 1, 4, optimizer=adam)
    assert (ends[1].end - alone[0].end).abs().max() < CLOSE
