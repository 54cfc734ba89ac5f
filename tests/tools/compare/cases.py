"""Comparisons as they come out of runs, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.records import STEP_ROW, Span, StepRecord
from paceline.runtimes.results import FailedRun, Outcome, RunResult
from paceline.tools.compare.report import comparison_report
from paceline.tools.compare.runner import Goal, Variant, VariantRun
from paceline.tools.plan.estimates import Baseline, Estimate, Plan
from paceline.tools.report.html import NAME, write_page
from paceline.tools.report.model import Report
from paceline.tools.report.traces import chrome_trace

Metrics = Mapping[str, float | None]
FAILED = FailedRun(failed="worker 0 raised GradientError: clipped", exit_status=1)


@dataclass
class Comparison:
    """Variants, what they took, and their records."""

    runs: list[VariantRun] = field(default_factory=list)

    def add(
        self,
        spec: str,
        logged: Sequence[Metrics] = (),
        *,
        last: Metrics | None = None,
        workers: int = 1,
        compute: float = 0.03,
        exposed: float = 0.01,
        runtime: str = "simulated",
        consistency: str = "exact",
        predicted: float | None = None,
        goal: Goal | None = None,
    ) -> RunResult:
        """A variant whose workers all log *logged*[k] before the end of step k + 1, and
        *last* after the last one."""
        result = RunResult(
            runtime=runtime,
            workers=workers,
            method=spec,
            steps=len(logged),
            buckets=3,
            step_seconds=compute + exposed if logged else None,
            compute_seconds=compute if logged else None,
            exposed_communication_seconds=exposed if logged else None,
            bytes_sent_per_worker=1e6 if logged else None,
            metrics={k: v for m in [*logged, last or {}] for k, v in m.items()},
        )
        steps = [
            record(worker, number, number * (compute + exposed), metrics)
            for number, metrics in enumerate(logged, start=1)
            for worker in range(workers)
        ]
        reached = None
        if goal is not None:
            mine = [step for step in steps if step.worker == 0]
            reached = goal.reached(
                (curve := goal.curve(mine, result.metrics.get(goal.metric))),
                goal.rises([curve]),
            )
        self.end(spec, result, steps, reached, consistency, predicted)
        return result

    def end(
        self,
        spec: str,
        outcome: Outcome = FAILED,
        steps: Sequence[StepRecord] = (),
        reached: StepRecord | None = None,
        consistency: str = "exact",
        predicted: float | None = None,
    ) -> None:
        """A variant that ended with that outcome."""
        variant = Variant(len(self.runs), spec, consistency, predicted)
        self.runs.append(VariantRun(variant, outcome, steps, reached))

    def report(
        self,
        folder: Path = Path(),
        *,
        title: str = "a comparison",
        command: str = "",
        goal: Goal | None = None,
        one_machine: float | None = None,
    ) -> Report:
        return comparison_report(
            self.runs,
            folder,
            title=title,
            command=command,
            goal=goal,
            planned=None if one_machine is None else plan_of(one_machine).baseline,
        )

    def write(self, folder: Path, title: str = "", command: str = "") -> Path:
        """The page in *folder*, with all traces beside it."""
        folder.mkdir(exist_ok=True)
        (folder / "records.jsonl").write_text("")
        for run in self.runs:
            spans = [span for step in run.steps for span in spans_of(step)]
            trace = b"".join(chrome_trace(lambda spans=spans: spans))
            (folder / f"{run.variant.file_name}.trace.json").write_bytes(trace)
        report = self.report(folder, title=title, command=command)
        return write_page(folder / NAME, report)


def plan_of(one_machine: float) -> Plan:
    """A plan by which one machine takes so long."""
    single = Estimate(
        spec="",
        consistency="exact",
        step_seconds=one_machine,
        compute_seconds=one_machine,
        exposed_seconds=0.0,
        bytes_sent=0.0,
        buckets=0,
    )
    baseline = Baseline(
        workers=4, batch=None, single=single, lower_bound_seconds=one_machine / 8
    )
    return Plan(cluster="", workload="", baseline=baseline, estimates=(), infeasible=())


def record(worker: int, step: int, end: float, metrics: Metrics) -> StepRecord:
    return StepRecord(
        worker=worker,
        step=step,
        end_seconds=end,
        step_seconds=0.04,
        compute_seconds=0.03,
        exposed_communication_seconds=0.01,
        bytes_sent=1000,
        metrics=dict(metrics),
    )


def spans_of(step: StepRecord) -> list[Span]:
    """It computes, and then waits for the one message that it sends meanwhile."""
    start = step.end_seconds - step.step_seconds
    middle = start + step.compute_seconds
    end = step.end_seconds
    rows = [
        (STEP_ROW, f"step {step.step}", start, end),
        ("compute", "forward", start, middle),
        ("wait", "all_reduce", middle, end),
        ("world lane 0", "all_reduce(SUM, float32[8])", (start + middle) / 2, end),
    ]
    return [Span(step.worker, *row) for row in rows]


def falling(count: int = 20) -> list[dict[str, float | None]]:
    """A loss in every step, and an accuracy in every tenth."""
    return [
        {"loss": 2.0 / step} | ({"accuracy": step / 100} if step % 10 == 0 else {})
        for step in range(1, count + 1)
    ]


def three() -> Comparison:
    comparison = Comparison()
    for i, spec in enumerate(("bsp", "bsp:buckets=wfbp", "bsp:buckets=single")):
        comparison.add(
            spec, falling(), workers=2, exposed=0.01 * i, last={"accuracy": 0.9}
        )
    return comparison
