"""The same table on an emulated cluster."""

import inspect
from dataclasses import replace

import pytest

import paceline.testing.__main__ as kit
from paceline.cluster import ServerHost
from paceline.run_options import ScriptJob
from paceline.runtimes.emulated.launch import EmulatedJob
from paceline.runtimes.emulated.network import EmulatedNetwork
from paceline.testing import CASES
from paceline.testing.cases import cluster_of
from paceline.testing.method_checks import RUNTIME_CHECKS, sample, trials
from tests.conformance.test_real import ONE_EACH
from tests.runtimes.emulated.conftest import refusal


@pytest.mark.slow
@pytest.mark.skipif(bool(refusal()), reason=refusal() or "namespaces are permitted")
@pytest.mark.parametrize(
    ("servers", "word", "every"),
    [(0, "", ONE_EACH), (1, "ssp", 20)],
    ids=["beside rank 0", "on its own host"],
)
def test_a_sample_of_the_checks_holds_in_the_emulated_runtime(
    servers, word, every, capfd
):
    """On a host of its own stands a server of bounded staleness: there are several such rows."""
    racks = cluster_of(3, racks=2)
    cluster = replace(racks, servers=(ServerHost(),) * servers)
    with EmulatedNetwork(cluster) as network:
        part = ["--one-in", str(every), "--row", word]
        status = EmulatedJob(ScriptJob(inspect.getfile(kit), part), network).run()
    said = capfd.readouterr()
    assert status == 0, said.err
    cases = [case for case in CASES if word in case.name]
    tried = sample(trials(3, cases), every)
    assert said.err.count(": ok") == len(tried) + len(RUNTIME_CHECKS)
