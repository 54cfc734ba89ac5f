"""The same table on an emulated cluster."""

import inspect
from dataclasses import replace

import pytest

import paceline.testing.__main__ as kit
from paceline.cluster import ServerHost
from paceline.run_options import ScriptJob
from paceline.runtimes.emulated.launch import EmulatedJob
from paceline.runtimes.emulated.network import EmulatedNetwork
from paceline.testing.cases import cluster_of
from paceline.testing.method_checks import RUNTIME_CHECKS, sample, trials
from tests.conformance.table import SLOW_EMULATED
from tests.runtimes.emulated.conftest import refusal


@pytest.mark.slow
@pytest.mark.skipif(bool(refusal()), reason=refusal() or "namespaces are permitted")
@pytest.mark.parametrize("servers", [0, 1], ids=["beside rank 0", "on its own host"])
def test_a_sample_of_the_checks_holds_in_the_emulated_runtime(servers, capfd):
    racks = cluster_of(3, racks=2)
    cluster = replace(racks, servers=(ServerHost(),) * servers)
    with EmulatedNetwork(cluster) as network:
        part = ["--one-in", str(SLOW_EMULATED)]
        status = EmulatedJob(ScriptJob(inspect.getfile(kit), part), network).run()
    said = capfd.readouterr()
    assert status == 0, said.err
    assert said.err.count(": ok") == kit_size()


def kit_size():
    return len(sample(trials(3), SLOW_EMULATED)) + len(RUNTIME_CHECKS)
