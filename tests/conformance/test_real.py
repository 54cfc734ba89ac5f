"""The same table on real processes, and the worlds held against each other."""

import json

import pytest
import torch

from paceline import fusion
from paceline.network import cluster_toml
from paceline.testing import CASES, CHECKS
from paceline.testing.cases import cluster_of
from paceline.testing.checks import RULES, WORLD_CHECKS, final_parameters, trials
from paceline.worlds.virtual import Simulation
from tests import forked
from tests.conformance.table import ROWS, sampled_rows, sampled_trials


@pytest.mark.parametrize(
    ("workers", "whole"),
    [
        pytest.param(1, True, id="1 process", marks=pytest.mark.slow),
        pytest.param(2, False, id="2 processes, a sample"),
        pytest.param(3, False, id="3 processes, a sample"),
        pytest.param(3, True, id="3 processes", marks=pytest.mark.slow),
    ],
)
def test_all_checks_hold_and_ends_are_those_of_virtual_time(workers, whole, tmp_path):
    """One job runs the table: its launch costs more than all its checks. It is told of two
    racks, for the rows that ask for some."""
    cluster = cluster_of(workers, racks=2)
    file = tmp_path / "racks.toml"
    file.write_text(cluster_toml(cluster))
    module = "paceline.testing" if whole else "tests.conformance.table"
    said, *_ = forked.run_together(
        workers,
        ["-m", module],
        seconds=400 if whole else 120,
        environment={"PACELINE_CLUSTER": str(file)},
    )
    tried = trials(workers) if whole else sampled_trials(workers)
    rows = ROWS if whole else sampled_rows()
    expected = {f"{name}: ok" for name in [*WORLD_CHECKS, *(t.name for t in tried)]}
    assert expected <= set(said.stderr.splitlines())
    real = json.loads(said.stdout)
    for case, rule in [row for row in rows if row[0].timing_free]:
        virtual = {}
        Simulation(cluster).run(
            lambda rank, case=case, rule=rule, virtual=virtual: virtual.update(
                {rank: final_parameters(case, rule)}
            )
        )
        theirs = torch.tensor(real[f"{case.name} {rule}"])
        for ours in virtual.values():
            if rule in fusion.MEASURED:  # another plan adds in another order
                torch.testing.assert_close(torch.tensor(ours), theirs)
            else:  # gloo's order of adding is known, so worlds agree to the last bit
                assert torch.equal(torch.tensor(ours), theirs)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_sample_has_each_row_each_law_and_each_rule(workers):
    tried = sampled_trials(workers)
    assert [case for case in CASES if any(t.case is case for t in tried)] == [*CASES]
    alone = {"one_worker_is_the_reference"}
    assert {trial.check.name for trial in tried} == set(CHECKS) - alone
    assert {trial.rule for trial in tried} == set(RULES)
    assert {rule for _, rule in sampled_rows()} == set(RULES)
