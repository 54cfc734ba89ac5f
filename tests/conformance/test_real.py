"""The same table on real processes, and the runtimes held against each other."""

import json

import pytest
import torch

from paceline.bucketing.rules import MEASURED
from paceline.cluster import cluster_toml
from paceline.runtimes.simulated import Simulation
from paceline.testing import CASES
from paceline.testing.__main__ import rows
from paceline.testing.cases import cluster_of
from paceline.testing.method_checks import (
    RULES,
    RUNTIME_CHECKS,
    final_parameters,
    sample,
    trials,
)
from tests.support import forked

ONE_EACH = 1000
"""More trials than a row has: of each row one is run."""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_checks_hold_and_ends_are_those_of_virtual_time(workers, tmp_path):
    """One job runs the sample: its launch costs more than all its checks. It is told of two
    racks, for the rows that ask for some."""
    cluster = cluster_of(workers, racks=2)
    file = tmp_path / "racks.toml"
    file.write_text(cluster_toml(cluster))
    said, *_ = forked.run_together(
        workers,
        ["-m", "paceline.testing", "--one-in", ONE_EACH],
        seconds=400,
        environment={"PACELINE_CLUSTER": str(file)},
    )
    tried = [trial.name for trial in sample(trials(workers), ONE_EACH)]
    expected = {f"{name}: ok" for name in [*RUNTIME_CHECKS, *tried]}
    assert expected <= set(said.stderr.splitlines())
    real = json.loads(said.stdout)
    virtual = {}

    def train(rank):
        for case, rule in rows(CASES, ONE_EACH):
            if case.timing_free:
                virtual[f"{case.name} {rule}", rank] = final_parameters(case, rule)

    Simulation(cluster).run(train)
    assert {name for name, _ in virtual} == set(real)
    for (name, _), ours in virtual.items():
        if name.split()[-1] in MEASURED:  # another plan adds in another order
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(real[name]))
        else:  # gloo's order of adding is known, so runtimes agree to the last bit
            assert ours == real[name], name


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_sample_has_each_row_each_law_and_each_rule(workers):
    table = trials(workers)
    tried = sample(table, ONE_EACH)
    assert [trial.case for trial in tried] == [*CASES]
    assert {t.check.name for t in tried} == {t.check.name for t in table}
    assert {trial.rule for trial in tried} == set(RULES)
    assert {rule for _, rule in rows(CASES, ONE_EACH)} == set(RULES)
