"""The aggregator over real sockets: several jobs, faults, strangers, and who dies."""

import contextlib
import random
import socket
import threading

import numpy as np
import pytest

from paceline.collectives.in_network import datagrams as moving
from paceline.collectives.in_network import ends as stream_ends
from paceline.collectives.in_network import server as udp
from paceline.collectives.in_network.atp_server import UdpFallbackServer
from paceline.collectives.in_network.client import AggregatorClient
from paceline.collectives.in_network.forwarding import Inbox
from paceline.collectives.in_network.jobs import key_of, number_of
from paceline.collectives.in_network.packets import Flag, Kind, Seal, blank, sizes
from paceline.collectives.in_network.registration import (
    Challenge,
    Registration,
    line_of,
)
from paceline.collectives.in_network.server import UserSpaceAggregator
from paceline.collectives.in_network.udp_socket import Batched
from paceline.errors import PeerLostError, UsageError
from paceline.timeouts import timeouts
from paceline.transport.security import TRUSTED
from tests.collectives.in_network.places import (
    TOKEN,
    WORKERS,
    Loopback,
    lossy,
    running,
    together,
)
from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until


@pytest.mark.slow
@pytest.mark.parametrize("way", [moving.Single, Batched])
def test_sums_are_exact_though_one_datagram_in_a_hundred_is_lost(way, monkeypatch):
    monkeypatch.setattr(udp, "datagrams", way)
    monkeypatch.setattr(stream_ends, "datagrams", way)
    random_ = np.random.default_rng(0)
    sizes_ = (100_003, 1, 5000)
    made = [
        random_.integers(-(2**31), 2**31, (WORKERS, size)).astype(np.int32)
        for size in sizes_
    ]
    totals = [values.sum(axis=0, dtype=np.int64).astype(np.int32) for values in made]
    numbers = random_.standard_normal((WORKERS, 10_001)).astype(np.float32)
    exact = numbers.sum(axis=0, dtype=np.float64)
    with running() as aggregator:

        def work(worker):
            client = Loopback().joining(
                aggregator, worker, lossy=lossy(worker, 0.01), slots=16
            )
            for values in made:
                client.sum_integers(values[worker])
            error = client.sum_numbers(numbers[worker])
            repeats = client.counts["repeats"]
            client.close()
            return error, repeats

        ends = together(WORKERS, work)
        wait_until(lambda: not list(aggregator.jobs), SECONDS, "the aggregator")
        assert aggregator.jobs.free_slots == 1024
    for values, total in zip(made, totals, strict=True):
        assert (values == total).all()
    assert (numbers == numbers[0]).all()
    error = ends[0][0]
    assert (np.abs(numbers[0] - exact) <= error + np.abs(exact) * 2.0**-24).all()
    assert sum(repeats for _, repeats in ends) > 0


def test_numbers_that_are_not_finite_are_so_for_all_and_the_others_are_sums(place):
    with place.running() as aggregator:
        numbers = np.ones((2, 1000), np.float32)
        numbers[1, 3] = np.inf

        def work(worker):
            client = place.joining(aggregator, worker, workers=2)
            client.sum_numbers(numbers[worker])
            client.close()

        together(2, work)
    assert np.isnan(numbers[:, :358]).all()
    assert (numbers[:, 358:] == 2).all()


def test_two_jobs_share_an_aggregator_and_one_is_killed(place, tmp_path, capfd):
    """The killed one's worker is a process that ends without a goodbye, in mid-sum."""
    script = tmp_path / "killed.py"
    script.write_text(
        "import sys, numpy as np\n"
        "from paceline.collectives.in_network.client import AggregatorClient\n"
        f"client = AggregatorClient({place.host!r}, int(sys.argv[1]), job='killed',\n"
        f"    worker=0, workers=2, slots=50, token={TOKEN!r})\n"
        "print('here', flush=True)\n"
        "client.sum_integers(np.ones(1 << 20, np.int32))\n"
    )
    with place.running(slots=100) as aggregator:
        process = forked.Forked([script, aggregator.port])
        other = place.joining(aggregator, 1, "killed", workers=2, slots=50)
        values = np.ones((2, 50_000), np.int32)
        rounds = threading.Event()

        def work(worker):
            client = place.joining(aggregator, worker, "lives", workers=2, slots=50)
            totals = []
            for _ in range(3):
                mine = values[worker].copy()
                client.sum_integers(mine)
                totals.append(mine)
            rounds.wait(SECONDS)
            mine = values[worker].copy()
            client.sum_integers(mine)
            client.close()
            return [*totals, mine]

        def dies():
            wait_until(lambda: process.stdout == "here\n", SECONDS, "the aggregator")
            killer = threading.Thread(target=process.kill)
            killer.start()
            with pytest.raises(PeerLostError, match="worker 0 died"):
                other.sum_integers(np.ones(1 << 20, np.int32))
            killer.join()
            wait_until(
                lambda: len(list(aggregator.jobs)) == 1, SECONDS, "the aggregator"
            )
            rounds.set()

        try:
            dying = threading.Thread(target=dies)
            dying.start()
            totals = together(2, work)
            dying.join(SECONDS)
            assert rounds.is_set()
        finally:
            process.kill()
            other.close(well=False)
        for mine in totals:
            for total in mine:
                assert (total == 2).all()
        wait_until(lambda: aggregator.jobs.free_slots == 100, SECONDS, "the aggregator")
        assert aggregator.counts["jobs lost"] == 1
    assert "job 'killed': worker 0 died" in capfd.readouterr().err


def test_an_aggregator_that_is_lost_ends_its_jobs_in_words(place):
    with place.running() as aggregator:
        client = place.joining(aggregator, 0, workers=2)
    with pytest.raises(PeerLostError, match=rf"the aggregator at {place.host}.*died"):
        client.sum_integers(np.ones(9, np.int32))
    client.close(well=False)


def test_a_silent_aggregator_is_given_up(place):
    with place.running() as aggregator:
        client = place.joining(aggregator, 0, workers=2, silent_seconds=0.2)
        with pytest.raises(PeerLostError, match="answered nothing for 0 s"):
            client.sum_integers(np.ones(9, np.int32))
        client.close(well=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token": "another token"}, "another token"),
        ({"slots": 200, "fewest": 101}, "there are 100 for it"),
        ({"workers": 65}, "65 workers at one aggregator"),
        ({"mtu": 1600}, r"larger --mtu|has an MTU of 1500 bytes"),
        ({"mtu": 100}, "MTU 100: expected"),
        ({"worker": 4}, "worker 4 of 4"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(place, options, words):
    with place.running(slots=100) as aggregator:
        options = {"worker": 0} | options
        with pytest.raises(UsageError, match=words):
            place.joining(aggregator, **options)
        assert aggregator.jobs.free_slots == 100


def test_datagrams_that_do_not_come_back_are_noticed_before_the_first_sum(
    place, monkeypatch
):
    monkeypatch.setattr(timeouts, "aggregator_probe", 0.2)
    with place.running() as aggregator:
        with pytest.raises(UsageError, match="1500 bytes"):
            place.joining(aggregator, 0, lossy=lambda count: np.zeros(count, np.bool_))
        assert aggregator.counts["jobs"] == 1
        wait_until(
            lambda: aggregator.counts["jobs lost"] == 1, SECONDS, "the end of the job"
        )


def test_strangers_and_fuzzed_datagrams_change_nothing(place):
    chance = random.Random(1)
    with place.running() as aggregator, contextlib.ExitStack() as stack:
        stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        stack.enter_context(stranger)
        clients = [place.joining(aggregator, worker, workers=2) for worker in range(2)]
        number = clients[0].number
        ours = blank(1, 8)
        header = ours["header"]
        header["kind"], header["job"], header["elements"] = Kind.CONTRIBUTION, number, 8
        header["worker"], header["bitmap"] = 1, 2
        Seal(b"a key, but another").sign(ours)
        original = ours.tobytes()[: int(sizes(ours)[0])]

        def fuzz(count):
            for _ in range(count):
                data = bytearray(original)
                for _ in range(chance.choice((0, 1, 3))):
                    data[chance.randrange(len(data))] = chance.randrange(256)
                if chance.random() < 0.3:
                    del data[chance.randrange(len(data)) :]
                if chance.random() < 0.2:
                    data += bytes(chance.choice((1, 2000)))
                stranger.sendto(data, (place.host, aggregator.port))
            with socket.create_connection((place.host, aggregator.port)) as control:
                control.sendall(bytes(chance.randbytes(300)) + b"\n{}\n")

        for _ in range(5):
            fuzz(200)
            values = np.ones((2, 5000), np.int32)
            together(2, lambda w, values=values: clients[w].sum_integers(values[w]))
            assert (values == 2).all()
        for client in clients:
            client.close()
        dropped = set(aggregator.summary())
        for word in ("truncated", "foreign", "forged", "of an unknown job"):
            assert f"dropped: {word}" in dropped
        wait_until(
            lambda: aggregator.counts["refused: undecodable"] >= 5,
            SECONDS,
            "the aggregator",
        )


def test_a_false_aggregator_does_not_pass_for_one():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def lie():
            peer, _ = listener.accept()
            with peer:
                peer.sendall(line_of(Challenge(version=1, nonce="x")))
                peer.recv(4096)
                peer.sendall(b'{"type":"granted","number":1,"slots":1,"capacity":9}\n')

        liar = threading.Thread(target=lie)
        liar.start()
        with pytest.raises(UsageError, match="token"):
            AggregatorClient(
                "127.0.0.1", port, job="x", worker=0, workers=1, token=TOKEN
            )
        liar.join()


def test_nobody_there_is_a_lost_peer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerLostError, match="cannot be reached"):
        Registration("127.0.0.1", port, TOKEN)


@pytest.mark.parametrize("mode", [Flag.FORWARD, Flag.ONWARD])
def test_sums_leave_the_rack_toward_the_next_agents(place, mode):
    """A rack of two forwards; two agents of the next one take turns, each at its socket."""
    values = np.arange(2 * 4000, dtype=np.int32).reshape(2, 4000)
    came = np.zeros(4000, np.int32)
    with place.running() as aggregator, contextlib.ExitStack() as stack:
        agents = []
        for _ in range(2):
            agent = stack.enter_context(moving.open_socket(socket.AF_INET))
            agent.bind((place.host, 0))
            agent.connect((place.host, aggregator.port))
            agents.append(agent)
        addresses = [agent.getsockname() for agent in agents]
        clients = [
            place.joining(
                aggregator,
                worker,
                workers=2,
                slots=4,
                next_agents=addresses if worker == 0 else [],
                lossy=lossy(worker, 0.05),
            )
            for worker in range(2)
        ]
        number, elements = clients[0].number, clients[0].elements
        over = threading.Event()

        def take(chunks, packets):
            for chunk, packet in zip(chunks.tolist(), packets, strict=True):
                count = packet["header"]["elements"]
                start = chunk * elements
                came[start : start + count] = packet["values"][:count]

        def receive(agent, inbox):
            end, seal = Batched(agent, elements), Seal(key_of(TOKEN, "job"))
            inbox.begin(-(-4000 // elements), take)
            while not over.is_set():
                packets, _ = end.receive()
                if len(packets):
                    answers = inbox.take(packets[seal.genuine(packets)])
                    seal.sign(answers)
                    rows = np.arange(len(answers))
                    end.send(answers, rows, None, np.zeros_like(rows))

        inboxes = [
            Inbox(slots=4, elements=elements, number=number, turn=(place, 2))
            for place in range(2)
        ]
        receivers = [
            threading.Thread(target=receive, args=both)
            for both in zip(agents, inboxes, strict=True)
        ]
        for receiver in receivers:
            receiver.start()
        sent = values.copy()
        together(2, lambda w: clients[w].sum_integers(sent[w], mode=mode))
        over.set()
        for receiver in receivers:
            receiver.join()
        for client in clients:
            client.close()
    assert all(inbox.finished and inbox.counts["taken"] for inbox in inboxes)
    assert (came == values.sum(axis=0)).all()
    assert (sent == (values if mode == Flag.FORWARD else came)).all()


def test_jobs_that_compete_for_few_places_fall_back_to_their_servers(place):
    """Two jobs, three places, one datagram in a hundred lost on the workers' side."""
    made = {
        job: np.random.default_rng(place)
        .integers(-(2**31), 2**31, (2, 20_001))
        .astype(np.int32)
        for place, job in enumerate(("one", "two"))
    }
    totals = {
        job: values.sum(axis=0, dtype=np.int64).astype(np.int32)
        for job, values in made.items()
    }
    with place.running(places=3) as aggregator:
        servers = {
            job: UdpFallbackServer(
                place.host,
                number=number_of(TOKEN, job),
                key=key_of(TOKEN, job),
                workers=2,
                slots=8,
                elements=358,
            )
            for job in made
        }
        for server in servers.values():
            server.lead([(0b11, place.host, aggregator.port)])
        threads = [threading.Thread(target=one.run) for one in servers.values()]
        for thread in threads:
            thread.start()

        def work(number):
            job, worker = ("one", "two")[number // 2], number % 2
            client = place.joining(
                aggregator,
                worker,
                job,
                workers=2,
                slots=8,
                rules="best-effort",
                next_agents=[servers[job].address],
                lossy=lossy(number, 0.01),
            )
            client.sum_integers(made[job][worker])
            client.close()

        together(4, work)
        for server in servers.values():
            server.stop()
        for thread in threads:
            thread.join(SECONDS)
        assert aggregator.jobs.best_effort.collisions
        wait_until(lambda: not list(aggregator.jobs), SECONDS, "the end of both jobs")
        assert aggregator.jobs.best_effort.taken == 0
    for job, values in made.items():
        assert (values == totals[job]).all()


def test_a_port_in_use_is_said(monkeypatch):
    with (
        running() as aggregator,
        pytest.raises(UsageError, match="port"),
    ):
        UserSpaceAggregator("127.0.0.1", aggregator.port, token=TOKEN)
    monkeypatch.delenv(TRUSTED, raising=False)
    with pytest.raises(UsageError, match=f"export {TRUSTED}=1"):
        UserSpaceAggregator("192.0.2.1", 0, token=TOKEN)
