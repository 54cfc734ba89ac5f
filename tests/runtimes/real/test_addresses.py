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


@pytest.mark.parametrize("master", ["node0", "10.0.0.5"])
@pytest.mark.parametrize("local", [None, 1, 2])
def test_an_address_that_others_can_use_is_the_only_one(master, local):
    assert listening(master, 2, local) == ListenAddress(
        bind="10.0.0.5", advertise="10.0.0.5"
    )


def test_an_address_of_version_6_is_one_too():
    assert listening("fd00::5", 2, 1) == ListenAddress(
        bind="fd00::5", advertise="fd00::5"
    )


def test_a_name_that_is_loopback_at_home_is_looked_up_by_each_for_himself():
    assert listening("debian", 2, 1) == EVERYWHERE
    assert listening("debian", 4, 2) == EVERYWHERE


def test_where_nobody_says_who_is_where_a_name_may_mean_another_machine():
    assert listening("debian", 2, None) == EVERYWHERE


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1"])
def test_a_launcher_that_calls_its_own_machine_localhost(master):
    assert listening(master, 2, 1) == EVERYWHERE


def test_loopback_of_version_6():
    assert listening("::1", 2, 1) == ListenAddress(bind="::", advertise="")


@pytest.mark.parametrize(
    ("master", "address"),
    [("localhost", "127.0.0.1"), ("debian", "127.0.1.1"), (None, "127.0.0.1")],
)
def test_on_one_machine_nobody_else_can_connect(master, address):
    assert listening(master, 2, 2) == ListenAddress(bind=address, advertise=address)


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", None])
def test_a_loopback_address_is_taken_at_its_word(master):
    assert listening(master, 2, None) == ListenAddress(
        bind="127.0.0.1", advertise="127.0.0.1"
    )


def test_the_address_of_a_service_in_front_is_reached_as_the_others_reach_it():
    assert listening("service", 2, 1) == EVERYWHERE


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
