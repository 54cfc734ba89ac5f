"""The same table on real processes, and the worlds held against each other."""

import json

import pytest
import torch

from paceline import fusion
from paceline.network import cluster_toml
from paceline.testing import CASES, CHECKS
from paceline.testing.__main__ import rows
from paceline.testing.cases import cluster_of
from paceline.testing.checks import (
    RULES,
    WORLD_CHECKS,
    final_parameters,
    sample,
    trials,
)
from paceline.worlds.virtual import Simulation
from tests import forked
from tests.conformance.table import FAST_REAL, SLOW_REAL


@pytest.mark.parametrize(
    ("workers", "every"),
    [
        pytest.param(1, SLOW_REAL, marks=pytest.mark.slow),
        pytest.param(2, FAST_REAL, marks=pytest.mark.slow),
        (3, 3 * FAST_REAL),
        pytest.param(3, SLOW_REAL, marks=pytest.mark.slow),
    ],
)
def test_checks_hold_and_ends_are_those_of_virtual_time(workers, every, tmp_path):
    """One job runs the sample: its launch costs more than all its checks. It is told of two
    racks, for the rows that ask for some."""
    cluster = cluster_of(workers, racks=2)
    file = tmp_path / "racks.toml"
    file.write_text(cluster_toml(cluster))
    said, *_ = forked.run_together(
        workers,
        ["-m", "paceline.testing", "--one-in", str(every)],
        seconds=400 if every == SLOW_REAL else 120,
        environment={"PACELINE_CLUSTER": str(file)},
    )
    tried = sample(trials(workers), every)
    expected = {f"{name}: ok" for name in [*WORLD_CHECKS, *(t.name for t in tried)]}
    assert expected <= set(said.stderr.splitlines())
    real = json.loads(said.stdout)
    for case, rule in [row for row in rows(CASES, every) if row[0].timing_free]:
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
    tried = sample(trials(workers), FAST_REAL)
    assert [case for case in CASES if any(t.case is case for t in tried)] == [*CASES]
    alone = {"one_worker_is_the_reference"}
    assert {trial.check.name for trial in tried} == set(CHECKS) - alone
    assert {trial.rule for trial in tried} == set(RULES)
    assert {rule for _, rule in rows(CASES, FAST_REAL)} == set(RULES)
