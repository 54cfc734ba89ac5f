"""Which command of a plan's tries its method on this machine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.cli import plan as verb
from paceline.cluster import uniform_cluster
from paceline.runtimes.simulated import ComputeModel
from tests.tools.plan.helpers import layers

MEASURED = ComputeModel(workload=layers(2, 1.0, 0.1, 0.2), what="train.workload.json")


@pytest.mark.parametrize(
    ("cores", "compute", "named", "expected"),
    [
        (2, MEASURED, None, "train.workload.json"),
        (4, MEASURED, None, None),
        (2, ComputeModel(), None, None),
        (2, replace(MEASURED, what="measured now"), None, None),
        (2, replace(MEASURED, what="resnet50"), "resnet50", "resnet50"),
    ],
)
def test_a_stand_in_is_emulated_where_workers_outnumber_cores(
    cores, compute, named, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.workload.json").touch()
    monkeypatch.setattr(verb, "this_machines_cores", lambda: cores)
    made = SimpleNamespace(compute=compute)
    assert verb._stand_in(uniform_cluster(4, "1gbit", "0s"), named, made) == expected
