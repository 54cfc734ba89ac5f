"""What opens a server is told to the job's workers, and to nobody who reads the store."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from paceline.errors import UsageError
from paceline.interfaces import ServiceJob, ServiceSpec
from paceline.records import StepRecorder
from paceline.runtimes.real.job_store import (
    Address,
    JobStore,
    ListenAddress,
    PublishedAddress,
    SealedAddress,
    TokenTransfer,
    host_to_connect,
    on_master,
    resolve,
    token_transfer_of,
    toward_master,
)
from paceline.runtimes.real.peer_monitor import PeerMonitor
from paceline.runtimes.real.services import PlacementResolver, RealServices
from paceline.transport.security import SECRET, TOKEN, dedicated_token
from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.processes import SCRIPTS, DictStore, kill, run, wait_until

SOMEBODY = 65534
LONG = "a secret of the job"
TOKEN_OF_ALL = "the token of all servers"
NAME = "paceline/servers/0/0"
ALONE = {"MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
APART = {"MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "1"}
SIGNED = APART | {SECRET: LONG}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody")


@contextlib.contextmanager
def posted(environment: Mapping[str, str]) -> Iterator[tuple[DictStore, JobStore, str]]:
    """A store in which an address lies, who has posted it, and its token."""
    store = DictStore()
    job_store = JobStore(store, 2, environment)
    token = job_store.new_token()
    job_store.publish_address(NAME, Address(host="127.0.0.1", port=4711, token=token))
    yield store, job_store, token
    job_store.close()


@pytest.mark.parametrize(
    ("environment", "way"),
    [
        (ALONE, TokenTransfer.HERE),
        (APART, TokenTransfer.OPEN),
        ({"MASTER_ADDR": "127.0.0.1"}, TokenTransfer.HERE),
        ({"MASTER_ADDR": "localhost"}, TokenTransfer.HERE),
        ({}, TokenTransfer.HERE),
        ({"MASTER_ADDR": "10.0.0.1"}, TokenTransfer.OPEN),
        ({"MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "2"}, TokenTransfer.HERE),
        ({"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1"}, TokenTransfer.OPEN),
        (ALONE | {SECRET: LONG}, TokenTransfer.SIGNED),
        (APART | {SECRET: LONG}, TokenTransfer.SIGNED),
        (APART | {TOKEN: TOKEN_OF_ALL}, TokenTransfer.SIGNED),
        (ALONE | {SECRET: ""}, TokenTransfer.HERE),
    ],
)
def test_the_table(environment: dict[str, str], way: TokenTransfer) -> None:
    assert token_transfer_of(2, environment) is way


@pytest.mark.parametrize(
    "environment", [ALONE, SIGNED, APART | {TOKEN: TOKEN_OF_ALL}], ids=str
)
def test_workers_learn_the_token_and_the_store_does_not_tell_it(
    environment: dict[str, str],
) -> None:
    with posted(environment) as (store, _, token):
        address = JobStore(store, 2, environment).address(NAME)
        assert address == Address(host="127.0.0.1", port=4711, token=token)
        assert len(token) == 32
        known = [token, *(environment.get(key, token) for key in (SECRET, TOKEN))]
        for value in store.values():
            assert not any(secret.encode() in value for secret in known)
    with posted(environment) as (_, _, another):
        assert another != token


def test_where_the_network_is_trusted_the_store_tells_it() -> None:
    with posted(APART) as (store, _, token):
        assert JobStore(store, 2, APART).address(NAME).token == token
        assert token.encode() in store[NAME]


@pytest.mark.parametrize("environment", [ALONE, APART, SIGNED], ids=str)
def test_a_fault_is_told_in_words(environment: dict[str, str]) -> None:
    store, fault = DictStore(), Address(fault="the port is in use")
    JobStore(store, 2, environment).publish_address(NAME, fault)
    assert JobStore(store, 2, environment).address(NAME) == fault


# ---- who writes into the store ----


@pytest.mark.parametrize("environment", [ALONE, APART, SIGNED], ids=str)
def test_words_are_heard_as_they_were_said(environment: dict[str, str]) -> None:
    store = DictStore()
    JobStore(store, 2, environment).publish(NAME, "several\nlines")
    assert JobStore(store, 2, environment).get(NAME) == "several\nlines"


def test_words_that_somebody_else_has_said_are_refused() -> None:
    store = DictStore()
    for his in (APART, SIGNED | {SECRET: LONG + "!"}, SIGNED | {"MASTER_PORT": "1"}):
        JobStore(store, 2, his).publish(NAME, "words")
        with pytest.raises(UsageError, match="not signed"):
            JobStore(store, 2, SIGNED).get(NAME)
    JobStore(store, 2, SIGNED).publish(NAME, "words")
    store["another name"] = store[NAME]
    with pytest.raises(UsageError, match="not signed"):
        JobStore(store, 2, SIGNED).get("another name")
    store[NAME] = b"{"
    with pytest.raises(UsageError, match="none of ours"):
        JobStore(store, 2, SIGNED).get(NAME)


def forged(**changes: object) -> PublishedAddress:
    with posted(SIGNED) as (store, _, _):
        genuine = msgspec.json.decode(store[NAME], type=PublishedAddress)
    return msgspec.structs.replace(genuine, **changes)


@pytest.mark.parametrize(
    "words",
    [
        forged(address=Address(host="10.6.6.6", port=4711)),
        forged(address=Address(host="127.0.0.1", port=666)),
        forged(number="0" * 32),
        forged(signature=""),
        PublishedAddress(address=Address(host="10.6.6.6", port=666, token="his own")),
    ],
    ids=["host", "port", "number", "signature", "open"],
)
def test_what_is_not_signed_is_refused(words: PublishedAddress) -> None:
    store = DictStore({NAME: msgspec.json.encode(words)})
    with pytest.raises(UsageError, match=f"not signed with this worker's {SECRET}"):
        JobStore(store, 2, SIGNED).address(NAME)


def test_what_another_job_or_name_has_signed_is_refused() -> None:
    with posted(SIGNED) as (store, _, _):
        for name, environment in (
            ("paceline/servers/1/0", SIGNED),
            (NAME, SIGNED | {"MASTER_PORT": "29501"}),
            (NAME, SIGNED | {SECRET: LONG + "!"}),
        ):
            store[name] = store[NAME]
            with pytest.raises(UsageError, match="not signed"):
                JobStore(store, 2, environment).address(name)


def here(descriptor: int) -> DictStore:
    words = PublishedAddress(process=os.getpid(), descriptor=descriptor)
    return DictStore({NAME: msgspec.json.encode(words)})


def test_a_file_that_others_could_have_made_is_refused(tmp_path: Path) -> None:
    sheet = SealedAddress(
        name=f"29500/{NAME}", address=Address(host="10.6.6.6", token="his")
    )
    path = tmp_path / "sheet"
    path.write_bytes(msgspec.json.encode(sheet))
    changeable = os.memfd_create("paceline", os.MFD_ALLOW_SEALING)
    os.write(changeable, path.read_bytes())
    with path.open("rb") as file:
        for descriptor in (file.fileno(), changeable, 9999):
            with pytest.raises(UsageError, match="cannot read what process"):
                JobStore(here(descriptor), 2, ALONE).address(NAME)
    os.close(changeable)


def test_another_jobs_file_is_refused() -> None:
    with posted(ALONE) as (store, _, _):
        others = ALONE | {"MASTER_PORT": "29501"}
        with pytest.raises(UsageError, match=f"it is '29500/{NAME}'"):
            JobStore(store, 2, others).address(NAME)


def test_nothing_is_left_of_a_file_that_was_read() -> None:
    before = os.listdir("/proc/self/fd")
    with posted(ALONE) as (store, job_store, _):
        JobStore(store, 2, ALONE).address(NAME)
        job_store.close()
        with pytest.raises(UsageError, match="cannot read what process"):
            JobStore(store, 2, ALONE).address(NAME)
    assert os.listdir("/proc/self/fd") == before


@as_root
def test_another_user_cannot_read_the_file_nor_have_his_read() -> None:
    with posted(ALONE) as (store, _, _):
        place = msgspec.json.decode(store[NAME], type=PublishedAddress)
        path = f"/proc/{place.process}/fd/{place.descriptor}"
        # A child that is somebody else: no interpreter, which he might not be able to read.
        ask = ["cat", path]
        asked = subprocess.run(
            ask, user=SOMEBODY, group=SOMEBODY, extra_groups=[], capture_output=True
        )
        assert asked.stdout == b""
        assert b"Permission denied" in asked.stderr
        assert subprocess.run(ask, capture_output=True).stdout  # and root may
    sheet = SealedAddress(
        name=f"29500/{NAME}", address=Address(host="10.6.6.6", token="his")
    )
    os.setegid(SOMEBODY)
    os.seteuid(SOMEBODY)
    try:
        his = DictStore()
        theirs = JobStore(his, 2, ALONE)
        theirs.publish_address(NAME, sheet.address)
    finally:
        os.seteuid(0)
        os.setegid(0)
    with pytest.raises(UsageError, match=f"it is user {SOMEBODY}'s"):
        JobStore(his, 2, ALONE).address(NAME)
    theirs.close()


# ---- servers that are named ----


def find(environment: dict[str, str], place: str = "127.0.0.1:1") -> None:
    job = ServiceJob((ServiceSpec("server", place=place),))
    job_store = JobStore(DictStore(), 1, environment)
    RealServices(0, 1, job_store, StepRecorder(0, lambda: 0.0)).find(job, environment)


def test_a_worker_that_was_told_no_token_says_where_it_comes_from() -> None:
    with pytest.raises(UsageError, match=f"paceline serve.*{TOKEN}=.*{SECRET}"):
        find({})
    with pytest.raises(UsageError, match="at least 16 characters, got 9"):
        find({TOKEN: "dedicated"})


@pytest.mark.parametrize("place", ["embedded", "per-node"])
def test_workers_that_share_nothing_start_no_servers(place: str) -> None:
    with pytest.raises(UsageError, match=f"servers={place}: a job that survives"):
        find({"PACELINE_SURVIVE": "1"}, place)


def resolvers(told: Sequence[tuple[int, int]]) -> Iterator[PlacementResolver]:
    """Of each rank, all of which have begun. *told*: what a launcher tells each rank, the number of
    workers of its node and its own one among them. It does not number nodes, as mpirun does
    not."""
    job_store = JobStore(DictStore(), len(told), APART)
    for rank, (size, local) in enumerate(told):
        job_store.publish(f"paceline/starters/{rank}", f"{size} {local}")
    for rank, (size, local) in enumerate(told):
        environment = {"LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(local)}
        yield PlacementResolver(rank, len(told), job_store, environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        pytest.param([[0, 1], [2, 3]], [0, 2], id="by slot"),
        pytest.param([[0, 2], [1, 3]], [0, 1], id="by node"),
        pytest.param([[3, 1], [0, 2]], [0, 3], id="in any order"),
        pytest.param([[0, 1, 2, 3]], [0], id="one node"),
        pytest.param([[0], [1], [2], [3]], [0, 1, 2, 3], id="one on each"),
    ],
)
def test_each_node_has_a_server_however_ranks_are_mapped_to_nodes(
    nodes: list[list[int]], first: list[int]
) -> None:
    told = {
        rank: (len(node), local) for node in nodes for local, rank in enumerate(node)
    }
    for rank, resolver in enumerate(resolvers([told[rank] for rank in range(4)])):
        placements = resolver.placements("per-node")
        assert [placement.here for placement in placements] == [
            rank == other for other in first
        ]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([(2, 0)] * 4, "have LOCAL_RANK=0, expected 2"),
        ([(2, 1)] * 4, "have LOCAL_RANK=0, expected 2"),
        # Those of the larger node take it for the only one: they started a server each for
        # itself, while the other node's worker waited for theirs.
        (
            [(3, 0), (3, 1), (3, 2), (1, 0)],
            r"different numbers of workers \(1, 3, as",
        ),
    ],
    ids=["two first workers", "no first worker", "unequal nodes"],
)
def test_nodes_that_make_no_sense_are_refused_on_every_worker(
    told: list[tuple[int, int]], message: str
) -> None:
    for resolver in resolvers(told):
        with pytest.raises(UsageError, match=message):
            resolver.placements("per-node")


def test_the_token_of_named_servers() -> None:
    assert dedicated_token({}) is None
    assert dedicated_token({TOKEN: TOKEN_OF_ALL}) == TOKEN_OF_ALL
    assert dedicated_token({TOKEN: TOKEN_OF_ALL, SECRET: LONG}) == TOKEN_OF_ALL
    derived = dedicated_token({SECRET: LONG})
    assert derived == dedicated_token({SECRET: LONG})
    assert derived != dedicated_token({SECRET: LONG + "!"})
    assert derived is not None
    assert LONG not in derived


# ---- a job, and somebody who is not of it ----


@as_root
@pytest.mark.slow
def test_somebody_else_on_the_machine_learns_nothing_that_opens_the_server(
    tmp_path: Path,
) -> None:
    job = run(2, "trains_until.py", tmp_path, folder=tmp_path / "job")
    try:
        ready = [tmp_path / "ready-0", tmp_path / "ready-1"]

        def begun() -> bool:
            assert job.process.poll() is None, job.output
            return all(path.exists() for path in ready)

        wait_until(begun, SECONDS, "the first step")
        port, server = ready[0].read_text().split()
        stranger = forked.run([SCRIPTS / "stranger.py", port, server])
        assert stranger.returncode == 0, stranger.stderr
        learnt = msgspec.json.decode(stranger.stdout)
        assert learnt["uid"] == SOMEBODY
        assert learnt["values"] > 0  # torch's store tells all it has
        assert learnt["posted"] > 0  # the addresses among it
        assert learnt["tried"] > 0
        assert learnt["opened"] == []
        assert learnt["admitted"] == []
        (tmp_path / "enough").touch()
        job.wait().check_ended_well()
    finally:
        job.stop()
        for process in job.processes():
            kill(process)


# ---- where rank 0 listens, and what the others are told, by what its machine knows of itself ----

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
