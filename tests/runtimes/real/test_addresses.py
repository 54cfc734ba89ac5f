"""Where rank 0 listens, and what the others are told, by what its machine knows of itself."""

import socket

import pytest

from paceline.runtimes.real.job_store import (
    Address,
    JobStore,
    ListenAddress,
    host_to_connect,
    on_master,
    resolve,
    toward_master,
)
from paceline.runtimes.real.peer_monitor import PeerMonitor
from tests.support.processes import DictStore

NAMES = {
    "localhost": "127.0.0.1",
    "127.0.0.1": "127.0.0.1",
    "::1": "::1",
    "debian": "127.0.1.1",
    "node0": "10.0.0.5",
    "10.0.0.5": "10.0.0.5",
    "service": "10.96.0.7",
    "fd00::5": "fd00::5",
}
OWN = {"127.0.0.1", "127.0.1.1", "::1", "10.0.0.5", "fd00::5"}
EVERYWHERE = ListenAddress(bind="0.0.0.0", advertise="")


def listening(master, size, local):
    environment = {} if master is None else {"MASTER_ADDR": master}
    if local is not None:
        environment["LOCAL_WORLD_SIZE"] = str(local)
    return on_master(
        size, environment, resolve=NAMES.__getitem__, is_own=OWN.__contains__
    )


def only(address):
    return ListenAddress(bind=address, advertise=address)


@pytest.mark.parametrize(
    ("masters", "locals_", "expected"),
    [
        # The others can use the address: it is the only one.
        (["node0", "10.0.0.5"], [None, 1, 2], only("10.0.0.5")),
        (["fd00::5"], [1], only("fd00::5")),
        # A name that is loopback at home: each worker looks it up for itself. Where no
        # variable says who is where, it may mean another machine.
        (["debian"], [1, None], EVERYWHERE),
        # A launcher that calls its own machine localhost.
        (["localhost", "127.0.0.1"], [1], EVERYWHERE),
        (["::1"], [1], ListenAddress(bind="::", advertise="")),
        # All workers are here, so that nobody else can connect; or a loopback address is
        # taken at its word.
        (["localhost", "127.0.0.1", None], [2, None], only("127.0.0.1")),
        (["debian"], [2], only("127.0.1.1")),
        # A service in front is reached as the others reach it.
        (["service"], [1], EVERYWHERE),
    ],
)
def test_where_rank_0_of_two_listens(masters, locals_, expected):
    for master in masters:
        for local in locals_:
            assert listening(master, 2, local) == expected, (master, local)


def test_a_name_that_is_loopback_at_home_with_several_workers_on_each_machine():
    assert listening("debian", 4, 2) == EVERYWHERE


def test_who_is_told_nothing_asks_for_the_master():
    assert host_to_connect("10.0.0.5", {"MASTER_ADDR": "node0"}) == "10.0.0.5"
    assert host_to_connect("", {"MASTER_ADDR": "node0"}) == "node0"
    assert host_to_connect("", {}) == "127.0.0.1"


def test_another_machine_listens_on_the_way_to_the_master():
    assert toward_master({"MASTER_ADDR": "127.0.0.1"}).bind == "127.0.0.1"
    assert resolve("localhost") == "127.0.0.1"  # version 4 first


def test_a_rank_that_cannot_reach_the_watch_starts_all_the_same(capsys, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # nobody listens there any more

    store = DictStore()
    job_store = JobStore(store, 2)
    there = Address(host="127.0.0.2", port=port, token="token")
    job_store.publish_address("paceline/liveness", there)
    member = PeerMonitor(1, 2, job_store, lambda sentence: None)
    member.close()
    job_store.close()
    said = capsys.readouterr().err
    assert said.startswith(f"paceline: rank 1 cannot reach rank 0 at 127.0.0.2:{port}")
    assert "gloo or NCCL alone" in said
