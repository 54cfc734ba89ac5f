"""System faults are detected in noisy evidence where they are, and no others."""

import random
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_all

from paceline.tools.doctor.diagnosis import detect_faults
from paceline.tools.doctor.evidence import Interface
from paceline.tools.doctor.network_model import NetworkModel
from paceline.tools.doctor.system_faults import SYSTEM_FAULTS
from paceline.tools.doctor.training_model import TrainingModel
from tests.support.tables import sampled
from tests.tools.doctor.synthetic import BRIDGE, ETHERNET, GIGABIT, LOST, Site

SEEDS = range(25)
SLOWER = Interface(name="eth1", kind="ethernet", rate=GIGABIT, network="10.0.0.0/24")
FASTER = Interface(
    name="eth2", kind="ethernet", rate=10 * GIGABIT, network="10.0.0.0/24"
)


def cpu_oversubscription(site, host):
    site.threads[host] = 8
    site.factors[host] = 1.8


def wrong_interface(site, host):
    site.interfaces[host] = (BRIDGE, ETHERNET)
    site.slow |= {(host, "out"): 0.3, (host, "in"): 0.3}


def packet_loss(site, host):
    site.losing[host] = LOST
    site.slow |= {(host, "out"): 0.5, (host, "in"): 0.5}


def contention(site, host):
    site.varying[host] = 0.25


def scarce_uplink(site, host):
    site.racks, site.uplink = 2, site.link * 0.75


def slow_link(site, host):
    site.slow |= {(host, "out"): 0.4, (host, "in"): 0.4}


def slow_path(site, host):
    beside = neighbour(site, host)
    site.paths |= {(host, beside): 0.4, (beside, host): 0.4}


def neighbour(site, host):
    return (host + 1) % site.hosts


def slow_host(site, host):
    site.factors[host] = 1.4


def slow_input(site, host):
    site.waits[host] = 0.1


def no_overlap(site, host):
    site.compiled = True


MAKERS = {
    "cpu-oversubscription": cpu_oversubscription,
    "wrong-interface": wrong_interface,
    "packet-loss": packet_loss,
    "contention": contention,
    "scarce-uplink": scarce_uplink,
    "slow-link": slow_link,
    "slow-path": slow_path,
    "slow-host": slow_host,
    "slow-input": slow_input,
    "no-overlap": no_overlap,
}
EVERYWHERE = ("scarce-uplink", "no-overlap")


def site_of(seed, *, least=3):
    rnd = random.Random(seed)
    return Site(
        hosts=rnd.randint(least, 9),
        seed=seed,
        noise=rnd.choice((0.0, 0.03, 0.06)),
        link=rnd.choice((12.5e6, 50e6, GIGABIT)),
    )


def names(site):
    return detected(site.evidence())


def detected(evidence):
    network = NetworkModel(evidence)
    return detect_faults(network, TrainingModel.of(network))


def test_every_kind_of_fault_is_made():
    assert list(MAKERS) == [row.name for row in SYSTEM_FAULTS]


@pytest.mark.parametrize("name", MAKERS)
def test_one_fault_is_named_where_it_is(name):
    for seed in SEEDS:
        site = site_of(seed, least=4)
        host = random.Random(seed).randrange(site.hosts)
        assert not names(site), seed
        MAKERS[name](site, host)
        found = names(site)
        assert list(found) == [name], seed
        if name not in EVERYWHERE:
            two = {neighbour(site, host)} if name == "slow-path" else set()
            assert found[name].hosts == {host} | two, seed


@pytest.mark.parametrize("name", ["slow-host", "slow-input"])
def test_a_worker_of_several_on_a_host_names_the_host(name):
    site = replace(site_of(0), each=2)
    MAKERS[name](site, 3)  # the second worker of host 1
    assert names(site)[name].hosts == {1}
    assert names(site)[name].location == "host 1"


@pytest.mark.parametrize("way", ["out", "in"])
def test_one_direction_of_a_link_is_told_from_both(way):
    for seed in SEEDS:
        site = site_of(seed)
        site.slow[2, way] = 0.4
        found = names(site)
        assert list(found) == ["slow-link"], seed
        word = {"out": "outgoing", "in": "incoming"}[way]
        assert found["slow-link"].location == f"{word} link of worker 2"


@pytest.mark.parametrize(
    ("ways", "where"),
    [
        ([(1, 3)], "worker 1 to worker 3"),
        ([(1, 3), (3, 1)], "between worker 1 and worker 3"),
        (
            [(1, 3), (3, 1), (0, 2)],
            "worker 0 to worker 2 and between worker 1 and worker 3",
        ),
    ],
)
def test_a_path_is_told_from_the_links_of_its_hosts(ways, where):
    for seed in SEEDS:
        site = site_of(seed, least=4)
        site.paths = dict.fromkeys(ways, 0.4)
        found = names(site)
        assert list(found) == ["slow-path"], seed
        assert found["slow-path"].location == where


def test_a_path_between_racks_is_measured_by_others_between_them():
    for seed in SEEDS:
        site = Site(hosts=8, racks=2, uplink=0.5 * GIGABIT, noise=0.03, seed=seed)
        assert list(names(site)) == ["scarce-uplink"], "all between them are slow"
        site.paths = {(1, 6): 0.2}
        assert list(names(site)) == ["scarce-uplink", "slow-path"], seed
        assert names(site)["slow-path"].location == "worker 1 to worker 6"


def test_where_half_of_all_paths_are_slow_it_is_built_like_that():
    """Two racks that are not in the order of ranks."""
    for seed in SEEDS:
        site = replace(site_of(seed), hosts=6)
        side = random.Random(seed).sample((0, 0, 0, 1, 1, 1), 6)
        site.paths = {
            (a, b): 0.4 for a in range(6) for b in range(6) if side[a] != side[b]
        }
        assert "slow-path" not in names(site), seed


def test_a_path_that_was_slow_only_once_is_no_fault():
    evidence = Site(hosts=4).evidence()
    first, *others = evidence.paths
    slow, usual = first.rates[0] / 5, first.rates
    for rates, faults in (
        ((slow, *usual[1:]), []),
        ((slow,), []),
        ((slow,) * len(usual), ["slow-path"]),
    ):
        changed = replace_all(first, rates=rates)
        made = replace_all(evidence, paths=(changed, *others))
        assert list(detected(made)) == faults


def test_segments_that_are_lost_on_one_path_only_are_told():
    evidence = Site(hosts=4, paths={(0, 1): 0.2}, noise=0.0).evidence()
    paths = [
        replace_all(one, retransmitted=LOST * ((one.source, one.target) == (0, 1)))
        for one in evidence.paths
    ]
    found = detected(replace_all(evidence, paths=tuple(paths)))
    assert list(found) == ["slow-path"]
    assert "2 %" in found["slow-path"].cause


def test_of_two_hosts_the_direction_is_named():
    """What leaves the one reaches the other: nobody can tell whose link it is."""
    for seed in SEEDS:
        site = replace(site_of(seed), hosts=2)
        assert not names(site)
        site.slow[0, "out"] = 0.4
        assert names(site)["slow-link"].location == "worker 0 to worker 1", seed


def test_a_host_on_a_slower_card_is_told_of_the_faster_one():
    for seed in SEEDS:
        site = replace(site_of(seed), link=10 * GIGABIT)
        site.interfaces = dict.fromkeys(range(site.hosts), (FASTER, SLOWER))
        assert not names(site)
        site.interfaces[1] = (SLOWER, FASTER)
        site.slow |= {(1, "out"): 0.09, (1, "in"): 0.09}
        found = names(site)
        assert list(found) == ["wrong-interface"]
        assert "GLOO_SOCKET_IFNAME=eth2" in found["wrong-interface"].advice


def test_a_tunnel_is_right_where_no_other_network_joins_the_hosts():
    apart = replace_all(ETHERNET, network="192.168.7.0/24")
    tunnel = replace_all(BRIDGE, name="wg0", network="10.8.0.0/24")
    site = Site(hosts=3, interfaces=dict.fromkeys(range(3), (tunnel, ETHERNET)))
    assert list(names(site)) == ["wrong-interface"]
    site.interfaces[2] = (tunnel, apart)
    assert not names(site)


def test_programs_beside_it_explain_a_slow_host():
    site = Site(hosts=4, factors={1: 1.5})
    assert "busy" not in names(site)["slow-host"].cause
    site.busy[1] = 2.5
    assert "2.5 of 4 cores busy" in names(site)["slow-host"].cause


def test_the_cause_has_the_host_with_the_most_threads_a_core():
    site = Site(hosts=4, threads={1: 8, 3: 12}, factors={1: 1.8, 3: 2.4})
    assert "12 threads on 4 cores" in names(site)["cpu-oversubscription"].cause


# ---- two at a time ----

PAIRS = [
    (one, other)
    for number, one in enumerate(MAKERS)
    for other in list(MAKERS)[number + 1 :]
]


def two_hosts(seed, site, apart):
    """Not each other's neighbours, if they are to be *apart*."""
    rnd = random.Random(seed)
    while True:
        first, second = rnd.sample(range(site.hosts), 2)
        if not apart or abs(first - second) not in (1, site.hosts - 1):
            return first, second


@pytest.mark.parametrize(("one", "other"), sampled(3, PAIRS))
def test_two_faults_on_two_hosts_are_both_named(one, other):
    for seed in SEEDS[:10]:
        site = site_of(seed, least=6)
        first, second = two_hosts(seed, site, apart="slow-path" in (one, other))
        MAKERS[one](site, first)
        MAKERS[other](site, second)
        assert set(names(site)) == {one, other}, seed


SYMPTOMS = [
    ("packet-loss", "contention"),
    ("packet-loss", "slow-link"),
    ("wrong-interface", "slow-path"),
    ("cpu-oversubscription", "slow-host"),
    ("cpu-oversubscription", "contention"),
]


@pytest.mark.parametrize(("cause", "symptom"), SYMPTOMS)
def test_on_one_host_only_the_cause_is_named(cause, symptom):
    for seed in SEEDS:
        site = site_of(seed)
        MAKERS[symptom](site, 1)
        assert list(names(site)) == [symptom]
        MAKERS[cause](site, 1)
        assert list(names(site)) == [cause], seed


# ---- nothing is wrong ----


def uneven_links(site):
    """Half of the hosts have half the link: so it is built."""
    site.slow = {
        (host, way): 0.5
        for host in range((site.hosts + 1) // 2)
        for way in ("out", "in")
    }


def short_of_processors(site):
    """All hosts share the machine's cores: at once each gets less, and all alike."""
    site.crowd = 0.4


def racks_with_room(site):
    site.racks, site.uplink = 2, site.link * site.hosts


def restless_times(site):
    site.noise = 0.1


def smaller_shares(site):
    """Slow hosts with smaller parts of the batch take as long as the others."""
    site.factors = dict.fromkeys(range(site.hosts), 1.0)


@pytest.mark.parametrize(
    "make",
    [
        uneven_links,
        short_of_processors,
        racks_with_room,
        restless_times,
        smaller_shares,
    ],
)
def test_healthy_ones_have_no_fault(make):
    for seed in range(60):
        site = site_of(seed, least=2)
        make(site)
        assert not names(site), seed


def below(site):
    """A little of everything, less than noise explains."""
    site.slow = {(1, "out"): 0.85, (0, "in"): 0.85}
    site.factors = {2: 1.06}
    site.waits = {0: 0.01}
    site.losing = {1: 3e-4}
    site.varying = {2: 0.85}
    site.threads = {0: 4}


def test_what_is_below_the_limits_is_no_fault():
    for seed in SEEDS:
        site = replace(site_of(seed, least=4), noise=0.02)
        below(site)
        assert not names(site), seed


def test_workers_of_one_machine_are_right_to_meet_on_loopback():
    loopback = replace_all(BRIDGE, name="lo", kind="loopback", network="127.0.0.0/8")
    site = Site(hosts=2, interfaces=dict.fromkeys(range(2), (loopback, ETHERNET)))
    assert not names(site)
    site.interfaces[1] = (BRIDGE, ETHERNET)
    assert "wrong-interface" in names(site)
