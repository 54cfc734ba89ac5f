"""The registry of methods."""

import pytest
import torch

from paceline.core.distribute import distribute
from paceline.core.settings import parse_method, short_spec
from paceline.errors import UsageError
from paceline.methods import METHODS, check_survives
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation
from paceline.spec import field_types
from paceline.testing import CASES
from paceline.testing.cases import cluster_of
from paceline.testing.problems import Quadratic

ON_SERVERS = [name for name in METHODS if METHODS[name]().updates_on == "server"]


@pytest.mark.parametrize("name", ON_SERVERS)
def test_a_job_survives_a_death_where_servers_update(name):
    assert check_survives(METHODS[name]()) is None


@pytest.mark.parametrize("name", sorted(METHODS.keys() - set(ON_SERVERS)))
def test_elsewhere_methods_that_do_are_named(name):
    with pytest.raises(UsageError, match="meet in collectives") as error:
        check_survives(METHODS[name]())
    listed = str(error.value).rpartition(": ")[2].split(", ")
    assert listed == sorted(ON_SERVERS)


OF_SERVERS = {"servers": "per-node", "replies": "deltas"}


@pytest.mark.parametrize("name", METHODS)
def test_a_key_that_means_nothing_to_a_method_is_refused_by_name(name):
    """What is taken is what a training keeps, and calls itself by."""
    serves = name in ON_SERVERS
    taken = {"collective": not serves} | dict.fromkeys(OF_SERVERS, serves)
    for key, means in taken.items():
        value = {"collective": "ring", **OF_SERVERS}[key]
        text = f"{name}:{key}={value}"
        if key in field_types(METHODS[name]):  # osp's own
            continue
        if means:
            method, settings = parse_method(text)
            assert f"{key}={value}" in short_spec(method, settings)
        else:
            with pytest.raises(UsageError) as error:
                parse_method(text)
            assert f"{key}={value}" in str(error.value)
            assert repr(name) in str(error.value)


def test_a_collective_with_servers_takes_its_servers():
    key = "servers"
    spec = f"bsp:collective=parameter-server,{key}={OF_SERVERS[key]}"
    assert getattr(parse_method(spec)[1], key) == OF_SERVERS[key]
    with pytest.raises(UsageError, match=f"{key}={OF_SERVERS[key]} does not apply"):
        parse_method(spec.replace("parameter-server", "ring"))


def test_what_stands_as_by_default_may_be_said():
    assert parse_method("asp:collective=native") == parse_method("asp")
    assert parse_method("bsp:servers=auto,replies=full") == parse_method("bsp")


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("int8", "bsp:compression=int8"),
        ("mg-wfbp", "bsp:buckets=mg-wfbp"),
        ("rina", "bsp:collective=rina"),
    ],
)
def test_who_names_a_keys_value_is_told_the_key(name, spec):
    with pytest.raises(UsageError, match=f"{name} is .*{spec}"):
        parse_method(name)
    parse_method(spec)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_tables_call_a_run_is_enough_to_repeat_it(case):
    found = []

    def begin(rank):
        model = Quadratic()
        adam = torch.optim.Adam(model.parameters())
        distribute(model, adam, method=case.method).finish()
        found.append(join_runtime().recorder.brief)

    Simulation(cluster_of(1)).run(begin)
    assert parse_method(found[0]) == parse_method(case.method)
    assert found[0].count("=") <= case.name.count("=")
