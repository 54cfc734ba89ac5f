"""A comparison as a report: which method is fastest, one table, charts, a step of each.

The page and the terminal show the same headline and the same table. `to_json` has the same columns, named
by `KEYS`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec

from paceline.bucketing.tuner import IN_A_TRIAL
from paceline.interfaces import CONSISTENCIES
from paceline.records import StepRecord
from paceline.runtimes.results import RunResult
from paceline.tools.compare.runner import Goal, VariantRun
from paceline.tools.plan.estimates import DDP, Baseline, Plan
from paceline.tools.plan.recommendation import class_name
from paceline.tools.plan.report import command, summary_lines
from paceline.tools.report.model import (
    GREY,
    Bar,
    BarChart,
    Cell,
    LineChart,
    Links,
    Number,
    Panel,
    Report,
    Section,
    Series,
    Table,
    Text,
    TimelineSection,
)
from paceline.tools.report.terminal import parts_of_step
from paceline.tools.report.timeline import Step, typical_step
from paceline.tools.report.traces import read_spans
from paceline.units import show_bytes, show_count, show_seconds

SPANS = 24_000
"""Spans in all timelines of a page together: a third of a megabyte."""
MOST_POINTS, MOST_POINTS_OF_ALL = 300, 2400
"""Points of a line, and of all lines of a chart, at most; more would make a large file."""
MOST = 1e300
"""Largest value in a chart: beyond it axes overflow."""
KEYS = {
    "consistency": "consistency",
    "method": "variant",
    "step": "step_seconds",
    "predicted": "predicted_seconds",
    "compute": "compute_seconds",
    "exposed": "exposed_communication_seconds",
    "sent": "bytes_sent_per_worker",
    "buckets": "buckets",
    "vs. DDP": "ddp_speedup",
    "vs. first": "first_speedup",
    "vs. 1 machine": "speedup",
    "vs. bound": "bound_ratio",
}
"""Names of columns in JSON. Metrics are in ``metrics``; the goal's column is ``reached_seconds``."""
WIDE = 1000.0
"""If a metric's largest value is so many times its smallest, its axis is logarithmic."""


def comparison_report(
    runs: Sequence[VariantRun],
    folder: Path,
    *,
    title: str,
    command: str = "",
    goal: Goal | None = None,
    planned: Baseline | None = None,
    script: str = "",
    arguments: Sequence[str] = (),
) -> Report:
    """Report a comparison of which at least one run has succeeded.

    Args:
        runs: The runs.
        folder: Folder of the traces; the page is written beside them.
        title: The script and the network.
        command: The command that ran the comparison.
        goal: A target value of a metric, if one was given.
        planned: A plan's predictions: one machine with the same global batch, and the shortest exact
            step; None: there is no plan.
        script: The script with its *arguments*, for commands; empty: no commands are shown.
    """
    first = next(run.result for run in runs if run.result is not None)
    shown = _Comparison(runs, goal, planned)
    notes = [
        ("network", first.network),
        ("compute", first.compute),
        ("runtime", f"{first.runtime}, {show_count(first.workers, 'worker')}"),
    ]
    sections: list[Section | None] = [
        shown.table(),
        summary_lines([run.variant.spec for *_, run, _ in shown.ran]),
        shown.notes(),
        shown.commands(script, arguments),
        shown.where_steps_go(),
        shown.bucket_trials(),
        shown.step_times(),
        *shown.metric_charts(),
        _timeline(shown, folder),
        *_files(shown),
    ]
    return Report(
        title=title,
        answer=shown.headline(),
        command=command,
        notes=[(name, text) for name, text in notes if text],
        sections=[section for section in sections if section is not None],
    )


class _Comparison:
    """The runs, their names, and the baseline."""

    def __init__(
        self,
        runs: Sequence[VariantRun],
        goal: Goal | None,
        planned: Baseline | None = None,
    ) -> None:
        self.runs, self.goal, self.planned = runs, goal, planned
        self.one_machine = None if planned is None else planned.single.step_seconds
        counts = Counter(run.variant.spec for run in runs)
        self.names = [
            f"{run.variant.spec} (number {i})"
            if counts[run.variant.spec] > 1
            else run.variant.spec
            for i, run in enumerate(runs, start=1)
        ]
        self._results = [run.result for run in runs if run.result is not None]
        self.first = self._results[0]
        timed = [run for run in runs if _step(run) is not None]
        ddp = [run for run in timed if run.variant.spec == DDP]
        self.baseline = next(iter(ddp or timed), None)
        self.baseline_name = "DDP" if ddp else "first"

    @property
    def ran(self) -> list[tuple[int, str, VariantRun, RunResult]]:
        """Each run that has succeeded: its number, its name, and its result."""
        return [
            (number, name, run, run.result)
            for number, (name, run) in enumerate(
                zip(self.names, self.runs, strict=True)
            )
            if run.result is not None
        ]

    # ---- the headline ----

    def headline(self) -> str:
        """Say which method reaches the goal first, or without a goal has the shortest step."""
        if self.goal is not None:
            return self._times_to_goal(self.goal)
        timed = [
            (seconds, name, run.variant.consistency)
            for name, run in zip(self.names, self.runs, strict=True)
            if (seconds := _step(run)) is not None
        ]
        if not timed:
            return "No step was taken."
        least, name, consistency = min(timed)
        if len(timed) == 1:
            return f"{name}: {show_seconds(least)} per step."
        text = f"Shortest step: {name}, {self._against_baseline(least)}."
        exact = [one for one in timed if one[2] == "exact"]
        if consistency and consistency != "exact" and exact:
            seconds, exact_name, _ = min(exact)
            text += f" Shortest exact step: {exact_name}, "
            text += f"{self._against_baseline(seconds)}."
        return text + self._metrics_beside_baseline(self.names.index(name))

    def _metrics_beside_baseline(self, number: int) -> str:
        """Metrics of another method beside the baseline's: a short step alone is no gain."""
        run, baseline = self.runs[number], self.baseline
        if baseline is None or run is baseline or run.variant.consistency == "exact":
            return ""
        if run.result is None or baseline.result is None:
            return ""
        mine, base = run.result.metrics, baseline.result.metrics
        other = self._baseline_label()
        parts = [
            f"{name} {mine[name]:.4g} ({other} {base[name]:.4g})"
            for name in mine
            if name in base
        ]
        steps = show_count(run.result.steps, "step")
        found = ", ".join(parts)
        return f" {self.names[number]} after {steps}: {found}." if parts else ""

    def _against_baseline(self, seconds: float) -> str:
        assert self.baseline is not None
        base = _step(self.baseline) or seconds
        return (
            f"{show_seconds(seconds)} ({base / seconds:.2f}x {self._baseline_label()})"
        )

    def _baseline_label(self) -> str:
        assert self.baseline is not None
        if self.baseline_name == "first":
            return self.names[self.runs.index(self.baseline)]
        return self.baseline_name

    def _times_to_goal(self, goal: Goal) -> str:
        times = [
            (run.reached.end_seconds, _short(name))
            for name, run in zip(self.names, self.runs, strict=True)
            if run.reached is not None
        ]
        alone = self.one_machine_to_goal()
        if alone is not None:
            times.append((alone, "one machine"))
        missed = [_short(name) for _, name, run, _ in self.ran if run.reached is None]
        text = f"{goal.metric} {goal.value:g}: "
        if times:
            clock = " (virtual time)" if self.first.runtime == "simulated" else ""
            text += ", ".join(f"{name} {show_seconds(t)}" for t, name in sorted(times))
            text += f"{clock}."
        if missed and times:
            text += f" {', '.join(missed)} did not reach it."
        return text if times else f"{text}no method reached it."

    def one_machine_to_goal(self) -> float | None:
        """Time of one machine to the goal: step by step it learns like DDP."""
        if self.one_machine is None or self.baseline_name != "DDP":
            return None
        reached = self.baseline.reached if self.baseline is not None else None
        return None if reached is None else reached.step * self.one_machine

    # ---- the table ----

    def table(self) -> Table:
        """Return a row per method, and one for one machine if its time is known."""
        metrics = self._metrics() if self.goal is None else [self.goal.metric]
        planned = any(run.variant.predicted is not None for run in self.runs)
        headings = ["consistency", "method", "step"]
        headings += ["predicted"] if planned else ["exposed"]
        headings += [f"vs. {self.baseline_name}"] if len(self.runs) > 1 else []
        headings += ["vs. 1 machine"] if self.one_machine is not None else []
        to_goal = [] if self.goal is None else [f"to {self.goal}"]
        rows: list[list[Cell]] = []
        colours = []
        if self.one_machine is not None:
            known: dict[str, Cell] = {
                "method": "one machine, same global batch",
                "step": _seconds(self.one_machine),
                **self.ratios(self.one_machine),
            }
            row = [known.get(heading) for heading in headings]
            row += [None] * len(metrics)
            rows.append(row + [_seconds(self.one_machine_to_goal())] * len(to_goal))
            colours.append(GREY)
        for name, run in zip(self.names, self.runs, strict=True):
            cells = self._cells(run)
            cells["method"] = f"DDP ({name})" if run.variant.spec == DDP else name
            row = [cells.get(heading) for heading in headings]
            row += _metric_cells(run, metrics)
            rows.append(row + [self._goal_cell(run)] * len(to_goal))
            colours.append(_colour(run))
        return Table(
            title=f"{show_count(self.first.workers, 'worker')}, {self.first.runtime} runtime",
            headings=[*headings, *metrics, *to_goal],
            rows=rows,
            colours=colours,
            caption=self._legend(),
            level="summary",
        )

    def _metrics(self) -> list[str]:
        return list(
            dict.fromkeys(name for *_, result in self.ran for name in result.metrics)
        )

    def where_steps_go(self) -> Table:
        """Return the parts of each method's step, its bytes, and all metrics."""
        headings = ["method", "buckets", "step", "compute", "exposed", "sent"]
        caption = f"{parts_of_step(self._results)} sent: per worker and step."
        if self.planned is not None:
            headings.append("vs. bound")
            caption += " vs. bound: over the shortest step of any exact averaging."
        metrics = self._metrics()
        rows = []
        for _, name, run, _ in self.ran:
            cells: dict[str, Cell] = {"method": name, **self._cells(run)}
            parts = [cells.get(heading) for heading in headings]
            rows.append(parts + _metric_cells(run, metrics))
        return Table(
            title="Where a step goes",
            headings=[*headings, *metrics],
            rows=rows,
            colours=[_colour(run) for *_, run, _ in self.ran],
            caption=caption,
        )

    def ratios(self, seconds: float | None) -> dict[str, Number | None]:
        """Return a step of *seconds* relative to the baselines, by column."""
        found: dict[str, Number | None] = {}
        if len(self.runs) > 1:
            base = None if self.baseline is None else _step(self.baseline)
            found[f"vs. {self.baseline_name}"] = _ratio(base, seconds)
        if self.planned is not None:
            found["vs. 1 machine"] = _ratio(self.one_machine, seconds)
            found["vs. bound"] = _ratio(seconds, self.planned.lower_bound_seconds)
        return found

    def _cells(self, run: VariantRun) -> dict[str, Cell]:
        """Return a run's cells by their headings."""
        cells: dict[str, Cell] = {
            "consistency": class_name(run.variant.consistency) or None,
            "predicted": _seconds(run.variant.predicted),
        }
        result = run.result
        if result is None:
            return cells | {"step": Number(None, "failed")}
        step, sent = result.step_seconds, result.bytes_sent_per_worker
        steady = ""
        if result.steady_from is not None:
            steady = f"steps {result.steady_from} to {result.steps}"
        cells |= {
            "buckets": Number(result.buckets, str(result.buckets)),
            "step": None if step is None else Number(step, show_seconds(step), steady),
            "compute": _seconds(result.compute_seconds),
            "exposed": _seconds(result.exposed_communication_seconds),
            "sent": None if sent is None else Number(sent, show_bytes(sent)),
            **self.ratios(step),
        }
        return cells

    def _goal_cell(self, run: VariantRun) -> Cell:
        """Return the time at which a run reached the goal; empty for a failed run."""
        if run.result is None:
            return None
        if run.reached is None:
            return Number(None, "never")
        seconds, count = run.reached.end_seconds, run.reached.step
        return Number(seconds, f"{show_seconds(seconds)} ({show_count(count, 'step')})")

    def _legend(self) -> str:
        text = (
            f"step: time per global batch. {parts_of_step(self._results)} Each figure is a median "
            "over steady-state steps."
        )
        if self.one_machine is not None:
            text += ' "One machine" is computed from its step, without evaluations; it was not run.'
        if self.first.runtime == "simulated":
            text += (
                " All times are virtual: a script reads them with paceline.now(), not with "
                "time.time()."
            )
        return text

    def notes(self) -> Text | None:
        """Return each note once, with the methods that it concerns."""
        lines = self._notes(trials=False)
        return Text(title="Notes", lines=lines, level="summary") if lines else None

    def bucket_trials(self) -> Text | None:
        """Return how planned buckets compare with others; the table shows which ones were used."""
        lines = self._notes(trials=True)
        return Text(title="Trials of buckets", lines=lines) if lines else None

    def _notes(self, *, trials: bool) -> list[str]:
        about: dict[str, list[str]] = {}
        for name, run in zip(self.names, self.runs, strict=True):
            for note in run.outcome.notes:
                if (IN_A_TRIAL in note) == trials:
                    about.setdefault(note, []).append(name)
        return [
            note
            if len(names) == len(self.runs) and len(names) > 1
            else f"{', '.join(names)}: {note}"
            for note, names in about.items()
        ]

    def commands(self, script: str, arguments: Sequence[str]) -> Text | None:
        """Commands that train with the best method, and with the best exact one."""
        ranked = sorted(
            (seconds, number)
            for number, run in enumerate(self.runs)
            if (seconds := self._rank(run)) is not None
        )
        order = [self.runs[number] for _, number in ranked]
        exact = [run for run in order if run.variant.consistency == "exact"]
        specs = [run.variant.spec for run in (*order[:1], *exact[:1])]
        if not specs or not script:
            return None
        lines = [command(spec, script, arguments) for spec in dict.fromkeys(specs)]
        title = "Run the best" + (", or the best exact one" if len(lines) > 1 else "")
        return Text(title=title, lines=lines, kind="code", level="summary")

    def _rank(self, run: VariantRun) -> float | None:
        """Return the seconds to the goal if there is one; else seconds of a step."""
        if self.goal is None:
            return _step(run)
        return None if run.reached is None else run.reached.end_seconds

    # ---- charts ----

    def step_times(self) -> BarChart:
        """Return a bar per method."""
        rows = []
        for _, name, run, result in self.ran:
            parts = (result.compute_seconds, result.exposed_communication_seconds)
            step = result.step_seconds
            rows.append(
                Bar(
                    name=name,
                    values=[0.0 if part is None else max(0.0, part) for part in parts],
                    text="no steps" if step is None else show_seconds(step),
                    colour=_colour(run),
                )
            )
        return BarChart(
            title="Time per step",
            parts=("compute", "exposed"),
            rows=rows,
            caption="Colour: consistency.",
        )

    def metric_charts(self) -> list[LineChart]:
        """Return a chart of each metric against time."""
        curves = metric_curves([run for *_, run, _ in self.ran])
        return [self._metric_chart(metric, mine) for metric, mine in curves.items()]

    def _metric_chart(self, metric: str, curves: Sequence[Curve]) -> LineChart:
        most = min(MOST_POINTS, MOST_POINTS_OF_ALL // len(curves))
        drawn = [thinned(curve, most) for curve in curves]
        series = [
            Series(
                name if has_values(curve) else f"{name} (no finite value)",
                curve.seconds,
                curve.values,
                _colour(run),
                number,
            )
            for (number, name, run, _), curve in zip(self.ran, drawn, strict=True)
        ]
        values = [v for curve in drawn for v in curve.values if math.isfinite(v)]
        wide = bool(values) and 0 < min(values) < max(values) / WIDE
        clock = "virtual time" if self.first.runtime == "simulated" else "time"
        caption = "Mean over the workers that log it in a step. Colour: consistency; marker: method."
        dotted = None
        if self.goal is not None and metric == self.goal.metric and values:
            dotted = self._to_goal(self.goal, values)
            caption += f" Dotted: {self.goal}, and when the first method reaches it."
        if any(
            len(a.values) < len(b.values) for a, b in zip(drawn, curves, strict=True)
        ):
            caption += (
                f" Lines of over {most} steps: means of neighbouring finite values."
            )
        return LineChart(
            title=f"{metric} over time",
            panels=[Panel("", series, dotted)],
            x=f"{clock} since training began (s)",
            y=metric,
            log="y" if wide else "",
            caption=caption,
        )

    def _to_goal(
        self, goal: Goal, values: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Return the goal's lines: from one axis to the first run that reaches it, then to the other axis."""
        times = [
            run.reached.end_seconds for run in self.runs if run.reached is not None
        ]
        if not times:
            steps = [step for *_, run, _ in self.ran for step in run.steps]
            ends = max((step.end_seconds for step in steps), default=0.0)
            return [0.0, ends], [goal.value, goal.value]
        when = min(times)
        return [0.0, when, when], [goal.value, goal.value, min(values)]


def to_json(
    runs: Sequence[VariantRun], goal: Goal | None = None, plan: Plan | None = None
) -> str:
    """Return the runs as JSON: ``{"variants": [...]}``.

    A variant has its spec as given, its consistency, and the fields of its result or failure. It also has its
    relative step times (`KEYS`), and the step and seconds at which it reached the goal. With a *plan* there are
    also ``one_machine`` and ``plan``.
    """
    planned = None if plan is None else plan.baseline
    ran = any(run.result is not None for run in runs)
    shown = _Comparison(runs, goal, planned) if ran else None
    rows = []
    for run in runs:
        row: dict[str, object] = {"variant": run.variant.spec}
        if run.variant.consistency:
            row["consistency"] = run.variant.consistency
        if run.variant.predicted is not None:
            row["predicted_seconds"] = run.variant.predicted
        row |= msgspec.structs.asdict(run.outcome)
        if shown is not None and run.result is not None:
            row |= _by_key(shown.ratios(_step(run)))
        if run.reached is not None:
            row["reached_seconds"] = run.reached.end_seconds
            row["reached_step"] = run.reached.step
        rows.append(row)
    content: dict[str, object] = {"variants": rows}
    if shown is not None and shown.one_machine is not None:
        one = {
            "step_seconds": shown.one_machine,
            **_by_key(shown.ratios(shown.one_machine)),
        }
        reached = shown.one_machine_to_goal()
        content["one_machine"] = one | (
            {} if reached is None else {"reached_seconds": reached}
        )
    if plan is not None:
        content["plan"] = plan
    return msgspec.json.encode(content).decode()


def _by_key(cells: Mapping[str, Number | None]) -> dict[str, float | None]:
    return {
        KEYS[name]: None if one is None else one.value for name, one in cells.items()
    }


def _timeline(shown: _Comparison, folder: Path) -> TimelineSection | None:
    """Return a step of each method that left a trace."""
    steps: list[Step] = []
    for _, name, run, _ in shown.ran:
        trace = folder / f"{run.variant.file_name}.trace.json"
        if trace.exists():
            spans = partial(read_spans, trace)
            step = typical_step(name, spans, run.steps, SPANS // max(6, len(shown.ran)))
            steps += [] if step is None else [step]
    if not steps:
        return None
    return TimelineSection(
        title="A step, moment by moment",
        steps=steps,
        caption="One steady-state step of each method.",
    )


def _files(shown: _Comparison) -> list[Section]:
    return [
        Links(
            title="Traces",
            files=[
                (name, f"{run.variant.file_name}.trace.json")
                for _, name, run, _ in shown.ran
            ],
            caption="What each worker did, moment by moment: open ui.perfetto.dev in a browser and "
            "load the file.",
        ),
        Links(
            title="Records",
            files=[("records.jsonl", "records.jsonl")],
            caption="One line of JSON per method, worker and step.",
        ),
    ]


def _metric_cells(run: VariantRun, metrics: Sequence[str]) -> list[Cell]:
    """Return a run's last values; a metric may have the same name as another column."""
    found = {} if run.result is None else run.result.metrics
    values = [found.get(metric) for metric in metrics]
    return [None if one is None else Number(one, f"{one:.4g}") for one in values]


def _step(run: VariantRun) -> float | None:
    """Return the seconds of a run's step, if it has steps."""
    return run.result.step_seconds or None if run.result is not None else None


def _colour(run: VariantRun) -> int:
    known: Sequence[str] = CONSISTENCIES
    consistency = run.variant.consistency
    return known.index(consistency) if consistency in known else GREY


def _short(name: str) -> str:
    return "DDP" if name == DDP else name


def _seconds(value: float | None) -> Number | None:
    return None if value is None else Number(value, show_seconds(value))


def _ratio(base: float | None, seconds: float | None) -> Number | None:
    if not base or not seconds:
        return None
    return Number(base / seconds, f"{base / seconds:.2f}x")


# ---- metrics against time ----


@dataclass
class Curve:
    """One method's values of one metric, as means over its workers.

    They are over *seconds* since training began. NaN marks a logged value that is not finite.
    """

    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def metric_curves(runs: Sequence[VariantRun]) -> dict[str, list[Curve]]:
    """Return a curve of each metric for each successful run, metrics in order of first appearance."""
    metrics: dict[str, None] = {}
    for run in runs:
        metrics |= dict.fromkeys(run.result.metrics if run.result else ())
    for run in runs:
        for step in run.steps:
            metrics |= dict.fromkeys(step.metrics)
    return {metric: [_curve(metric, run) for run in runs] for metric in metrics}


def _curve(metric: str, run: VariantRun) -> Curve:
    """Return the curve of *metric*: each point is the mean over the workers that logged it in a step.

    Its time is the mean of the ends of these workers' steps. Values that are logged after the last step are
    in no record. If a metric is logged only now and then (an accuracy, once an epoch), the last value of
    rank 0 adds one more point, at the end.
    """
    points: dict[int, list[StepRecord]] = {}
    last_of_rank_0: float | None = math.nan
    for step in run.steps:
        if metric in step.metrics:
            points.setdefault(step.step, []).append(step)
            if step.worker == 0:
                last_of_rank_0 = step.metrics[metric]
    curve = Curve()
    for _, steps in sorted(points.items()):
        curve.seconds.append(fmean(step.end_seconds for step in steps))
        curve.values.append(fmean(_finite(step.metrics[metric]) for step in steps))
    result = run.result
    if (
        result is not None
        and metric in result.metrics
        and 2 * len(curve.values) <= result.steps
        and last_of_rank_0 != result.metrics[metric]
    ):
        ends = [step.end_seconds for step in run.steps]
        curve.seconds.append(max(ends, default=0.0))
        curve.values.append(_finite(result.metrics[metric]))
    return curve


def has_values(curve: Curve) -> bool:
    """Return whether there is anything to draw."""
    return any(math.isfinite(value) for value in curve.values)


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return the curve, or means of neighbouring points if it has more than *most*.

    Only finite values count, since one NaN would hide all others. A mean without finite values is NaN.
    """
    width = -(-len(curve.values) // most)
    if width <= 1:
        return curve
    parts = [slice(i, i + width) for i in range(0, len(curve.values), width)]
    return Curve(
        [fmean(curve.seconds[part]) for part in parts],
        [_mean_of_finite(curve.values[part]) for part in parts],
    )


def _mean_of_finite(values: Sequence[float]) -> float:
    numbers = [value for value in values if math.isfinite(value)]
    return fmean(numbers) if numbers else math.nan


def _finite(value: float | None) -> float:
    """*value*, or NaN if it is None: JSON has null for values that are not finite, and axes cannot show them."""
    return math.nan if value is None or not abs(value) < MOST else value
