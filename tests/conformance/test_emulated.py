"""The same table on an emulated cluster."""

import inspect
from dataclasses import replace

import pytest

import paceline.testing.__main__ as kit
from paceline.network import ServerHost
from paceline.options import RunOptions
from paceline.testing import CASES
from paceline.testing.cases import cluster_of
from paceline.testing.checks import RULES, WORLD_CHECKS, checks_of
from paceline.worlds.emulated.fabric import Fabric
from paceline.worlds.emulated.job import EmulatedJob
from tests.emulated.conftest import refusal


@pytest.mark.slow
@pytest.mark.skipif(bool(refusal()), reason=refusal() or "namespaces are permitted")
@pytest.mark.parametrize("servers", [0, 1], ids=["beside rank 0", "on its own host"])
def test_all_checks_hold_in_the_emulated_world(servers, capfd):
    racks = cluster_of(3, racks=2)
    cluster = replace(racks, servers=(ServerHost(),) * servers)
    with Fabric(cluster) as fabric:
        status = EmulatedJob(fabric, inspect.getfile(kit), [], RunOptions()).run()
    said = capfd.readouterr()
    assert status == 0, said.err
    assert said.err.count(": ok") == kit_size()


def kit_size():
    rows = [len(checks_of(case, rule, 3)) for case in CASES for rule in RULES]
    return sum(rows) + len(WORLD_CHECKS)
