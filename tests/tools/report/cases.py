"""Comparisons as they come out of runs, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from paceline.records import STEP_ROW, Span
from paceline.runtimes.results import RunResult
from paceline.tools.compare.runner import Variant, VariantStep
from paceline.tools.report.traces import chrome_trace

Metrics = Mapping[str, float | None]


@dataclass
class Comparison:
    """Variants, what they took, and their records."""

    results: list[tuple[str, RunResult]] = field(default_factory=list)
    steps: list[VariantStep] = field(default_factory=list)

    @property
    def variants(self) -> list[Variant]:
        return [Variant(i, spec) for i, (spec, _) in enumerate(self.results)]

    def add(
        self,
        spec: str,
        logged: Sequence[Metrics],
        *,
        last: Metrics | None = None,
        workers: int = 1,
        compute: float = 0.03,
        exposed: float = 0.01,
        runtime: str = "simulated",
    ) -> None:
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
        self.results.append((spec, result))
        for number, metrics in enumerate(logged, start=1):
            for worker in range(workers):
                self.record(spec, worker, number, number * (compute + exposed), metrics)

    def record(
        self, spec: str, worker: int, step: int, end: float, metrics: Metrics
    ) -> None:
        self.steps.append(
            VariantStep(
                variant=spec,
                worker=worker,
                step=step,
                end_seconds=end,
                step_seconds=0.04,
                compute_seconds=0.03,
                exposed_communication_seconds=0.01,
                bytes_sent=1000,
                metrics=dict(metrics),
            )
        )

    def leave(self, folder: Path) -> None:
        """What `merge_records` leaves in *folder*."""
        folder.mkdir(exist_ok=True)
        lines = msgspec.json.Encoder().encode_lines(self.steps)
        (folder / "records.jsonl").write_bytes(lines)
        for variant in self.variants:
            mine = [step for step in self.steps if step.variant == variant.spec]
            spans = [span for step in mine for span in spans_of(step)]
            trace = b"".join(chrome_trace(lambda spans=spans: spans))
            (folder / f"{variant.file_name}.trace.json").write_bytes(trace)


def spans_of(step: VariantStep) -> list[Span]:
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


def wild() -> Comparison:
    """Names that mean something in HTML, SVG and mathematical text; values that are no
    numbers."""
    comparison = Comparison()
    name = '<script src="http://bad">&$x_1$'
    comparison.add("bsp:a=<b>&'\"", [{name: 1.0, "loss": None}] * 3, runtime="real")
    comparison.add("$\\frac$\x07 漢字", [{name: float("nan"), "loss": None}] * 3)
    return comparison
