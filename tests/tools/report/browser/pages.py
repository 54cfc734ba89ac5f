"""One page of each kind, made of data that nobody has measured."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.cluster import Workload, uniform_cluster
from paceline.interfaces import CONSISTENCIES
from paceline.records import STEP_ROW, Span, StepRecord
from paceline.tools.doctor.diagnosis import Diagnosis, Fault
from paceline.tools.doctor.report import doctor_report
from paceline.tools.plan.estimates import Infeasible
from paceline.tools.plan.report import Question, plan_report
from paceline.tools.plan.what_if import (
    RATES,
    WORKERS,
    BreakEven,
    ScalingPoint,
    Suggestion,
    Suggestions,
)
from paceline.tools.report.html import NAME, write_page
from paceline.tools.report.timeline import Step, typical_step
from tests.tools.compare.cases import three
from tests.tools.doctor.synthetic import Site
from tests.tools.plan.helpers import made, row

WILD = "</script><b>\"'&漢 \u2028"
"""What a script's name may hold, and a page must keep."""
LONG = "bsp:compression=top-k,fraction=0.01,feedback=true,collective=hierarchical,buckets=optimal"


def compared(folder: Path) -> Path:
    """Three variants of digits, as in the tests of reports."""
    return three().write(folder, f"{WILD}: 3 methods", f"paceline compare '{WILD}'")


def planned(folder: Path) -> Path:
    """A row of each class, of which one was rejected after its short run."""
    rows = [
        row("bsp", "exact", 0.2),
        row("bsp:buckets=ddp", "exact", 0.3),
        row("osp", "delayed", 0.1),
        row(LONG, "lossy", 0.08),
        row("diloco", "local", 0.05),
        row("asp", "asynchronous", 1.0, fidelity="short", rejected=True),
    ]
    clips = Infeasible(spec="r2sp", consistency="asynchronous", reason="it <clips>")
    rows.sort(key=lambda one: one.step_seconds)
    plan = msgspec.structs.replace(made(*rows), infeasible=(clips,))
    helps = Suggestions(
        break_even=(BreakEven(spec="bsp", rate=1e7, words="as fast at 80 Mbit/s"),),
        helps=(
            Suggestion(what="4 workers", spec="bsp", step_seconds=0.1, speedup=1.5),
        ),
    )
    question = Question(
        cluster=uniform_cluster(8, "100mbit", "50us"),
        workload=Workload.spread(("w",), (4000,), 0.01, 0.02),
        script=WILD,
        command=f"paceline plan '{WILD}'",
        network=["--workers=8"],
    )
    page = plan_report(
        plan,
        helps,
        question,
        points=points(),
        steps=[step(spec, 0.1 * (3 - i)) for i, spec in enumerate((WILD, LONG, "osp"))],
    )
    return write_page(folder / NAME, page)


def doctored(folder: Path) -> Path:
    """A slow link of eight hosts."""
    evidence = Site(slow={(2, "out"): 0.2}).evidence()
    fault = Fault(
        name="slow-link",
        location="outgoing link of worker 2",
        cause="outgoing link of worker 2 has 200 Mbit/s, the median is 1 Gbit/s",
        advice="Check the cable.",
        command="paceline doctor",
        gain_seconds=0.5,
        hosts=(2,),
    )
    found = Diagnosis(
        faults=(fault,),
        runtime="real",
        workers=8,
        spec="bsp",
        trained=True,
        predicted_seconds=1.0,
        fixed_seconds=0.5,
        lower_bound_seconds=0.4,
        step_seconds=1.1,
        single_seconds=0.3,
    )
    return write_page(
        folder / NAME, doctor_report(found, evidence, f"paceline doctor '{WILD}'")
    )


def points() -> list[ScalingPoint]:
    return [
        ScalingPoint(
            workers=workers,
            rate=rate,
            consistency=consistency,
            spec=consistency,
            step_seconds=1.0,
            speedup=workers / (1 + place + 1e9 / rate / 100),
            efficiency=1 / (1 + place + 1e9 / rate / 100),
        )
        for workers in WORKERS
        for rate in RATES
        for place, consistency in enumerate(CONSISTENCIES)
    ]


def step(spec: str, seconds: float, workers: int = 3, steps: int = 4) -> Step:
    """A step that computes for 40 ms, and then waits for two messages."""
    records, spans = [], []
    for worker in range(workers):
        for number in range(1, steps + 1):
            start, end = (number - 1) * seconds, number * seconds
            middle = start + 0.04
            for line in (
                (STEP_ROW, f"step {number}", start, end),
                ("compute", "forward", start, start + 0.01),
                ("compute", "backward", start + 0.01, middle),
                ("wait", "all_reduce", middle, end),
                ("world lane 0", "all_reduce(SUM, float32[8]), 1 MB sent", middle, end),
                ("world lane 1", WILD, start + 0.02, middle + 0.01),
            ):
                spans.append(Span(worker, *line))
            records.append(
                StepRecord(
                    worker=worker,
                    step=number,
                    end_seconds=end,
                    step_seconds=seconds,
                    compute_seconds=0.04,
                    exposed_communication_seconds=seconds - 0.04,
                    bytes_sent=1000,
                    metrics={},
                )
            )
    found = typical_step(spec, lambda: spans, records)
    assert found is not None
    return found
