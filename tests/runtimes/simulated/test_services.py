"""Parameter servers in virtual time: equal results, closed forms of time, bad input."""

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack, ServerHost, uniform_cluster
from paceline.core.settings import parse_method
from paceline.errors import GradientError, UsageError, WorkerFailedError
from paceline.methods import METHODS
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.runtimes.simulated.services import ServerRates
from paceline.testing.problems import Quadratic, centers_of, flat_parameters
from paceline.transport.protocol import HEADER_BYTES
from tests.support.tables import crossed

MB = 1_000_000


def end_of(method, workers, make=torch.optim.SGD, servers=0, **settings):
    """All workers' final parameters."""
    ends = {}

    def train(rank):
        model = Quadratic()
        plain = make(model.parameters(), lr=0.1, **settings)
        optimizer = paceline.distribute(model, plain, method=method, buckets="wfbp")
        for step in range(1, 9):
            optimizer.zero_grad()
            model(centers_of(rank, step)).backward()
            optimizer.step()
        optimizer.finish()
        ends[rank] = flat_parameters(model)

    Simulation(uniform_cluster(workers, "1gbit", "50us", servers)).run(train)
    for end in ends.values():
        assert torch.equal(end, ends[0])
    return ends[0]


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
    for step in range(1, 9):
        gradients = []
        for rank in range(workers):
            reference.zero_grad()
            model(centers_of(rank, step)).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for mine in gradients:
            for parameter, gradient in zip(model.parameters(), mine, strict=True):
                parameter.grad = gradient
            reference.step()
    end = end_of("ssp:staleness=0", workers, torch.optim.AdamW)
    assert torch.equal(end, flat_parameters(model))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_backup_counts_the_same_workers_on_all_servers(servers):
    # Workers 0 and 1 are always first, so the result is bsp's of these two alone.
    rack = Rack(workers=3, link=1e9, latency=0.0, speed=(1, 1, 0.45))
    ends = {}

    def train(rank):
        model = torch.nn.Linear(300, 300, bias=False)
        torch.manual_seed(0)
        with torch.no_grad():
            model.weight.copy_(torch.randn(300, 300))
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        method = "backup:wait_for=2" if cluster.workers == 3 else "backup"
        optimizer = paceline.distribute(model, plain, method=method, buckets="wfbp")
        generator = torch.Generator().manual_seed(rank)
        for step in range(12):
            if rank == 2 and step == 4:
                break  # it is slower by more than twice: its gradients come too late
            x = torch.randn(4, 300, generator=generator)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.finish()
        ends[rank] = model.weight.detach().clone()

    cluster = Cluster((rack,), servers=(ServerHost(),) * servers)
    Simulation(cluster).run(train)
    for end in ends.values():
        assert torch.equal(end, ends[0])
    three = ends[0]
    cluster = Cluster((Rack(workers=2, link=1e9, latency=0.0),))
    Simulation(cluster).run(train)
    torch.testing.assert_close(three, ends[0])  # 1/3 + 1/3 is rounded, 1/2 + 1/2 is not


def test_buffers_travel_with_the_gradients():
    ends = {}

    def train(rank):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, plain, method="asp")
        for _ in range(20):
            x = torch.randn(8, 3) + 10.0 * rank
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.finish()
        ends[rank] = [buffer.clone() for buffer in model.buffers()]

    Simulation(uniform_cluster(3, "1gbit", "50us")).run(train)
    for mine in ends.values():
        for ours, theirs in zip(mine, ends[0], strict=True):
            assert torch.equal(ours, theirs)
    assert ends[0][2] == 20  # batches tracked: the largest


def seconds_of_a_step(method, cluster, megabytes=8, rates=None):
    """Of a model of equal layers with nothing to compute."""
    took = {}

    def train(rank):
        layers = [torch.nn.Parameter(torch.zeros(MB // 4)) for _ in range(megabytes)]
        model = torch.nn.Module()
        for number, layer in enumerate(layers):
            model.register_parameter(f"layer{number}", layer)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, plain, method=method)
        for step in range(4):
            if (
                step == 1
            ):  # the first learns the order of gradients, and begins unevenly
                start = paceline.now()
            optimizer.zero_grad()
            sum(layer.sum() for layer in layers).backward()
            optimizer.step()
        took[rank] = (paceline.now() - start) / 3
        optimizer.finish()

    simulation = Simulation(cluster, compute=ComputeModel(forward=0.0, backward=0.0))
    if rates is not None:
        simulation.server_rates = rates
    simulation.run(train)
    return max(took.values())


@pytest.mark.parametrize("workers", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
def test_textbook_push_and_pull_are_an_incast_and_its_mirror(workers):
    rate, latency, size = 50e6, 1e-3, 8 * MB
    cluster = Cluster(
        (Rack(workers=workers, link=rate, latency=latency),), servers=(ServerHost(),)
    )
    for method in (
        "bsp:collective=parameter-server,buckets=single",
        "backup:buckets=single",
    ):
        took = seconds_of_a_step(method, cluster)
        each = latency + workers * (size + HEADER_BYTES) / rate
        # bsp holds a roll call's worth of nothing: one message each way
        assert took == pytest.approx(2 * each, rel=1e-6)


def test_a_trace_tells_when_messages_were_on_their_way():
    rate, latency, size = 50e6, 1e-3, 8 * MB
    cluster = Cluster(
        (Rack(workers=2, link=rate, latency=latency),), servers=(ServerHost(),)
    )

    def train(rank):
        model = torch.nn.Linear(size // 4, 1, bias=False)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, plain, method="backup:buckets=single")
        for _ in range(3):
            model(torch.ones(size // 4)).backward()
            optimizer.step()
        optimizer.finish()

    compute = ComputeModel(forward=0.0, backward=0.0)
    spans = Simulation(cluster, compute=compute, trace=True).run(train).spans
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
    rack = Rack(workers=4, link=50e6, latency=0.0)
    cluster = Cluster((rack,), servers=(ServerHost(),))
    textbook = seconds_of_a_step("backup:buckets=single", cluster)
    streamed = seconds_of_a_step("backup:buckets=wfbp", cluster)
    # 8 buckets, both directions at once: 9 bucket times instead of 16.
    assert streamed == pytest.approx(textbook * 9 / 16, rel=1e-3)


def test_servers_on_each_host_share_the_load():
    rack = Rack(workers=4, link=50e6, latency=0.0)
    took = seconds_of_a_step("backup:buckets=single,servers=per-node", Cluster((rack,)))
    # Each host sends 3/4 of the model to other hosts' servers, and gets it back.
    assert took == pytest.approx(2 * 0.75 * 8 * MB / 50e6, rel=1e-3)


def test_the_servers_processor_is_first_come_first_served():
    rack = Rack(workers=4, link=1e12, latency=0.0)
    cluster = Cluster((rack,), servers=(ServerHost(),))
    rates = ServerRates(added=100e6, stepped=50e6)
    took = seconds_of_a_step("backup:buckets=single", cluster, rates=rates)
    # three additions, one copy of the result, one step of the optimizer, of 8 MB each
    assert took == pytest.approx(4 * 0.08 + 0.16, rel=1e-3)
    took = seconds_of_a_step("asp:buckets=single", cluster, rates=rates)
    # four steps and four copies, one after the other
    assert took == pytest.approx(4 * (0.16 + 0.08), rel=1e-3)


# ---- bad input ----


def test_hyperparameters_of_methods_are_checked_when_they_are_made():
    with pytest.raises(UsageError, match="0 or more"):
        parse_method("ssp:staleness=-1")
    with pytest.raises(UsageError, match="0 for"):
        parse_method("backup:wait_for=-1")
    with pytest.raises(WorkerFailedError, match="only 2 workers"):
        end_of("backup:wait_for=3", 2)


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
    def train(rank):
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
        model(centers_of(rank)).backward()
        optimizer.step()
        optimizer.finish()
        assert torch.equal(model.matrix, before[0])
        assert not torch.equal(model.vector, before[1])

    Simulation(uniform_cluster(2, "1gbit", "50us")).run(train)


def test_dedicated_servers_need_hosts():
    with pytest.raises(WorkerFailedError, match=r"\[\[server\]\]"):
        end_of("asp:servers=dedicated", 2)
    with pytest.raises(WorkerFailedError, match="addresses"):
        end_of("asp:servers=localhost:4711", 2)


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
    def train(rank):
        model = Quadratic()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, plain, method="asp")
        model(centers_of(rank)).backward()
        change(model)
        with pytest.raises(GradientError, match="on its way"):
            optimizer.step()

    Simulation(uniform_cluster(2, "1gbit", "50us")).run(train)


@pytest.mark.parametrize("method", [*SERVERS_UPDATE, "osp:collective=native"])
def test_clipping_that_changes_nothing_is_no_change(method):
    def ends(clip):
        ends = {}

        def train(rank):
            model = Quadratic()
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = paceline.distribute(model, plain, method=method, buckets="wfbp")
            for step in range(12):
                optimizer.zero_grad()
                model(centers_of(rank, step)).backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
                optimizer.step()
            optimizer.finish()
            ends[rank] = flat_parameters(model)

        Simulation(uniform_cluster(2, "1gbit", "50us")).run(train)
        return ends

    clipped, free = ends(True), ends(False)
    for rank, end in free.items():
        assert torch.equal(clipped[rank], end)


def test_a_second_backward_pass_before_the_step_is_an_error():
    def train(rank):
        model = Quadratic()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, plain, method="asp")
        with optimizer.no_sync():
            model(centers_of(rank)).backward()
        model(centers_of(rank)).backward()
        with pytest.raises(GradientError, match="no_sync"):
            model(centers_of(rank)).backward()

    Simulation(uniform_cluster(2, "1gbit", "50us")).run(train)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_of_a_tensor_without_dimensions_keeps_its_type(dtype):
    def train(rank):
        model = torch.nn.Module()
        model.register_parameter("one", torch.nn.Parameter(torch.ones((), dtype=dtype)))
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = paceline.distribute(model, plain, method="asp")
        value = torch.tensor(1 / 3, dtype=dtype)
        state = optimizer.state_dict()
        state["state"] = {0: {"momentum_buffer": value}}
        optimizer.load_state_dict(state)
        back = optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert back.dtype == dtype
        assert torch.equal(back, value)

    Simulation(uniform_cluster(1, "1gbit", "50us")).run(train)


def test_steps_of_one_round_need_equal_hyperparameters():
    def train(rank):
        model = Quadratic()
        plain = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
        optimizer = paceline.distribute(model, plain, method="backup")
        model(centers_of(rank)).backward()
        optimizer.step()

    with pytest.raises(WorkerFailedError, match="hyperparameters"):
        Simulation(uniform_cluster(2, "1gbit", "50us")).run(train)


def test_a_learning_rate_schedule_reaches_the_server():
    ends = {}

    def train(rank):
        for method in ("bsp", "backup"):
            model = Quadratic()
            plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = paceline.distribute(model, plain, method=method, buckets="ddp")
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=9
            )
            for step in range(1, 9):
                optimizer.zero_grad()
                model(centers_of(rank, step)).backward()
                optimizer.step()
                schedule.step()
            optimizer.finish()
            ends[method] = flat_parameters(model)

    Simulation(uniform_cluster(2, "1gbit", "50us")).run(train)
    assert torch.equal(ends["bsp"], ends["backup"])
