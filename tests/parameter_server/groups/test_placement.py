"""Where group servers stand: beside their groups, on hosts of their own, or as one says."""

import pytest

from paceline.errors import UsageError
from paceline.interfaces import Groups, ServerJob, ServiceJob, ServiceSpec
from paceline.methods.group_members import read_members
from paceline.runtimes import service_placement
from paceline.runtimes.real.server_process import (
    ADDRESSES_VARIABLE,
    INCARNATION_VARIABLE,
    SURVIVE_VARIABLE,
)
from paceline.runtimes.real.services import check_supervised

DEDICATED = {"auto", "dedicated", "a:1+b:2+c:3"}


def placed(place, groups, hosts=0, nodes=2):
    """The services of a job, and where each stands, where there are so many *hosts* for
    servers."""

    def find(place):
        if place in DEDICATED and hosts:
            return [f"host {number}" for number in range(hosts)]
        if place == "per-node":
            return [f"node {number}" for number in range(nodes)]
        return ["beside 0"] if place in ("auto", "embedded") else [place]

    job = ServerJob(None, "", place, groups=groups)
    return service_placement.place_services(
        job.services, find, lambda rank: f"beside {rank}"
    )


THREE = read_members("3.5+0-2+4", 6)


def test_each_has_all_others_as_peers():
    services = [service for service, _ in placed("auto", THREE)]
    names = ["server 0", "server 1", "server 2"]
    assert [service.name for service in services] == names
    for service in services:
        assert sorted((service.name, *service.peers)) == names
        assert service.kind == "group-server"
        assert not service.beside


BESIDE = ["beside 3", "beside 0", "beside 4"]
HOSTS = ["host 0", "host 1", "host 2"]


@pytest.mark.parametrize(
    ("place", "groups", "hosts", "where"),
    [
        ("auto", THREE, 0, BESIDE),
        ("auto", THREE, 2, BESIDE),
        ("auto", THREE, 3, HOSTS),
        ("auto", THREE, 4, HOSTS),
        ("dedicated", THREE, 3, HOSTS),
        ("a:1+b:2+c:3", THREE, 3, HOSTS),
        ("embedded", THREE, 0, ["beside 0"] * 3),
        ("per-node", THREE, 0, ["node 0", "node 1", "node 0"]),
        # Empty groups stand all over.
        ("auto", Groups((0,) * 8, 4), 0, [f"beside {rank}" for rank in (0, 2, 4, 6)]),
    ],
)
def test_where_servers_stand(place, groups, hosts, where):
    """Beside the first worker of their group, unless there are hosts enough, or the user says."""
    assert [placement for _, placement in placed(place, groups, hosts=hosts)] == where


@pytest.mark.parametrize("place", ["dedicated", "a:1+b:2+c:3"])
def test_too_few_hosts_are_told(place):
    with pytest.raises(
        UsageError, match=r"has 3 servers, .* hosts for 2: start as many"
    ):
        placed(place, THREE, hosts=2)


def test_servers_that_share_out_a_model_stand_as_before():
    services = placed("auto", None, hosts=2)
    assert [(s.name, s.kind, s.peers, placement) for s, placement in services] == [
        ("server 0", "server", (), "host 0"),
        ("server 1", "server", (), "host 1"),
    ]


@pytest.mark.parametrize(("started", "groups"), [(1, THREE), (2, None), (4, THREE)])
def test_a_supervisor_s_servers_must_be_the_method_s(started, groups):
    environment = {
        SURVIVE_VARIABLE: "1",
        ADDRESSES_VARIABLE: "+".join(f"a:{port}" for port in range(started)),
    }
    job = ServerJob(None, "", "auto", groups=groups).services
    with pytest.raises(UsageError, match="single server"):
        check_supervised(job, environment)  # nobody numbers processes: no supervisor
    environment[INCARNATION_VARIABLE] = "0"
    with pytest.raises(UsageError, match=f"has started {started}, .*--method SPEC"):
        check_supervised(job, environment)
    check_supervised(job, {})


@pytest.mark.parametrize(
    ("services", "words"),
    [
        ([ServiceSpec("root", peers=("top",))], "root 0: expected peers .*got 'top'"),
        (
            [ServiceSpec("root", peers=("root 0",))],
            "root 0: expected peers .*got 'root 0'",
        ),
        ([ServiceSpec("root"), ServiceSpec("root")], "2 services are called 'root 0'"),
    ],
)
def test_names_and_peers_that_do_not_fit_together_are_refused(services, words):
    with pytest.raises(UsageError, match=words):
        service_placement.place_services(
            ServiceJob(tuple(services)), lambda place: ["host"], str
        )
