"""Parameter servers in virtual time: equal results, closed forms of time, bad input."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack, ServerHost, uniform_cluster
from paceline.cluster.links import Links
from paceline.core.settings import parse_method
from paceline.errors import GradientError, UsageError, WorkerFailedError
from paceline.interfaces import Reply, Sender, Service, Work
from paceline.interfaces.server_messages import KeepAlive, Request
from paceline.methods import METHODS
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.runtimes.simulated.clock import Completion, VirtualClock
from paceline.runtimes.simulated.services import ServerRates, SimulatedServer
from paceline.testing.problems import Quadratic, centers_of
from paceline.transport.protocol import HEADER_BYTES
from tests.support.simulations import until_over
from tests.support.tables import crossed
from tests.support.training import (
    flat,
    plain_sgd,
    simulate,
    train,
    train_to_one_model,
)

MB = 1_000_000
STEPS = 8


def distance(model, rank, step):
    """The loss of a `Quadratic`."""
    return model(centers_of(rank, step))


QUADRATIC = {"make": Quadratic, "loss": distance}


def end_of(method, workers, make=torch.optim.SGD, servers=0, **settings):
    """All workers' final parameters."""
    return train_to_one_model(
        method,
        uniform_cluster(workers, "1gbit", "50us", servers),
        steps=STEPS,
        optimizer=lambda parameters: make(parameters, lr=0.1, **settings),
        **QUADRATIC,
    )


def begin(method, make=Quadratic, lr=0.1, momentum=0.0, **options):
    """A model of this worker, and its optimizer."""
    model = make()
    plain = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return model, paceline.distribute(model, plain, method=method, **options)


@pytest.mark.parametrize(
    ("workers", "optimizer"),
    crossed(
        2,
        [1, 2, 3, 4],
        [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})],
    ),
)
def test_a_mean_is_the_same_wherever_parameters_live(workers, optimizer):
    make, settings = optimizer
    mean = end_of("bsp:collective=parameter-server", workers, make, **settings)
    for method, servers in (
        ("backup", 0),
        ("backup:overlap=false", 1),
        ("backup:servers=per-node", 0),
        ("backup", 3),
        ("bsp:collective=parameter-server,servers=per-node", 0),
        ("bsp:collective=parameter-server,overlap=false", 2),
    ):
        assert torch.equal(end_of(method, workers, make, servers, **settings), mean)
    native = end_of("bsp", workers, make, **settings)
    if workers <= 2:
        assert torch.equal(native, mean)
    else:  # a ring adds each segment in another order
        torch.testing.assert_close(native, mean, rtol=1e-5, atol=1e-6)


def test_staleness_0_applies_gradients_one_after_the_other_in_rank_order():
    workers = 3
    model = Quadratic()
    reference = torch.optim.AdamW(model.parameters(), lr=0.1 / workers)
    for step in range(STEPS):
        gradients = []
        for rank in range(workers):
            reference.zero_grad()
            distance(model, rank, step).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for mine in gradients:
            for parameter, gradient in zip(model.parameters(), mine, strict=True):
                parameter.grad = gradient
            reference.step()
    end = end_of("ssp:staleness=0", workers, torch.optim.AdamW)
    assert torch.equal(end, flat(model))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_backup_counts_the_same_workers_on_all_servers(servers):
    # Workers 0 and 1 are always first, so the result is bsp's of these two alone.
    def matrix():
        torch.manual_seed(0)
        return torch.nn.Linear(300, 300, bias=False)

    def loss(model, rank, step):
        generator = torch.Generator().manual_seed(12 * rank + step)
        return model(torch.randn(4, 300, generator=generator)).square().mean()

    def end(method, steps, *place):
        return train_to_one_model(
            method, Cluster(*place), steps=steps, make=matrix, loss=loss
        )

    rack = Rack(workers=3, link=1e9, latency=0.0, speed=(1, 1, 0.45))
    # Worker 2 is slower by more than twice: its gradients come too late.
    of_three = end(
        "backup:wait_for=2", [12, 12, 4], (rack,), (), None, (ServerHost(),) * servers
    )
    of_two = end("backup", 12, (Rack(workers=2, link=1e9, latency=0.0),))
    # 1/3 + 1/3 is rounded, 1/2 + 1/2 is not.
    torch.testing.assert_close(of_three, of_two)


def test_buffers_travel_with_the_gradients():
    def loss(model, rank, step):
        return model(torch.randn(8, 3) + 10.0 * rank).square().mean()

    ends = train(
        "asp",
        3,
        20,
        make=lambda: torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
        ),
        optimizer=plain_sgd,
        loss=loss,
    )
    mean, variance, batches = ends[0].model.buffers()
    for end in ends:
        assert all(map(torch.equal, end.model.buffers(), (mean, variance, batches)))
    assert batches == 20  # the largest


NOTHING_TO_COMPUTE = ComputeModel(forward=0.0, backward=0.0)


def layers():
    """8 MB in 8 layers."""
    return torch.nn.ParameterList(torch.zeros(MB // 4) for _ in range(8))


def seconds_of_a_step(method, cluster, rates=None):
    """Of the slowest worker, where nothing is to be computed."""
    took = []

    def body(rank):
        model, optimizer = begin(method, layers)
        ends = []
        for _ in range(4):
            optimizer.zero_grad()
            sum(layer.sum() for layer in model).backward()
            optimizer.step()
            ends.append(paceline.now())
        # The first step learns the order of gradients, and begins unevenly.
        took.append((ends[3] - ends[0]) / 3)
        optimizer.finish()

    simulation = Simulation(cluster, compute=NOTHING_TO_COMPUTE)
    if rates is not None:
        simulation.server_rates = rates
    simulation.run(body)
    return max(took)


def one_server(workers, link=50e6, latency=0.0):
    return Cluster(
        (Rack(workers=workers, link=link, latency=latency),), servers=(ServerHost(),)
    )


@pytest.mark.parametrize("workers", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
def test_textbook_push_and_pull_are_an_incast_and_its_mirror(workers):
    rate, latency, size = 50e6, 1e-3, 8 * MB
    for method in (
        "bsp:collective=parameter-server,buckets=single",
        "backup:buckets=single",
    ):
        took = seconds_of_a_step(method, one_server(workers, rate, latency))
        each = latency + workers * (size + HEADER_BYTES) / rate
        # bsp holds a roll call's worth of nothing: one message each way
        assert took == pytest.approx(2 * each, rel=1e-6)


def test_a_trace_tells_when_messages_were_on_their_way():
    rate, latency, size = 50e6, 1e-3, 8 * MB

    def body(rank):
        model, optimizer = begin("backup:buckets=single", layers)
        for _ in range(3):
            sum(layer.sum() for layer in model).backward()
            optimizer.step()
        optimizer.finish()

    cluster = one_server(2, rate, latency)
    simulation = Simulation(cluster, compute=NOTHING_TO_COMPUTE, trace=True)
    spans = simulation.run(body).spans
    seconds = latency + 2 * (size + HEADER_BYTES) / rate
    for way, kind in (("to", "push"), ("from", "parameters")):
        mine = [
            span
            for span in spans
            if (span.worker, span.row) == (1, f"{way} server 0")
            and span.name == f"{kind}, {size / MB:g} MB"
        ]
        assert len(mine) >= 3  # parameters come at the start and at the end, too
        for span in mine[1:3]:
            assert span.end - span.start == pytest.approx(seconds, rel=1e-3)


def test_pulls_stream_back_while_others_are_pushed():
    textbook = seconds_of_a_step("backup:buckets=single", one_server(4))
    streamed = seconds_of_a_step("backup:buckets=wfbp", one_server(4))
    # 8 buckets, both directions at once: 9 bucket times instead of 16.
    assert streamed == pytest.approx(textbook * 9 / 16, rel=1e-3)


def test_servers_on_each_host_share_the_load():
    rack = Rack(workers=4, link=50e6, latency=0.0)
    took = seconds_of_a_step("backup:buckets=single,servers=per-node", Cluster((rack,)))
    # Each host sends 3/4 of the model to other hosts' servers, and gets it back.
    assert took == pytest.approx(2 * 0.75 * 8 * MB / 50e6, rel=1e-3)


def test_the_servers_processor_is_first_come_first_served():
    rates = ServerRates(added=100e6, stepped=50e6)
    cluster = one_server(4, link=1e12)
    took = seconds_of_a_step("backup:buckets=single", cluster, rates)
    # three additions, one copy of the result, one step of the optimizer, of 8 MB each
    assert took == pytest.approx(4 * 0.08 + 0.16, rel=1e-3)
    took = seconds_of_a_step("asp:buckets=single", cluster, rates)
    # four steps and four copies, one after the other
    assert took == pytest.approx(4 * (0.16 + 0.08), rel=1e-3)


# ---- bad input ----


SERVERS_UPDATE = [
    *("asp", "backup", "dssp", "grouping-sgd", "gssp", "osp"),
    *("r2sp", "ssp", "sync-switch"),
]


def test_these_are_the_methods_whose_servers_update():
    made = {name: parse_method(name)[0] for name in METHODS}
    on_server = [name for name, method in made.items() if method.updates_on == "server"]
    assert sorted(on_server) == SERVERS_UPDATE


@pytest.mark.parametrize("method", SERVERS_UPDATE)
def test_what_servers_cannot_update_is_refused_before_training(method):
    def body(rank):
        model = Quadratic()
        parameters = list(model.parameters())
        for optimizer in (
            torch.optim.LBFGS(parameters),
            torch.optim.SparseAdam(parameters),
            torch.optim.Adafactor(parameters),
        ):
            with pytest.raises(UsageError, match="whose worker updates"):
                paceline.distribute(model, optimizer, method=method)
        head_only = torch.optim.SGD([model.vector], lr=0.1)
        with pytest.raises(UsageError, match=r"'matrix' \(and 1 more\) requires"):
            paceline.distribute(model, head_only, method=method)
        model.matrix.requires_grad_(False)
        model.scalar.requires_grad_(False)
        before = model.matrix.clone(), model.vector.clone()
        optimizer = paceline.distribute(model, head_only, method=method)
        distance(model, rank, 0).backward()
        optimizer.step()
        optimizer.finish()
        assert torch.equal(model.matrix, before[0])
        assert not torch.equal(model.vector, before[1])

    simulate(2, body)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("backup:wait_for=3", "at most the 2 workers"),
        ("asp:servers=dedicated", r"\[\[server\]\]"),
        ("asp:servers=localhost:4711", "addresses"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(method, message):
    with pytest.raises(WorkerFailedError, match=message):
        end_of(method, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda model: setattr(model.vector, "grad", torch.zeros(5)),
        lambda model: model.matrix.grad.mul_(2),
    ],
    ids=["clipped", "replaced", "scaled"],
)
def test_changing_a_gradient_that_was_sent_is_an_error(change):
    def body(rank):
        model, optimizer = begin("asp")
        distance(model, rank, 0).backward()
        change(model)
        with pytest.raises(GradientError, match="already sent"):
            optimizer.step()

    simulate(2, body)


def test_a_second_backward_pass_before_the_step_is_an_error():
    def body(rank):
        model, optimizer = begin("asp")
        with optimizer.no_sync():
            distance(model, rank, 0).backward()
        distance(model, rank, 0).backward()
        with pytest.raises(GradientError, match="no_sync"):
            distance(model, rank, 0).backward()

    simulate(2, body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_of_a_tensor_without_dimensions_keeps_its_type(dtype):
    def body(rank):
        _, optimizer = begin(
            "asp",
            lambda: torch.nn.ParameterList([torch.ones((), dtype=dtype)]),
            momentum=0.9,
        )
        value = torch.tensor(1 / 3, dtype=dtype)
        state = optimizer.state_dict()
        state["state"] = {0: {"momentum_buffer": value}}
        optimizer.load_state_dict(state)
        back = optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert back.dtype == dtype
        assert torch.equal(back, value)

    simulate(1, body)


def test_steps_of_one_round_need_equal_hyperparameters():
    def body(rank):
        model, optimizer = begin("backup", lr=0.1 * (1 + rank))
        distance(model, rank, 0).backward()
        optimizer.step()

    with pytest.raises(WorkerFailedError, match="hyperparameters"):
        simulate(2, body)


# ---- a server's own deadlines ----


class Sleeper(Service):
    """Its deadline is as of the last message that said one: the message at *t* sets
    ``plan[t]``. Each message is *work* bytes to add."""

    def __init__(self, plan: dict[float, float | None], work: int = 0) -> None:
        self.plan, self.work = plan, work
        self.deadline: float | None = None
        self.rang: list[float] = []

    def on_request(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Reply]:
        self.deadline = self.plan[now]
        return []

    def on_worker_lost(self, worker: int, incarnation: int, now: float) -> list[Reply]:
        return []

    def next_deadline(self) -> float | None:
        return self.deadline

    def on_timer(self, now: float) -> list[Reply]:
        self.rang.append(now)
        self.deadline = None
        return []

    def take_work(self) -> Work:
        return Work(added=self.work)


def when_it_rings(plan: dict[float, float | None], work: int = 0) -> list[float]:
    """With a message at each time of *plan*, which sets the deadline to what stands there."""
    clock = VirtualClock(1)
    server = Sleeper(plan, work)
    links = Links(clock, uniform_cluster(1, "1gbit", "0 s", 1))
    rates = ServerRates(added=1.0)
    virtual = SimulatedServer("server 0", 1, 0, server, clock, links, rates)
    for number, time in enumerate(plan):
        sender = Sender(0, 0, "", number)
        heard = partial(server.on_request, sender, KeepAlive(), None)
        clock.at(time, partial(virtual.enter, heard))

    def body() -> None:
        end = Completion(lambda: "the end")
        clock.at(100.0, lambda: clock.complete(end))
        clock.wait(end)

    clock.run([body], until_over)
    return server.rang


def test_a_deadline_rings_once_at_its_time() -> None:
    assert when_it_rings({1.0: 5.0}) == [5.0]
    assert when_it_rings({1.0: 1.0}) == [1.0]


def test_a_deadline_that_moves_rings_at_its_last_time() -> None:
    assert when_it_rings({1.0: 5.0, 2.0: 9.0}) == [9.0]
    assert when_it_rings({1.0: 9.0, 2.0: 5.0}) == [5.0]
    assert when_it_rings({1.0: 9.0, 2.0: 5.0, 3.0: 9.0}) == [9.0]
    assert when_it_rings({1.0: 9.0, 2.0: 5.0, 6.0: 9.0, 20.0: 21.0}) == [5.0, 9.0, 21.0]


def test_a_deadline_that_is_given_up_does_not_ring() -> None:
    assert when_it_rings({1.0: 5.0, 2.0: None}) == []


def test_a_busy_processor_takes_the_deadline_in_its_turn() -> None:
    # The message at 1 s keeps it until 11 s; then comes what has rung at 5 s.
    assert when_it_rings({1.0: 5.0}, work=10) == [11.0]
