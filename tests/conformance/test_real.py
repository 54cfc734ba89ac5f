"""The same table on real processes, and the worlds held against each other."""

import json
import os
import subprocess
import sys

import pytest
import torch

from paceline import fusion
from paceline.network import uniform_cluster
from paceline.testing import CASES
from paceline.testing.checks import RULES, WORLD_CHECKS, checks_of, final_parameters
from paceline.worlds.virtual import Simulation

ROWS = [(case, rule) for case in CASES for rule in RULES]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[1, 3], ids=["1 process", "3 processes"])
def job(request):
    """One job runs the whole table: a launch costs more than all its checks."""
    launcher = [] if request.param == 1 else ["torch.distributed.run", "--standalone"]
    if launcher:
        launcher += [f"--nproc-per-node={request.param}", "-m"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "paceline.testing"],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    return request.param, done


def test_all_checks_ran_and_hold(job):
    workers, done = job
    assert done.returncode == 0, done.stderr
    expected = {f"{name}: ok" for name in WORLD_CHECKS} | {
        f"{case.name} {rule} {check.name}: ok"
        for case, rule in ROWS
        for check in checks_of(case, rule, workers)
    }
    assert expected <= set(done.stderr.splitlines())


def test_both_worlds_end_with_the_same_parameters(job):
    workers, done = job
    real = json.loads(done.stdout)
    for case, rule in [row for row in ROWS if row[0].timing_free]:
        virtual = {}
        Simulation(uniform_cluster(workers, "100mbit", "1ms")).run(
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
