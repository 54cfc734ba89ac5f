"""The same table on real processes, and the runtimes held against each other."""

import json

import pytest
import torch

from paceline.bucketing.rules import MEASURED
from paceline.cluster import cluster_toml
from paceline.runtimes.simulated import Simulation
from paceline.testing import CASES, CHECKS
from paceline.testing.__main__ import rows
from paceline.testing.cases import cluster_of
from paceline.testing.method_checks import (
    RULES,
    RUNTIME_CHECKS,
    final_parameters,
    sample,
    trials,
)
from tests.conformance import job
from tests.conformance.table import SLOW_EMULATED, SLOW_REAL
from tests.support import forked

ALONE = {"one_worker_is_the_reference", "options_are_validated"}
"""What says nothing about several workers."""


@pytest.mark.slow
def test_a_row_of_each_method_holds_and_ends_as_in_virtual_time(tmp_path):
    check_job(3, ["-m", "tests.conformance.job"], job.chosen(3), job.ends(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "every"), SLOW_REAL.items())
def test_checks_hold_and_ends_are_those_of_virtual_time(workers, every, tmp_path):
    words = ["-m", "paceline.testing", "--one-in", str(every)]
    tried = sample(trials(workers), every)
    check_job(workers, words, tried, rows(CASES, every), tmp_path)


def check_job(workers, words, tried, ends, folder):
    """One job runs the sample: its launch costs more than all its checks. It is told of two
    racks, for the rows that ask for some."""
    cluster = cluster_of(workers, racks=2)
    file = folder / "racks.toml"
    file.write_text(cluster_toml(cluster))
    said, *_ = forked.run_together(
        workers, words, seconds=400, environment={"PACELINE_CLUSTER": str(file)}
    )
    expected = {f"{name}: ok" for name in [*RUNTIME_CHECKS, *(t.name for t in tried)]}
    assert expected <= set(said.stderr.splitlines())
    real = json.loads(said.stdout)
    for case, rule in [row for row in ends if row[0].timing_free]:
        virtual = {}
        Simulation(cluster).run(
            lambda rank, case=case, rule=rule, virtual=virtual: virtual.update(
                {rank: final_parameters(case, rule)}
            )
        )
        theirs = torch.tensor(real[f"{case.name} {rule}"])
        for ours in virtual.values():
            if rule in MEASURED:  # another plan adds in another order
                torch.testing.assert_close(torch.tensor(ours), theirs)
            else:  # gloo's order of adding is known, so runtimes agree to the last bit
                assert torch.equal(torch.tensor(ours), theirs)


def test_the_sample_of_each_run_has_each_law_and_each_rule():
    tried = job.chosen(3)
    assert [trial.case for trial in tried] == job.cases()
    assert {trial.check.name for trial in tried} == set(CHECKS) - ALONE
    assert {trial.rule for trial in tried} == set(RULES)
    assert {rule for _, rule in job.ends()} == set(RULES)


@pytest.mark.parametrize(("workers", "every"), [*SLOW_REAL.items(), (3, SLOW_EMULATED)])
def test_a_sample_has_each_row_each_law_and_each_rule(workers, every):
    table = trials(workers)
    tried = sample(table, every)
    assert [case for case in CASES if any(t.case is case for t in tried)] == [*CASES]
    assert {t.check.name for t in tried} == {t.check.name for t in table}
    assert {trial.rule for trial in tried} == set(RULES)
    assert {rule for _, rule in rows(CASES, every)} == set(RULES)
