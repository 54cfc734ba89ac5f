"""What the paper's method must be equal to: T1 to T6 of docs/osp.md, and references."""

from __future__ import annotations

import copy

import pytest
import torch
from benchmarks.papers.osp_comparisons import KINDS, compared
from torch import nn

import paceline
from paceline.testing import inspect
from paceline.testing.problems import SIZE, Quadratic, centers_of
from tests.methods.osp.helpers import (
    ALL,
    FIRST_DEFERRED,
    HALF,
    MASKS,
    OPTIMIZERS,
    Gradients,
    decide_often,
    gradient_of,
)
from tests.support.tables import crossed
from tests.support.training import (
    flat,
    loss_of,
    network,
    plain_sgd,
    sgd,
    simulate,
    train_alone,
    train_to_one_model,
)

NOTHING = "osp:collective=native,defer=nothing"


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    decide_often(monkeypatch)


def double_network():
    return network(torch.float64)


# ---- T1 to T3: equal to the bit ----


@pytest.mark.parametrize(("mask", "name"), crossed(4, MASKS, OPTIMIZERS))
def test_one_worker_trains_as_without_paceline(name, mask):
    optimizer = OPTIMIZERS[name]
    end = train_to_one_model(MASKS[mask], 1, optimizer=optimizer)
    assert torch.equal(end, train_alone(optimizer=optimizer))


@pytest.mark.parametrize(("mask", "workers"), crossed(3, MASKS, [1, 2, 4]))
def test_identical_minibatches_are_bsp(mask, workers):
    # a mean of n equal numbers is that number where n is a power of two
    assert torch.equal(
        train_to_one_model(MASKS[mask], workers, same=True), train_alone()
    )


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_identical_minibatches_are_bsp_under_other_optimizers(name):
    optimizer = OPTIMIZERS[name]
    end = train_to_one_model(HALF, 2, same=True, optimizer=optimizer)
    assert torch.equal(end, train_alone(optimizer=optimizer))


@pytest.mark.parametrize("mask", ["0.5 random", "all"])
def test_laws_hold_while_a_schedule_moves_rate_and_momentum(mask):
    def prepare(optimizer):
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.3, total_steps=20
        )
        return schedule.step

    expected = train_alone(prepare=prepare)
    assert torch.equal(train_to_one_model(MASKS[mask], 1, prepare=prepare), expected)
    assert torch.equal(
        train_to_one_model(MASKS[mask], 4, same=True, prepare=prepare), expected
    )
    assert not torch.equal(expected, train_alone())


def test_masks_of_these_tests_defer_and_change():
    """Else the laws above would say little."""
    seen = {}

    def masks_of(method):
        masks = []

        def watch(rank, step, model, optimizer):
            if rank == 0:
                masks.append(tuple(inspect(optimizer).worker.layout.deferred))

        train_to_one_model(method, 2, watch=watch, steps=16)
        return masks

    for name, method in MASKS.items():
        seen[name] = masks_of(method)
        assert seen[name][:1] == [()]
    assert len(seen["all"][-1]) == 7
    assert len(seen["all, small pieces"][-1]) == 20
    assert len(set(seen["0.5 random"])) > 3
    sizes = [len(mask) for mask in seen["growing"]]
    assert sizes[2] < sizes[5] < sizes[-1]


# ---- T4: the mean of tentative values ----


class Watcher:
    """What parameters are after each step: a worker's own, and the exact ones."""

    def __init__(self, workers, steps):
        self.tentative = [[None] * workers for _ in range(steps)]
        self.exact = [[None] * workers for _ in range(steps)]

    def __call__(self, rank, step, model, optimizer):
        self.tentative[step][rank] = flat(model)
        with optimizer.consolidated():
            self.exact[step][rank] = flat(model)
        assert torch.equal(flat(model), self.tentative[step][rank])


@pytest.mark.parametrize("mask", ["0.5 random", "all"])
def test_the_mean_of_tentative_values_is_the_exact_value(mask):
    seen = Watcher(3, 10)
    end = train_to_one_model(MASKS[mask], 3, make=double_network, watch=seen, steps=10)
    spread = 0.0
    for tentative, exact in zip(seen.tentative, seen.exact, strict=True):
        for one in exact:
            assert torch.equal(one, exact[0])
        mean = torch.stack(tentative).mean(0)
        torch.testing.assert_close(mean, exact[0], rtol=1e-12, atol=1e-13)
        spread = max(spread, float((tentative[0] - exact[0]).abs().max()))
    assert torch.equal(end, seen.exact[-1][0])  # finish brings the same
    assert spread > 1e-3  # something was tentative


def quadratic():
    return Quadratic((torch.float64,) * 3)


def distance(model, rank, step):
    return model(centers_of(rank, step))


@pytest.mark.parametrize(
    ("mask", "optimizer"),
    crossed(2, ["0.3 product", "0.5 random", "all"], [plain_sgd, sgd]),
)
def test_on_a_quadratic_the_exact_trajectory_is_that_of_bsp(mask, optimizer):
    """Where gradients are linear the workers' deviations cancel."""
    trajectories = []
    for method in ("bsp", MASKS[mask]):
        seen = Watcher(3, 15)
        train_to_one_model(
            method,
            3,
            make=quadratic,
            optimizer=optimizer,
            loss=distance,
            watch=seen,
            steps=15,
        )
        trajectories.append(torch.stack([exact[0] for exact in seen.exact]))
    torch.testing.assert_close(*trajectories, rtol=1e-11, atol=1e-12)


def test_without_correction_the_quadratic_ends_elsewhere():
    ends = [
        train_to_one_model(method, 3, make=quadratic, loss=distance)
        for method in ("bsp", ALL, f"{ALL},correction=none")
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-11, atol=1e-12)
    assert (ends[0] - ends[2]).abs().max() > 1e-2


# ---- T5: stability ----


def steep(model, rank, step):
    """Curvature 1 in all directions, and other minima on each worker."""
    position = torch.cat([p.reshape(-1) for p in model.parameters()])
    return (position - centers_of(rank)).square().sum() / 2


@pytest.mark.parametrize(("rate", "diverges"), [(0.9, False), (1.4, True)])
def test_deferring_needs_a_smaller_rate_than_bsp(rate, diverges):
    """A worker's deviation is multiplied by -rate x curvature in each step, where the
    exact error of bsp is by 1 - rate x curvature."""

    def largest(method):
        values = []

        def watch(rank, step, model, optimizer):
            values.append(float(flat(model).abs().max()))

        train_to_one_model(
            method,
            2,
            make=quadratic,
            optimizer=lambda p: torch.optim.SGD(p, lr=rate),
            loss=steep,
            steps=60,
            watch=watch,
        )
        return max(values[-4:])

    assert largest("bsp") < 10
    assert (largest(ALL) > 1e6) == diverges
    if not diverges:
        assert largest(ALL) < 10


# ---- T6: every gradient is applied, once ----


@pytest.mark.parametrize("mask", crossed(2, MASKS))
def test_the_exact_value_is_the_start_minus_all_mean_gradients(mask):
    seen, loss = Watcher(3, 14), Gradients(3, 14)
    end = train_to_one_model(
        MASKS[mask],
        3,
        make=double_network,
        optimizer=plain_sgd,
        loss=loss,
        watch=seen,
        steps=14,
    )
    expected = flat(double_network())
    for own, exact in zip(loss.own, seen.exact, strict=True):
        expected = expected - 0.1 * torch.stack(own).mean(0)
        torch.testing.assert_close(exact[0], expected, rtol=1e-12, atol=1e-13)
    assert torch.equal(end, seen.exact[-1][0])


@pytest.mark.parametrize(
    ("steps", "mask"),
    crossed(
        2, [(4, 9, 14), (14, 4, 9), (0, 6, 11), (13, 13, 1)], ["0.5 random", "all"]
    ),
)
def test_gradients_of_uneven_data_are_applied_once(steps, mask):
    """Rank 0, which decides, ends first, in the middle, or last."""
    loss = Gradients(3, max(steps))
    end = train_to_one_model(
        MASKS[mask],
        3,
        make=double_network,
        optimizer=plain_sgd,
        loss=loss,
        steps=steps,
    )
    expected = flat(double_network())
    for own in loss.own:
        there = [gradient for gradient in own if gradient is not None]
        expected = expected - 0.1 * torch.stack(there).mean(0)
    torch.testing.assert_close(end, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mask", ["0.5 random", "all"])
def test_uneven_shares_weigh_gradients_by_samples(mask):
    gradients = [[None] * 3 for _ in range(20)]
    counts = [[0] * 3 for _ in range(20)]

    def body(rank, looks):
        """*looks*: between backward and step the script runs the model once more, with
        gradients: that is not the next batch yet."""
        model = double_network()
        data = torch.randn(45, 6, dtype=torch.float64, generator=_seeded(1))
        sampler = paceline.Sampler(data, 9, shares=[1.0, 3.4, 2.1])
        optimizer = paceline.distribute(
            model,
            plain_sgd(model.parameters()),
            method=MASKS[mask],
            buckets="wfbp",
            sampler=sampler,
        )
        step = 0
        for _ in range(4):
            for batch in sampler:
                optimizer.zero_grad()
                x = data[batch]
                loss = (model(x) - x[:, :3].sin()).square().mean()
                gradients[step][rank] = gradient_of(model, loss)
                counts[step][rank] = len(batch)
                loss.backward()
                if looks:
                    model(x)
                optimizer.step()
                step += 1
        optimizer.finish()
        return flat(model)

    ends = simulate(3, lambda rank: body(rank, looks=False))
    expected = flat(double_network())
    for own, weights in zip(gradients, counts, strict=True):
        for gradient, weight in zip(own, weights, strict=True):
            expected = expected - 0.1 * gradient * weight / 9
    assert len({tuple(weights) for weights in counts}) > 1
    for end in ends:
        torch.testing.assert_close(end, expected, rtol=1e-12, atol=1e-13)
    for end in simulate(3, lambda rank: body(rank, looks=True)):
        assert torch.equal(end, ends[0])


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


# ---- the correction, against a reference written by hand ----


def reference(correction, make_optimizer, steps, workers=2):
    """Everything deferred from step `FIRST_DEFERRED` on, in one process: the exact
    parameters at the end, and each worker's own after each step."""
    exact = network()
    optimizer = make_optimizer(exact.parameters())
    own = [copy.deepcopy(exact) for _ in range(workers)]
    predicted, late, trajectory = None, None, []
    for step in range(steps):
        gradients = []
        for rank, model in enumerate(own):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        mean = [
            sum(g / workers for g in several)
            for several in zip(*gradients, strict=True)
        ]
        if late is not None:  # the means of the step before are known now
            if predicted is None:
                predicted = [g.clone() for g in late]
            else:
                predicted = [
                    p.lerp(g, 0.1) for p, g in zip(predicted, late, strict=True)
                ]
        before, state = copy.deepcopy(exact), copy.deepcopy(optimizer.state_dict())
        _step(exact, optimizer, mean)
        for rank, gradient in enumerate(gradients):
            if step < FIRST_DEFERRED:
                own[rank] = copy.deepcopy(exact)
                continue
            model = own[rank] = copy.deepcopy(before)
            if correction == "average" and predicted is not None:
                gradient = [
                    (g + p) / 2 for g, p in zip(gradient, predicted, strict=True)
                ]
            if correction == "plain":
                group = optimizer.param_groups[0]
                sign = -1 if group.get("maximize") else 1
                for parameter, g in zip(model.parameters(), gradient, strict=True):
                    parameter.data.sub_(g * (sign * group["lr"]))
            elif correction != "none":
                trial = make_optimizer(model.parameters())
                trial.load_state_dict(copy.deepcopy(state))
                _step(model, trial, gradient)
        late = mean if step >= FIRST_DEFERRED else None
        trajectory.append([flat(model) for model in own])
    return flat(exact), trajectory


def corrected(how):
    return compared(how, ALL) if how in KINDS else f"{ALL},correction={how}"


def _step(model, optimizer, gradients):
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


CLIMBS = {
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, maximize=True)
}


@pytest.mark.parametrize(
    ("correction", "name"),
    crossed(2, ["local", "average", "plain", "none"], OPTIMIZERS | CLIMBS),
)
def test_every_correction_is_its_reference_to_the_bit(correction, name):
    make = (OPTIMIZERS | CLIMBS)[name]
    trajectory = [[None, None] for _ in range(9)]

    def watch(rank, step, model, optimizer):
        trajectory[step][rank] = flat(model)

    end = train_to_one_model(
        corrected(correction), 2, optimizer=make, watch=watch, steps=9
    )
    expected_end, expected = reference(correction, make, steps=9)
    for step, (ours, theirs) in enumerate(zip(trajectory, expected, strict=True)):
        for rank in range(2):
            assert torch.equal(ours[rank], theirs[rank]), f"step {step}, rank {rank}"
    assert torch.equal(end, expected_end)


# ---- pieces and buckets ----


def test_what_is_deferred_in_pieces_is_what_is_deferred_whole():
    """Only the order of sums could differ, and there is none with two workers."""
    whole = train_to_one_model(ALL.replace("chunk=64", "chunk=100000"), 2)
    assert torch.equal(train_to_one_model(ALL, 2), whole)
    assert torch.equal(train_to_one_model(ALL.replace("chunk=64", "chunk=4"), 2), whole)


@pytest.mark.slow
def test_laws_hold_while_the_planner_makes_new_buckets():
    """With two workers no plan changes the order of a sum."""
    counts = []

    def watch(rank, step, model, optimizer):
        counts.append(len(inspect(optimizer).buckets))

    options = {"steps": 32, "make": wide}
    mask = HALF.replace("chunk=64", "chunk=16384,order=importance")
    inverse = compared("inverse", mask)
    end = train_to_one_model(
        inverse, 2, same=True, buckets="optimal", watch=watch, **options
    )
    assert torch.equal(end, train_to_one_model("bsp", 2, same=True, **options))
    assert len(set(counts)) > 1  # in a trial two plans take turns
    inverse = compared("inverse", mask.replace("0.5", "1"))
    fixed = train_to_one_model(inverse, 2, **options)
    assert torch.equal(
        train_to_one_model(inverse, 2, buckets="optimal", **options), fixed
    )


def wide():
    """Its gradients take about as long to send as to compute, so that plans matter."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 300), nn.Tanh()),
        *(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)),
    )


class OtherWayRound(nn.Module):
    """Registered in another order than used: the first plan has other buckets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(600, 600)
        self.first = nn.Linear(6, 600)

    def forward(self, x):
        return self.last(self.first(x))[:, :3]


@pytest.mark.parametrize("steps", [(3, 0, 3), (0, 3, 3), (3, 3, 0)], ids=str)
@pytest.mark.parametrize(("defer", "interval"), [("most", 3), ("measured", 1)])
def test_a_rank_without_any_data_while_buckets_change(
    steps, defer, interval, monkeypatch
):
    """It is through with a step before the planner has made new buckets; the others
    after. What they tell each other must fit nevertheless."""
    decide_often(monkeypatch, interval)
    method = f"osp:collective=native,defer={defer},budget=constant,most=1"
    counts = []

    def watch(rank, step, model, optimizer):
        counts.append(len(inspect(optimizer).buckets))

    options = {"make": OtherWayRound, "buckets": "ddp", "steps": steps}
    end = train_to_one_model(method, 3, watch=watch, **options)
    torch.testing.assert_close(
        end, train_to_one_model("bsp", 3, **options), rtol=0.5, atol=0.05
    )
    if steps[0]:  # rank 0's order counts
        assert set(counts) == {2}


def test_the_size_of_the_quadratic():
    assert flat(quadratic()).numel() == SIZE
