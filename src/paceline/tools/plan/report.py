"""A plan as a report: the answer, the best method of each consistency level, why, and what to run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from paceline.cluster import Cluster, Workload
from paceline.interfaces import CONSISTENCIES, Consistency
from paceline.spec import parse
from paceline.tools.plan.candidates import summary_line
from paceline.tools.plan.estimates import DDP, Estimate, Plan
from paceline.tools.plan.recommendation import (
    class_name,
    faster_but_not_recommended,
    headline,
    one_worker_a_host,
    over_ddp,
    slowest_link,
    smallest_of_each_kind,
    strongest,
    times,
    two_digits,
)
from paceline.tools.plan.what_if import ScalingPoint, Suggestions
from paceline.tools.report.model import (
    GREY,
    Bar,
    BarChart,
    Cell,
    LineChart,
    Number,
    Panel,
    Report,
    Section,
    Series,
    Table,
    Text,
    TimelineSection,
)
from paceline.tools.report.timeline import Step
from paceline.units import show_bytes, show_count, show_rate, show_seconds

MANY_STEPS = 50
"""A method that needs more steps to become as fast as predicted has a note."""
VISIBLE = 0.01
"""Share of a step: less communication is not mentioned."""
STAND_IN = "examples/workload.py"
"""A script that trains a workload's tensors, and sleeps instead of computing."""
EXAMPLE_GOAL = "accuracy=0.95"

CONSISTENCY_MEANS: dict[Consistency, str] = {
    "exact": "DDP's result up to rounding",
    "delayed": "every gradient is applied once, at most one step late",
    "lossy": "compressed gradients, the error is fed back or small",
    "local": "parameters are averaged every few steps",
    "asynchronous": "workers do not wait for all others",
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """The job that was planned, and the command that planned it.

    Attributes:
        cluster: The network.
        workload: The compute times.
        script: The training script, with its `arguments`.
        command: The command line of the plan.
        network: Options that describe the network (None: it was probed).
        compute: Options that give compute times.
        stand_in: A workload to emulate in place of the script, if this machine has fewer cores than
            workers.
    """

    cluster: Cluster
    workload: Workload
    script: str = "SCRIPT"
    arguments: Sequence[str] = ()
    command: str = ""
    network: Sequence[str] | None = None
    compute: Sequence[str] = ()
    stand_in: str | None = None

    def __str__(self) -> str:
        """Return the network and a worker's computation, in one line."""
        work = self.workload
        text = (
            f"{self.cluster.describe()}; {show_seconds(work.forward_seconds)} forward + "
            f"{show_seconds(work.backward_seconds)} backward per worker"
        )
        if work.passes is not None and work.passes > 1:
            text += f", {work.passes} passes per update"
        if "FLOPs counted" in work.source:
            text += " (FLOP count, not measured)"
        return text


def plan_report(
    plan: Plan,
    suggestions: Suggestions,
    question: Question,
    *,
    points: Sequence[ScalingPoint] = (),
    steps: Sequence[Step] = (),
) -> Report:
    """Report a plan.

    Args:
        plan: Predictions of all candidates.
        suggestions: Break-even links and other ways to gain.
        question: What was planned.
        points: Predictions for more workers and faster links.
        steps: A traced step of some candidates.
    """
    answer, *more = headline(plan, suggestions, question.cluster)
    sections: list[Section | None] = []
    if plan.estimates:
        sections = [
            _best(plan, question),
            summary_lines([one.spec for *_, one in best_of_each_class(plan)[1:]]),
            bar_chart(plan),
            _why(plan, question.cluster),
            _break_even(suggestions),
            _also(suggestions),
            _train_to_compare(plan, question),
            _commands(plan, question),
            _trial(plan, question),
            *_scaling(points),
            _timeline(steps),
            _suggestions(suggestions),
            _faster_but_not_recommended(plan),
            _candidates(plan),
            _infeasible(plan),
        ]
    return Report(
        title=f"{question.script}: {question}",
        answer=answer,
        details=more,
        command=question.command,
        notes=[
            ("network", plan.cluster),
            ("compute", plan.workload),
            ("candidates", counts(plan)),
        ],
        sections=[section for section in sections if section is not None],
    )


# ---- tables of estimates ----


@dataclass(frozen=True)
class _Column:
    """One column of all tables of estimates; *cell* makes it from a plan's estimate, JSON names it *key*."""

    heading: str
    key: str
    cell: Callable[[Plan, Estimate], Cell]
    brief: bool = False


def _seconds(value: float) -> Number:
    return Number(value, show_seconds(value))


def _ratio(value: float) -> Number:
    return Number(value, times(value))


def _step(plan: Plan, one: Estimate) -> Number:
    short = "~ " if one.fidelity == "short" and one is not plan.baseline.single else ""
    text = short + show_seconds(one.step_seconds)
    return Number(one.step_seconds, text, title="; ".join(one.notes))


def _exposed(plan: Plan, one: Estimate) -> Number | None:
    return None if one is plan.baseline.single else _seconds(one.exposed_seconds)


def _sent(plan: Plan, one: Estimate) -> Number | None:
    if one is plan.baseline.single:
        return None
    return Number(one.bytes_sent, show_bytes(one.bytes_sent))


def _vs_bound(plan: Plan, one: Estimate) -> Number | None:
    if one is plan.baseline.single:
        return None
    return _ratio(plan.baseline.bound_ratio(one))


def _samples(plan: Plan, one: Estimate) -> Number | None:
    rate = plan.baseline.samples_per_second(one)
    return None if rate is None else Number(rate, f"{float(f'{rate:.3g}'):,g}")


_COLUMNS = (
    _Column("step", "step_seconds", _step, True),
    _Column("compute", "compute_seconds", lambda _, one: _seconds(one.compute_seconds)),
    _Column("exposed", "exposed_seconds", _exposed, True),
    _Column("sent", "bytes_sent", _sent),
    _Column("vs. bound", "bound_ratio", _vs_bound),
    _Column(
        "vs. DDP", "ddp_speedup", lambda plan, one: _ratio(over_ddp(plan, one)), True
    ),
    _Column(
        "vs. 1 machine",
        "speedup",
        lambda plan, one: _ratio(plan.baseline.speedup(one)),
        True,
    ),
    _Column("samples/s", "samples_per_second", _samples),
)
LEGEND = (
    "step: time for one global batch in steady state, compute + exposed communication. "
    "vs. bound: over the shortest step of any exact averaging. "
    "~: from a short run only."
)


def _columns(plan: Plan, *, brief: bool) -> list[_Column]:
    """Return the columns that have values in this plan."""
    empty = set()
    if plan.estimate(DDP) is None:
        empty.add("vs. DDP")
    if plan.baseline.batch is None:
        empty.add("samples/s")
    return [
        one for one in _COLUMNS if one.heading not in empty and (one.brief or not brief)
    ]


@dataclass
class _Footnotes:
    """Numbered notes below a table, each once."""

    texts: list[str] = field(default_factory=list)

    def mark(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f" [{self.texts.index(text) + 1}]"


def _best(plan: Plan, question: Question) -> Table:
    """Return one machine, DDP, and the best method of each consistency."""
    columns = _columns(plan, brief=True)
    notes = _Footnotes()
    shown = best_of_each_class(plan)
    estimated = _estimated_compression([one for _, _, one in shown], question.script)
    rows: list[list[Cell]] = []
    for consistency, name, one in shown:
        marks = ""
        if one.steady_after >= MANY_STEPS:
            marks += notes.mark(
                f"reached after about {one.steady_after + 1} steps; earlier ones are slower"
            )
        if one.estimated_compression:
            marks += notes.mark(estimated)
        cells = [column.cell(plan, one) for column in columns]
        rows.append([consistency, name + marks, *cells])
    return Table(
        title="Best of each consistency level",
        headings=("consistency", "method", *(one.heading for one in columns)),
        rows=rows,
        notes=notes.texts,
        caption=" ".join(
            f"{class_name(one).capitalize()}: {CONSISTENCY_MEANS[one]}."
            for one in plan.fastest
        ),
        level="summary",
    )


def summary_lines(specs: Sequence[str]) -> Text | None:
    """Return how each method differs from DDP, for tables that show it."""
    lines = [f"{spec}: {line}." for spec in specs if (line := summary_line(spec))]
    return Text(title="Methods", lines=lines, level="summary") if lines else None


def best_of_each_class(plan: Plan) -> list[tuple[str, str, Estimate]]:
    """Return one machine, then DDP, then the recommended method of each consistency.

    If a consistency has no recommended method, its fastest method is shown.

    Returns:
        Consistency, name and estimate of each.
    """
    found = [("-", "one machine, same global batch", plan.baseline.single)]
    ddp, recommended = plan.estimate(DDP), plan.recommended
    if ddp is not None:
        found.append((ddp.consistency, f"DDP ({DDP})", ddp))
    for consistency, fastest in plan.fastest.items():
        one = recommended.get(consistency, fastest)
        if one is ddp:
            one = fastest
        if one is not ddp:
            found.append((class_name(consistency), one.spec, one))
    return found


def _estimated_compression(estimates: Sequence[Estimate], script: str) -> str:
    codes = (
        str(parse(one.spec).values.get("compression", "NAME"))
        for one in estimates
        if one.estimated_compression
    )
    options = [
        word for code in dict.fromkeys(codes) for word in ("--compression", code)
    ]
    measure = shlex.join(["paceline", "profile", script, *options])
    return f"compression time estimated; to measure it: {measure}"


def _candidates(plan: Plan) -> Table:
    """Return all estimates; those with equal figures share a row."""
    columns = _columns(plan, brief=False)
    groups: dict[tuple[object, ...], list[Estimate]] = {}
    for one in plan.estimates:
        cells = [column.cell(plan, one) for column in columns]
        texts = [cell.text if isinstance(cell, Number) else cell for cell in cells]
        groups.setdefault((one.consistency, *texts), []).append(one)
    notes = _Footnotes()
    rows: list[list[Cell]] = []
    for first, *equal in groups.values():
        name = first.spec
        if equal:
            specs = ", ".join(one.spec for one in equal)
            name += f" and {show_count(len(equal), 'equal variant')}"
            name += notes.mark(f"equal to {first.spec}: {specs}")
        cells = [column.cell(plan, first) for column in columns]
        rows.append([name, first.consistency, *cells])
    place = {consistency: number for number, consistency in enumerate(CONSISTENCIES)}
    return Table(
        title=f"All {len(plan.estimates)} candidates",
        headings=("method", "consistency", *(one.heading for one in columns)),
        rows=rows,
        sort=2,
        caption=LEGEND,
        colours=[place[group[0].consistency] for group in groups.values()],
        notes=notes.texts,
    )


def counts(plan: Plan) -> str:
    """Numbers of candidates that were predicted, by quality, and that were not."""
    text = show_count(len(plan.estimates), "candidate") + " predicted"
    if plan.infeasible:
        text += f", {len(plan.infeasible)} infeasible"
    text += " (--all)."
    rejected = sum(one.rejected for one in plan.estimates)
    short = sum(one.fidelity == "short" for one in plan.estimates) - rejected
    if rejected:
        text += f" {rejected} predicted roughly (~), as too slow in their class."
    cut = [f"{plan.skipped} not predicted"] if plan.skipped else []
    cut += [f"{short} predicted roughly (~)"] if short else []
    if cut:
        text += (
            f" {' and '.join(cut)}, as the search reached its limit: a larger --max-work "
            "looks at them."
        )
    return text


def show_events(events: float) -> str:
    """Format a number of simulated events: ``"1.2 million simulated events"``."""
    if events < 1e6:
        return f"{events:,.0f} simulated events"
    return f"{events / 1e6:.2g} million simulated events"


def _infeasible(plan: Plan) -> Table | None:
    if not plan.infeasible:
        return None
    reasons: dict[str, list[str]] = {}
    for one in plan.infeasible:
        reasons.setdefault(one.reason, []).append(one.spec)
    return Table(
        title=f"{len(plan.infeasible)} infeasible candidates",
        headings=("reason", "methods"),
        rows=[
            (reason, ", ".join(specs))
            for reason, specs in sorted(reasons.items(), key=lambda item: -len(item[1]))
        ],
        folded=True,
    )


def bar_chart(plan: Plan) -> BarChart:
    """Compute and exposed communication of one machine, DDP and the best method of each consistency."""
    baseline = plan.baseline
    bars = []
    for consistency, name, one in best_of_each_class(plan):
        alone = one is baseline.single
        gain = "" if alone else f", {times(baseline.speedup(one))} one machine"
        bars.append(
            Bar(
                name=name if alone else f"{consistency}: {name}",
                values=(one.compute_seconds, one.exposed_seconds),
                text=show_seconds(one.step_seconds) + gain,
                colour=GREY if alone else CONSISTENCIES.index(one.consistency),
            )
        )
    return BarChart(
        title="Where a step's time goes",
        parts=("compute", "exposed"),
        rows=bars,
        limit=baseline.lower_bound_seconds,
        limit_name="lower bound for exact averaging",
        caption="Colour: consistency.",
    )


# ---- reasons and alternatives ----


def _why(plan: Plan, cluster: Cluster) -> Text:
    _, best = strongest(plan)
    text = f"Each worker sends {show_bytes(best.bytes_sent)} per step"
    if one_worker_a_host(cluster):
        rate = slowest_link(cluster)
        seconds = best.bytes_sent / rate
        text += f": {show_seconds(seconds)} at {show_rate(rate)}"
        hidden = seconds - best.exposed_seconds
        if hidden > VISIBLE * best.step_seconds:
            text += f", {show_seconds(hidden)} of it hidden behind computing"
    bound = show_seconds(plan.baseline.lower_bound_seconds)
    return Text(
        title="Why",
        lines=[f"{text}.", f"No exact step can be shorter than {bound}."],
        level="summary",
    )


def _break_even(suggestions: Suggestions) -> Text | None:
    if not suggestions.break_even:
        return None
    named = {one.spec: one for one in suggestions.break_even}
    ddp = named.get(DDP)
    *_, best = suggestions.break_even
    lines = []
    if best.rate is None:
        lines.append(f"{best.spec}: {best.words}.")
    else:
        name = "DDP" if best is ddp else best.spec
        text = f"Below {two_digits(best.rate)} one machine is faster than {name}"
        if ddp is not None and ddp is not best and ddp.rate is not None:
            text += f", below {two_digits(ddp.rate)} faster than DDP"
        lines.append(f"{text}.")
    if ddp is not None and ddp is not best and (ddp.rate is None or best.rate is None):
        words = ddp.words if ddp.rate is None else f"{two_digits(ddp.rate)}"
        lines.append(f"DDP: {words}.")
    return Text(title="Break-even", lines=lines, level="summary")


def _also(suggestions: Suggestions) -> Text | None:
    """Other ways to gain, one of each kind."""
    found = smallest_of_each_kind(suggestions)
    if found:
        each = ", ".join(f"with {one.what} {times(one.speedup)}" for one in found)
        verb = {1: "This changes", 2: "Both change"}.get(len(found), "All change")
        line = f"{each} as fast as one machine. {verb} the global batch."
    elif suggestions.tried:
        line = f"{show_count(suggestions.tried, 'other change')} predicted: no gain."
    else:
        return None
    lines = [line[0].upper() + line[1:]]
    if suggestions.untried:
        lines.append(
            f"{show_count(suggestions.untried, 'other change')} not predicted: --max-work ended "
            "the search."
        )
    return Text(title="Also", lines=lines, level="summary")


def _suggestions(suggestions: Suggestions) -> Table | None:
    if not suggestions.helps:
        return None
    return Table(
        title="Other ways to gain",
        headings=("change", "step", "vs. 1 machine"),
        rows=[
            (one.what, _seconds(one.step_seconds), _ratio(one.speedup))
            for one in suggestions.helps
        ],
        caption=f"Each predicted with {suggestions.helps[0].spec}. Larger batches may need another "
        "learning rate; accuracy was not tested.",
    )


def _faster_but_not_recommended(plan: Plan) -> Text | None:
    text = faster_but_not_recommended(plan)
    if not text:
        return None
    return Text(title="Faster, but not recommended", lines=[text])


def _timeline(steps: Sequence[Step]) -> TimelineSection | None:
    if not steps:
        return None
    return TimelineSection(
        title="Timeline of a step",
        steps=steps,
        caption="One steady-state step of each method, in virtual time.",
    )


# ---- commands ----


def commands(
    plan: Plan, script: str, arguments: Sequence[str] = ()
) -> dict[Consistency, str]:
    """Return the command that trains with the recommended method, by consistency."""
    return {
        consistency: command(one.spec, script, arguments)
        for consistency, one in plan.recommended.items()
    }


def command(
    spec: str,
    script: str,
    arguments: Sequence[str] = (),
    *,
    verb: str = "run",
    options: Sequence[str] = (),
) -> str:
    """Return a command that runs a script with a method."""
    words = ["paceline", verb, script, *options, "--method", spec]
    return shlex.join([*words, *(["--", *arguments] if arguments else [])])


def _commands(plan: Plan, question: Question) -> Text:
    lines = commands(plan, question.script, question.arguments)
    return Text(
        title=f"Run ({', '.join(lines)})",
        lines=list(lines.values()),
        kind="code",
        caption="On several machines, run the command on each with torchrun's options, such as "
        "--nnodes=2 --node-rank=0 --master-addr=HOST.",
        level="summary",
    )


def _train_to_compare(plan: Plan, question: Question) -> Text | None:
    weak = [c for c in plan.recommended if c in ("lossy", "local", "asynchronous")]
    if not weak or question.network is None:
        return None
    options = [*question.network, *question.compute, "--until", EXAMPLE_GOAL]
    words = ["paceline", "compare", question.script, *options]
    rest = ["--", *question.arguments] if question.arguments else []
    return Text(
        title="Step time is not training time: lossy, local and asynchronous methods may need "
        "more steps. Train to compare",
        lines=[shlex.join([*words, *rest])],
        kind="code",
        level="summary",
    )


def _trial(plan: Plan, question: Question) -> Text | None:
    """Return a command that tries the recommended method in real processes on this machine."""
    if question.network is None:
        return None
    script, arguments, caption = question.script, question.arguments, ""
    if question.stand_in is not None:
        script, arguments = STAND_IN, [question.stand_in, "--steps", "100"]
        caption = "This machine has fewer cores than workers: the stand-in sleeps for the compute times."
    _, best = strongest(plan)
    line = command(
        best.spec, script, arguments, verb="emulate", options=question.network
    )
    return Text(
        title="Try one first on this machine",
        lines=[line],
        kind="code",
        caption=caption,
        level="summary",
    )


# ---- more workers, faster links ----


def _scaling(points: Sequence[ScalingPoint]) -> list[Section]:
    if not points:
        return []
    workers = sorted({float(point.workers) for point in points})
    return [
        LineChart(
            title="Speedup with more workers and faster links",
            panels=_panels(points, "speedup", 1.0, dotted=(workers, workers)),
            x="workers",
            y="vs. 1 machine",
            log="xy",
            caption="The best method of each consistency level, with the same batch per worker, on one switch. "
            "From short runs. Dotted: linear speedup.",
            table=_points(points),
            level="summary",
        ),
        LineChart(
            title="Efficiency",
            panels=_panels(points, "efficiency", 100.0),
            x="workers",
            y="% of linear speedup",
            log="x",
            top=100.0,
        ),
    ]


def _panels(
    points: Sequence[ScalingPoint],
    attribute: str,
    factor: float,
    dotted: tuple[Sequence[float], Sequence[float]] | None = None,
) -> list[Panel]:
    """Return a panel for each link."""
    panels = []
    for rate in sorted({point.rate for point in points}):
        series = []
        for number, consistency in enumerate(CONSISTENCIES):
            mine = sorted(
                (p for p in points if p.consistency == consistency and p.rate == rate),
                key=lambda point: point.workers,
            )
            if mine:
                xs = [float(point.workers) for point in mine]
                ys = [factor * getattr(point, attribute) for point in mine]
                series.append(Series(consistency, xs, ys, number))
        panels.append(Panel(show_rate(rate), series, dotted))
    return panels


def _points(points: Sequence[ScalingPoint]) -> Table:
    """Return a row for each consistency and number of workers, a column for each link."""
    rates = sorted({point.rate for point in points})
    rows: dict[tuple[str, int], dict[float, ScalingPoint]] = {}
    for point in points:
        rows.setdefault((point.consistency, point.workers), {})[point.rate] = point
    return Table(
        title="vs. 1 machine (efficiency), the best method of each consistency level",
        headings=("consistency", "workers", *map(show_rate, rates)),
        rows=[
            [
                consistency,
                Number(workers, str(workers)),
                *(_point(by_rate.get(rate)) for rate in rates),
            ]
            for (consistency, workers), by_rate in rows.items()
        ],
    )


def _point(point: ScalingPoint | None) -> Number | None:
    if point is None:
        return None
    text = f"{times(point.speedup)} ({point.efficiency:.0%})"
    return Number(point.speedup, text, title=point.spec)


# ---- JSON ----


def to_json(
    plan: Plan,
    suggestions: Suggestions,
    question: Question,
    points: Sequence[ScalingPoint] = (),
) -> str:
    """Return the plan as a JSON object.

    It has the keys of *plan* and *suggestions*, and these:

    - ``headline``, ``scaling``.
    - ``fastest``, ``recommended``, ``commands``: by consistency.

    Estimates also have the columns that compare them with others.
    """
    content = msgspec.to_builtins(plan) | msgspec.to_builtins(suggestions)
    content["estimates"] = [_with_columns(plan, one) for one in plan.estimates]
    content["headline"] = headline(plan, suggestions, question.cluster)
    content["fastest"] = {c: one.spec for c, one in plan.fastest.items()}
    content["recommended"] = {c: one.spec for c, one in plan.recommended.items()}
    content["commands"] = commands(plan, question.script, question.arguments)
    content["scaling"] = msgspec.to_builtins(points)
    return msgspec.json.encode(content).decode()


def _with_columns(plan: Plan, one: Estimate) -> dict[str, object]:
    cells = {column.key: column.cell(plan, one) for column in _COLUMNS}
    figures = {
        key: cell.value if isinstance(cell, Number) else None
        for key, cell in cells.items()
    }
    fields: dict[str, object] = msgspec.to_builtins(one)
    return figures | fields
