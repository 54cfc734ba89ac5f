"""A diagnosis as a `Report`: the terminal and the page show the same."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median

import msgspec

from paceline.cluster.profiling.step_phases import StepPhases
from paceline.tools.doctor.diagnosis import UNLIKE, Diagnosis, Fault
from paceline.tools.doctor.evidence import Evidence, PathEvidence, WorkerEvidence
from paceline.tools.doctor.faults import GAIN
from paceline.tools.doctor.network_model import LOST, SLOW_LINK
from paceline.tools.report.model import (
    Bar,
    BarChart,
    Matrix,
    Number,
    Report,
    Section,
    Table,
    Text,
)
from paceline.units import show_bytes, show_count, show_rate, show_seconds

MOST_BARS = 32
"""Workers whose steps are drawn."""
MOST_ROWS = 8
"""Workers whose steps the summary shows; a table in the details has all."""
EQUAL = 0.005
"""Share of a step by which a prediction may differ from it and be called equal."""
PHASES = ("input", "forward", "backward", "exposed", "update")


def doctor_report(
    found: Diagnosis, evidence: Evidence, command: str, next_command: str = ""
) -> Report:
    """Report a diagnosis and its measurements.

    Args:
        found: The diagnosis.
        evidence: Its measurements.
        command: The command that ran.
        next_command: The command to run next; none by default.
    """
    what = evidence.script or "network and hosts"
    phases = _phase_table(found, evidence)
    faults = _faults(found, evidence, next_command)
    sections: list[Section | None] = [
        *((phases, faults) if found.healthy else (faults, phases)),
        _commands(found.faults),
        _costs(found),
        _steps(evidence.workers),
        *_links(evidence, found),
        _concurrent(evidence),
        _step_table(evidence.workers),
        _hosts(evidence.workers),
        *_all_faults(found),
    ]
    return Report(
        title=f"{what}: {show_count(found.workers, 'worker')}, {found.runtime} runtime",
        answer=_headline(found, evidence),
        details=found.notes,
        command=command,
        notes=(("method", found.spec),) if found.trained else (),
        sections=[section for section in sections if section is not None],
    )


def plan_command(
    evidence: Evidence, torchrun: Sequence[str], options: Mapping[str, object]
) -> str:
    """Return the command to run if there is no fault: the plan of the same job, with its *options*."""
    if not evidence.script:
        return "paceline doctor SCRIPT (it also measures where each step goes)"
    words = ["paceline", "plan", evidence.script]
    if evidence.runtime == "real":
        words += ["--probe", *torchrun]
    for name, value in options.items():
        words += [] if value is None else [name, str(value)]
    return shlex.join(
        [*words, *(["--", *evidence.arguments] if evidence.arguments else [])]
    )


def to_json(found: Diagnosis, evidence: Evidence) -> str:
    """Return the diagnosis as a JSON object, with the report's derived figures and the ``evidence``."""
    content = msgspec.to_builtins(found) | {
        "headline": _headline(found, evidence),
        "speedup": found.speedup,
        "unexplained_seconds": found.unexplained_seconds,
        "evidence": msgspec.to_builtins(evidence),
    }
    return msgspec.json.encode(content).decode()


# ---- the answer ----


def _headline(found: Diagnosis, evidence: Evidence) -> str:
    """Step time as measured, and without the faults."""
    where = f"{show_count(found.workers, 'worker')}, {found.runtime}{' runtime' * found.healthy}"
    text = f"{where}: averaging 64 MiB takes {_seconds(found.predicted_seconds)} (predicted)"
    if found.step_seconds is not None:
        text = f"{where}, {found.spec}: {_seconds(found.step_seconds)} per step"
        if found.speedup is not None:
            text += f", {found.speedup:.2f}x as fast as one machine"
    if not found.healthy and found.fixed_seconds is not None:
        count = len(found.faults)
        these = "this fault" if count == 1 else f"these {count} faults"
        return f"{text}. Without {these}: {_seconds(found.fixed_seconds)} (predicted)"
    steps = [one.step for one in evidence.workers if one.step is not None]
    if not steps:
        return text
    kind = "steady-state" if steps[0].steady else "warm-up"
    return f"{text} ({show_count(steps[0].steps, f'{kind} step')})"


def _faults(found: Diagnosis, evidence: Evidence, next_command: str) -> Text:
    """Faults with their advice; without faults, the checks."""
    steady = all(one.step.steady for one in evidence.workers if one.step is not None)
    if not found.healthy:
        return Text(
            title="Faults",
            lines=[_fault(found, number) for number in range(len(found.faults))],
            kind="numbered",
            level="summary",
        )
    lines = [f"Checked: {', '.join(found.checked)}."]
    if found.step_seconds is not None and not steady:
        lines.append(
            "Measure steps of the steady state, too: give more of them (--steps)."
        )
    if found.harmless:
        causes = "; ".join(
            f"{one.title.lower()}, {one.cause}" for one in found.harmless
        )
        lines.append(
            f"Not a bottleneck: {causes} (fixing it saves less than {100 * GAIN:.0f} % "
            "of a step)."
        )
    if next_command:
        lines.append(f"Next: {next_command}")
    return Text(title="No fault found", lines=lines, kind="paragraphs", level="summary")


def _fault(found: Diagnosis, number: int) -> str:
    """Return one fault: its title and gain, then its advice."""
    fault = found.faults[number]
    gain = "What fixing it saves cannot be predicted."
    if fault.gain_seconds is not None:
        known = any(one.gain_seconds is not None for one in found.faults[:number])
        each, unit = ("another ", "") if known else ("", " per step")
        part = _part(fault.gain_seconds, found)
        gain = f"Fixing it saves {each}{_seconds(fault.gain_seconds)}{unit}{part}."
    return f"{fault.title}: {fault.cause}. {gain}\n{fault.advice}"


def _part(gain: float, found: Diagnosis) -> str:
    whole = found.step_seconds or found.predicted_seconds
    return f" ({100 * min(1.0, gain / whole):.0f} %)" if whole else ""


def _explained(found: Diagnosis, evidence: Evidence) -> str:
    """Return how much of the measured step the prediction explains."""
    step, predicted = found.step_seconds, found.predicted_seconds
    beyond = found.unexplained_seconds
    if step is None or predicted is None or beyond is None:
        return ""
    part = f"{100 * abs(beyond) / step:.0f} %"
    if abs(beyond) < EQUAL * step:
        return "The step predicted from these parts equals the measured one."
    if beyond < 0:
        return (
            f"The model predicts {_seconds(predicted)} per step; "
            f"{_seconds(step)} were measured ({part} less)."
        )
    text = (
        f"The model explains {_seconds(predicted)} of {_seconds(step)} per step; "
        f"{_seconds(beyond)} ({part}) are unexplained"
    )
    if beyond > UNLIKE * step and evidence.shared_cores is not None:
        text += " (short steps on shared cores vary by this much)"
    return f"{text}."


def _commands(faults: Sequence[Fault]) -> Text | None:
    lines = [fault.command for fault in faults if fault.command]
    if not lines:
        return None
    return Text(title="Run", lines=lines, kind="code", level="summary")


def _all_faults(found: Diagnosis) -> list[Section]:
    if not found.faults:
        return []
    return [
        Table(
            title="All faults",
            headings=("fault", "location", "cause", "advice", "gain"),
            rows=[
                (
                    fault.title,
                    fault.location,
                    fault.cause,
                    fault.advice,
                    _cell(fault.gain_seconds),
                )
                for fault in found.faults
            ],
            caption="Each gain is predicted, and is what fixing the fault saves once the "
            "faults above it are fixed.",
            folded=True,
        )
    ]


def _costs(found: Diagnosis) -> BarChart:
    """Return a step as measured, as predicted, without the faults, and its lower bound."""
    bound = "lower bound for exact averaging"
    rows = [
        ("measured", found.step_seconds),
        ("predicted", found.predicted_seconds),
        ("predicted without faults", None if found.healthy else found.fixed_seconds),
        ("one machine, same global batch", found.single_seconds),
        (
            bound if found.healthy else f"{bound}, with these faults",
            found.lower_bound_seconds,
        ),
    ]
    return BarChart(
        title="Step time" if found.trained else "Time to average 64 MiB",
        parts=("seconds",),
        rows=[
            Bar(name=name, values=(value,), text=_seconds(value))
            for name, value in rows
            if value is not None and math.isfinite(value)
        ],
    )


# ---- steps ----


def _phases(step: StepPhases) -> tuple[float, ...]:
    return tuple(
        one.median
        for one in (step.input, step.forward, step.backward, step.exposed, step.update)
    )


def _with_steps(
    workers: Sequence[WorkerEvidence], most: int | None = None
) -> list[tuple[WorkerEvidence, StepPhases]]:
    """Workers with their steps; of more than *most*, those with the longest compute time."""
    have = [(worker, worker.step) for worker in workers if worker.step is not None]
    if most is not None and len(have) > most:
        have.sort(key=lambda pair: pair[1].exposed.median - pair[1].step.median)
        have = sorted(have[:most], key=lambda pair: pair[0].rank)
    return have


def _name(worker: WorkerEvidence) -> str:
    return f"worker {worker.rank}, {_host(worker.host, worker.name)}"


def _host(number: int, name: str) -> str:
    return f"host {number}" + (f" ({name})" if name else "")


def _phase_table(found: Diagnosis, evidence: Evidence) -> Table | None:
    """Return the parts of each worker's step; also shown on the terminal."""
    have = _with_steps(evidence.workers, MOST_ROWS)
    if not have:
        return None
    caption = _explained(found, evidence)
    if len(have) < len(evidence.workers):
        caption += (
            f" These {len(have)} of {len(evidence.workers)} workers compute longest."
        )
    return Table(
        title="Step time by worker",
        headings=("worker", *PHASES, "step"),
        rows=[
            (
                f"worker {worker.rank}",
                *(_cell(part) for part in _phases(step)),
                _cell(step.step.median),
            )
            for worker, step in have
        ],
        caption=caption.strip(),
        level="summary",
    )


def _steps(workers: Sequence[WorkerEvidence]) -> BarChart | None:
    have = _with_steps(workers, MOST_BARS)
    if not have:
        return None
    caption = "Medians over a worker's steady-state steps."
    if not all(step.steady for _, step in have):
        caption = "Medians over warm-up steps: no step was in steady state."
    if len(have) < len(workers):
        caption += f" The {MOST_BARS} of {len(workers)} workers that compute longest."
    return BarChart(
        title="Where a step goes",
        parts=PHASES,
        rows=[
            Bar(
                name=_name(worker),
                values=_phases(step),
                text=f"{_seconds(step.step.median)}, first wait after "
                f"{_seconds(step.first_wait.median)}",
            )
            for worker, step in have
        ],
        caption=caption,
    )


def _step_table(workers: Sequence[WorkerEvidence]) -> Table | None:
    have = _with_steps(workers)
    if not have:
        return None
    return Table(
        title="Steps of each worker",
        headings=(
            *("worker", "step", "spread", *PHASES, "first wait"),
            *("messages", "sent", "at the end"),
        ),
        rows=[
            (
                _name(worker),
                _cell(step.step.median),
                _cell(step.step.spread),
                *(_cell(part) for part in _phases(step)),
                _cell(step.first_wait.median),
                Number(step.messages, f"{step.messages:.3g}"),
                Number(step.bytes_sent, show_bytes(step.bytes_sent)),
                Number(step.at_end, f"{100 * step.at_end:.0f} %"),
            )
            for worker, step in have
        ],
        caption="first wait: time from a step's end to the first wait for the network; it is "
        "long where a worker is slow. at the end: part of the gradients' bytes that becomes "
        "ready in the last tenth of backward.",
        folded=len(have) > 8,
    )


# ---- links ----


def _links(evidence: Evidence, found: Diagnosis) -> list[Section]:
    """Goodput, latency and losses between hosts; only hosts with a fault are marked."""
    if not evidence.paths:
        return []
    usual = median(median(path.rates) for path in evidence.paths)
    hosts = {host for fault in found.faults for host in fault.hosts}
    sections: list[Section] = [
        _matrix(
            evidence,
            "Links",
            lambda path: _rate(path, usual, hosts),
            caption="Goodput from each host to each other host while nothing else is sent: the "
            f"median of its measurements. Marked: below {100 * SLOW_LINK:.0f} % of the median "
            "path, at a host with a fault.",
        ),
        _matrix(
            evidence,
            "Latency",
            lambda path: _cell(path.latency),
            low_is_bad=False,
            caption="One-way time of a message without content.",
        ),
    ]
    if any(path.retransmitted for path in evidence.paths):
        sections.append(
            _matrix(
                evidence,
                "Retransmitted segments",
                lambda path: _lost(path, hosts),
                low_is_bad=False,
                caption="Part of the segments, while little is sent. Marked: above "
                f"{100 * LOST:.1f} %, at a host with a fault.",
                least=2 * LOST,
            )
        )
    return sections


def _rate(path: PathEvidence, usual: float, hosts: Collection[int]) -> Number:
    rate = median(path.rates)
    return Number(
        rate,
        _short_rate(rate),
        title=f"{_short_rate(min(path.rates))} to "
        f"{_short_rate(max(path.rates))} in {len(path.rates)} measurements",
        bad=rate < SLOW_LINK * usual and _is_at(path, hosts),
    )


def _short_rate(rate: float) -> str:
    return show_rate(float(f"{rate * 8:.3g}") / 8)


def _is_at(path: PathEvidence, hosts: Collection[int]) -> bool:
    return path.source in hosts or path.target in hosts


def _lost(path: PathEvidence, hosts: Collection[int]) -> Number | None:
    if path.retransmitted is None:
        return None
    part = path.retransmitted
    return Number(part, f"{100 * part:.2f} %", bad=part > LOST and _is_at(path, hosts))


def _matrix(
    evidence: Evidence,
    title: str,
    show: Callable[[PathEvidence], Number | None],
    *,
    caption: str,
    low_is_bad: bool = True,
    least: float | None = None,
) -> Matrix:
    names = {worker.host: worker.name for worker in evidence.workers}
    hosts = sorted({host for p in evidence.paths for host in (p.source, p.target)})
    by_pair = {(path.source, path.target): path for path in evidence.paths}
    return Matrix(
        title=title,
        rows=[_host(host, names.get(host, "")) for host in hosts],
        columns=[f"to {host}" for host in hosts],
        cells=[
            [
                show(by_pair[source, target]) if (source, target) in by_pair else None
                for target in hosts
            ]
            for source in hosts
        ],
        corner="from",
        caption=caption,
        low_is_bad=low_is_bad,
        least=least,
    )


def _concurrent(evidence: Evidence) -> Table | None:
    if not evidence.concurrent:
        return None
    return Table(
        title="Concurrent flows",
        headings=("flow", "hosts", "slowest", "median", "fastest"),
        rows=[
            (
                f"host {one.sources[0]} to host {one.targets[0]}, and so on",
                Number(len(one.sources), str(len(one.sources))),
                *(
                    Number(rate, _short_rate(rate))
                    for rate in (min(one.rates), median(one.rates), max(one.rates))
                ),
            )
            for one in evidence.concurrent
            if one.rates
        ],
        caption="Rates of the flows while all hosts send at the same time. They are lower than alone "
        "where an uplink is scarce.",
        folded=True,
    )


# ---- hosts ----


def _hosts(workers: Sequence[WorkerEvidence]) -> Table:
    return Table(
        title="Hosts",
        headings=(
            *("worker", "threads", "cores", "busy cores", "speed"),
            *("interface", "rate", "other interfaces"),
        ),
        rows=[
            (
                _name(worker),
                Number(worker.threads, str(worker.threads)),
                Number(worker.cores, str(worker.cores)),
                Number(worker.other_load, f"{worker.other_load:.2g}"),
                Number(worker.speed, f"{worker.speed:.2f}"),
                worker.interface.name if worker.interface else None,
                Number(worker.interface.rate, _short_rate(worker.interface.rate))
                if worker.interface and worker.interface.rate
                else None,
                ", ".join(other.name for other in worker.others) or None,
            )
            for worker in workers
        ],
        caption="busy cores: kept busy by other programs. speed: of a matrix product, relative to "
        "the fastest worker.",
        folded=len(workers) > 16,
    )


def _cell(value: float | None) -> Number | None:
    if value is None or not math.isfinite(value):
        return None
    return Number(value, _seconds(value))


def _seconds(value: float | None) -> str:
    return "?" if value is None else show_seconds(value)
