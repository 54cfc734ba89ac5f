"""Workers of a real job are told of a cluster, and know it, or why it is not theirs."""

import json
import random
from pathlib import Path

import pytest

from paceline.cluster import Cluster, Rack, cluster_toml, uniform_cluster
from paceline.errors import ClusterError
from paceline.runtimes.real.cluster_check import (
    WorkerLocation,
    check_places,
    worker_location,
)
from paceline.runtimes.simulated import Simulation
from paceline.testing import Case
from paceline.testing.method_checks import final_parameters
from tests.support import forked
from tests.support.processes import SCRIPTS

SCRIPT = SCRIPTS / "told.py"


def rack(workers: int, **keys: object) -> Rack:
    return Rack(workers=workers, link=1e9 / 7, latency=1e-4 / 3, **keys)  # type: ignore[arg-type]


UNEVEN = Cluster((rack(1), rack(3, speed=(1.0, 0.5, 1 / 3))))


def in_virtual_time(cluster: Cluster) -> list[float]:
    """What a mean over the racks of that cluster ends with."""
    ends = {}
    case = Case(method="bsp:collective=hierarchical")

    def body(rank: int) -> None:
        ends[rank] = final_parameters(case, "ddp")

    Simulation(cluster).run(body)
    return ends[0]


def written(folder: Path, name: str, cluster: Cluster) -> str:
    path = folder / name
    path.write_text(cluster_toml(cluster, exact=True))
    return str(path)


def test_ranks_know_the_cluster_or_why_it_is_not_theirs(tmp_path: Path) -> None:
    """One job tries it all: its start costs more than that."""
    good = written(tmp_path, "good.toml", UNEVEN)
    other = written(tmp_path, "other.toml", uniform_cluster(4, "1gbit", "0 s"))
    large = written(tmp_path, "large.toml", uniform_cluster(5, "1gbit", "0 s"))
    missing = str(tmp_path / "missing.toml")
    ways = {
        "nobody": ([None] * 4, ""),
        "all": ([good] * 4, ""),
        "rank 0's counts": ([good, None, missing, None], ""),
        "not rank 0": ([None, None, good, None], "rank 2 has a cluster file, "),
        "two": ([good, None, other, None], "is another one than rank 2's, "),
        "another size": ([large] * 4, "as many workers as it has, 5, got 4"),
        "missing": ([missing] * 4, f"cannot read the cluster file {missing}"),
    }
    (tmp_path / "ways").write_text(json.dumps([[n, f] for n, (f, _) in ways.items()]))
    ranks = [
        forked.Forked([SCRIPT, "ways"], tmp_path, variables | told)
        for variables, told in zip(
            forked.variables_of(4),
            [{"PACELINE_CLUSTER": good}, {}, {}, {}],
            strict=True,
        )
    ]
    try:
        ends = [rank.done() for rank in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert [end.returncode for end in ends] == [0] * 4, ends[0].stderr
    everybody = [json.loads(end.stdout) for end in ends]
    assert all(one == everybody[0] for one in everybody)
    found = everybody[0]
    assert found["cluster"] == cluster_toml(UNEVEN, exact=True)
    assert found["racks"] == [0, 1, 1, 1]
    assert found["speeds"] == [1.0, 1.0, 0.5, 1 / 3]
    assert found["end"] == in_virtual_time(UNEVEN)
    assert found["end"] != in_virtual_time(uniform_cluster(4, "1gbit", "0 s"))
    for name, (_, words) in ways.items():
        assert (words in found[name]) if words else (found[name] == ""), found[name]


def test_a_file_that_is_not_there_is_named_before_anything_starts(
    tmp_path: Path,
) -> None:
    words = ["-m", "paceline", "run", "--cluster=nowhere.toml", SCRIPT]
    done = forked.run(words, folder=tmp_path)
    assert done.returncode == 1
    assert "cannot read the cluster file nowhere.toml" in done.stderr


# ---- where ranks are ----


def seats_on(machines: list[int]) -> list[WorkerLocation]:
    return [
        WorkerLocation(name=f"node-{m}", machine=f"boot {m}", host=f"network {m}")
        for m in machines
    ]


@pytest.mark.parametrize("seed", range(20))
def test_workers_share_machines_as_they_share_hosts_or_it_is_said(seed: int) -> None:
    draw = random.Random(seed)
    racks = []
    for _ in range(draw.randint(1, 3)):
        per_host = draw.randint(1, 3)
        racks.append(rack(per_host * draw.randint(1, 3), workers_per_host=per_host))
    cluster = Cluster(tuple(racks))
    machines = [cluster.host_of(worker) for worker in range(cluster.workers)]
    names = list(range(cluster.hosts))
    draw.shuffle(names)
    check_places(cluster, seats_on([names[machine] for machine in machines]))
    check_places(cluster, seats_on([0] * cluster.workers))
    moved = list(machines)
    draw.shuffle(moved)

    def sharing(places: list[int]) -> list[int]:
        return [places.index(place) for place in places]

    if sharing(moved) == sharing(machines) or len(set(moved)) == 1:
        check_places(cluster, seats_on(moved))
        return
    with pytest.raises(ClusterError, match=r"machine.*numbered rack by rack"):
        check_places(cluster, seats_on(moved))


def test_which_two_workers_are_elsewhere_is_said() -> None:
    pairs = Cluster((rack(4, workers_per_host=2),))
    with pytest.raises(ClusterError, match=r"0 and 1 on one host.*\(node-0, node-1\)"):
        check_places(pairs, seats_on([0, 1, 0, 1]))
    with pytest.raises(ClusterError, match=r"0 and 1 on hosts 0 and 1.*\(node-0\)"):
        check_places(Cluster((rack(4),)), seats_on([0, 0, 1, 1]))


def test_ranks_are_where_the_names_of_hosts_say() -> None:
    """Of one worker each: who shares a machine tells nothing."""
    racks = Cluster((rack(2), rack(2, names=("node-7", "node-3"))))
    check_places(racks, seats_on([1, 2, 7, 3]))
    check_places(racks, seats_on([5] * 4))
    with pytest.raises(
        ClusterError, match="worker 2 on 'node-7', and that runs on 'no"
    ):
        check_places(racks, seats_on([1, 7, 2, 3]))


def test_containers_of_a_machine_may_be_one_host_or_several() -> None:
    """They share its boot, and have networks of their own."""
    apart = [
        WorkerLocation(name=name, machine="one boot", host=f"network of {name}")
        for name in ("a", "b", "c", "d")
    ]
    check_places(Cluster((rack(4, workers_per_host=2),)), apart)
    check_places(Cluster((rack(4),)), apart)


def test_processes_of_one_place_have_one_location(tmp_path: Path) -> None:
    script = tmp_path / "worker_location.py"
    script.write_text(
        "from paceline.runtimes.real.cluster_check import worker_location\nprint(repr(worker_location()))\n"
    )
    assert forked.run([script]).stdout.strip() == repr(worker_location())
