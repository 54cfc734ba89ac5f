"""Evidence goes to a file and comes back as it was."""

from paceline.cluster import Workload
from paceline.cluster.profiling.step_phases import Measured, StepPhases
from paceline.tools.doctor.evidence import (
    ConcurrentFlows,
    Evidence,
    Interface,
    PathEvidence,
    WorkerEvidence,
)


def test_evidence_survives_json():
    second = Measured(1.0, 0.1)
    step = StepPhases(
        steps=8,
        step=second,
        input=second,
        forward=second,
        backward=second,
        update=second,
        first_wait=second,
        exposed=second,
        messages=3,
        bytes_sent=1e6,
    )
    eth = Interface(name="eth0", kind="ethernet", rate=125e6)
    evidence = Evidence(
        runtime="simulated",
        workers=(WorkerEvidence(rank=0, host=0, interface=eth, step=step),),
        paths=(PathEvidence(source=0, target=1, rates=(1e8, 2e8), latency=5e-5),),
        concurrent=(ConcurrentFlows(sources=(0,), targets=(1,), rates=(1e8,)),),
        workload=Workload(names=("a",), sizes=(4,), forward=(0.1,), backward=(0.2,)),
    )
    assert Evidence.read(evidence.to_json()) == evidence
