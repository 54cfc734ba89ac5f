"""What a doctor found, as a page: the answer, its faults, links both ways, where each step goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from statistics import median

from paceline.tools.doctor.diagnosis import Diagnosis, Fault, suspected
from paceline.tools.doctor.evidence import (
    Evidence,
    PathEvidence,
    StepEvidence,
    WorkerEvidence,
)
from paceline.tools.doctor.network_model import NetworkModel
from paceline.tools.doctor.text import (
    capitalised,
    limit_of,
    lines_of,
    lines_of_fault,
    what_is_left,
)
from paceline.tools.doctor.thresholds import LOST, SLOW_LINK
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
from paceline.units import show_bytes, show_rate, show_seconds

MOST_BARS = 32
"""Workers whose steps are drawn; a table has all."""
PARTS = ("input", "forward", "backward", "exposed", "update")


def doctor_page(found: Diagnosis, evidence: Evidence, command: str) -> Report:
    """The page of a diagnosis and of what was measured for it."""
    what = evidence.script or "network and machines"
    many = "worker" if found.workers == 1 else "workers"
    sections: list[Section | None] = [
        _words(found),
        _commands(found.faults),
        _costs(found),
        _steps(evidence.workers),
        *_links(evidence, found),
        _together(evidence),
        _step_table(evidence.workers),
        _machines(evidence.workers),
        *_all_faults(found),
    ]
    return Report(
        title=f"{what}: {found.workers} {many}, {found.runtime} runtime",
        answer=_answer(found),
        details=(lines_of(found)[0], *found.notes),
        command=command,
        notes=(("method", found.spec),) if found.ran else (),
        sections=[section for section in sections if section is not None],
    )


def _answer(found: Diagnosis) -> str:
    if found.healthy:
        return "No fault was found."
    first = found.faults[0]
    text = f"{capitalised(first.name)}, {first.where}: {first.because}."
    if first.gains_seconds is not None and found.predicted_seconds:
        part = first.gains_seconds / found.predicted_seconds
        if math.isfinite(part):
            text += f" Mending it makes a step {100 * min(1.0, part):.0f} % shorter, predicted."
    more = len(found.faults) - 1
    return text + (f" And {more} more fault{'s' * (more > 1)}." if more else "")


def _words(found: Diagnosis) -> Text:
    """What to do."""
    if found.healthy:
        left = capitalised(what_is_left(found))
        return Text(title="Next step", lines=[left], kind="paragraphs")
    return Text(
        title="What is wrong, and what to do",
        lines=["\n".join(lines_of_fault(fault)) for fault in found.faults],
        kind="numbered",
    )


def _commands(faults: Sequence[Fault]) -> Text | None:
    lines = [fault.command for fault in faults if fault.command]
    return Text(title="Run", lines=lines, kind="code") if lines else None


def _all_faults(found: Diagnosis) -> list[Section]:
    if not found.faults:
        return []
    return [
        Table(
            title="All faults",
            headings=("fault", "where", "because", "do", "gains"),
            rows=[
                (
                    fault.name,
                    fault.where,
                    fault.because,
                    fault.do,
                    _seconds(fault.gains_seconds),
                )
                for fault in found.faults
            ],
            caption="Each gain is predicted in virtual time, and is what mending gives once "
            "the faults that gain more are mended.",
            folded=True,
        )
    ]


def _costs(found: Diagnosis) -> BarChart:
    """A step as it is, as it would be, and what no exact mean goes below."""
    rows = [
        ("a step, measured", found.step_seconds),
        ("predicted from its parts", found.predicted_seconds),
        ("without these faults, predicted", None)
        if found.healthy
        else ("without these faults, predicted", found.mended_seconds),
        ("one machine alone, its own part", found.alone_seconds),
        (limit_of(found).rstrip(","), found.lower_bound_seconds),
    ]
    what = "a step costs" if found.ran else "the sum of 64 MiB costs"
    return BarChart(
        title=f"What {what}",
        parts=("seconds",),
        rows=[
            Bar(name=name, values=(value,), text=show_seconds(float(f"{value:.3g}")))
            for name, value in rows
            if value is not None and math.isfinite(value)
        ],
    )


# ---- steps ----


def _parts(step: StepEvidence) -> tuple[float, ...]:
    return tuple(
        one.median
        for one in (step.input, step.forward, step.backward, step.exposed, step.update)
    )


def _name(worker: WorkerEvidence) -> str:
    return f"worker {worker.rank}, {_host(worker.host, worker.name)}"


def _host(number: int, name: str) -> str:
    return f"host {number}" + (f" ({name})" if name else "")


def _steps(workers: Sequence[WorkerEvidence]) -> BarChart | None:
    have = [(worker, worker.step) for worker in workers if worker.step is not None]
    if not have:
        return None
    caption = "Medians over a worker's steps in steady state."
    if not all(step.steady for _, step in have):
        caption = "Medians over steps of the warm-up: none was in steady state."
    if len(have) > MOST_BARS:
        caption += f" The {MOST_BARS} of {len(have)} workers that compute longest."
        have.sort(key=lambda pair: pair[1].exposed.median - pair[1].step.median)
        have = sorted(have[:MOST_BARS], key=lambda pair: pair[0].rank)
    return BarChart(
        title="Where a step goes",
        parts=PARTS,
        rows=[
            Bar(
                name=_name(worker),
                values=_parts(step),
                text=f"{_said(step.step.median)}, first wait after "
                f"{_said(step.first_wait.median)}",
            )
            for worker, step in have
        ],
        caption=caption,
    )


def _step_table(workers: Sequence[WorkerEvidence]) -> Table | None:
    have = [(worker, worker.step) for worker in workers if worker.step is not None]
    if not have:
        return None
    return Table(
        title="Steps of each worker",
        headings=(
            *("worker", "step", "spread", *PARTS, "first wait"),
            *("messages", "sent", "at the end"),
        ),
        rows=[
            (
                _name(worker),
                _seconds(step.step.median),
                _seconds(step.step.spread),
                *(_seconds(part) for part in _parts(step)),
                _seconds(step.first_wait.median),
                Number(step.messages, f"{step.messages:.4g}"),
                Number(step.bytes_sent, show_bytes(step.bytes_sent)),
                Number(step.at_end, f"{100 * step.at_end:.0f} %"),
            )
            for worker, step in have
        ],
        caption="first wait: from a step's end to the first wait for the network, which is "
        "long where a worker is slow. at the end: the part of the gradients' bytes that is "
        "ready in the last tenth of backward only.",
        folded=len(have) > 8,
    )


# ---- links ----


def _links(evidence: Evidence, found: Diagnosis) -> list[Section]:
    """From each host to each other one: goodput, latency, and what was sent again. What is marked is
    the diagnosis's: at hosts of the faults that it names."""
    if not evidence.paths:
        return []
    usual = median(median(path.rates) for path in evidence.paths)
    seen = suspected(NetworkModel(evidence))
    named = [seen[fault.name] for fault in found.faults if fault.name in seen]
    hosts = frozenset[int]().union(*(one.hosts for one in named))
    sections: list[Section] = [
        _matrix(
            evidence,
            "Links, both ways",
            lambda path: _rate(path, usual, hosts),
            caption="Goodput from each host to each other one, nothing else under way: the "
            f"median of its measures. Marked: below {100 * SLOW_LINK:.0f} % of the median path, "
            "at a host with a fault.",
        ),
        _matrix(
            evidence,
            "Latency",
            lambda path: Number(path.latency, _said(path.latency)),
            low_is_bad=False,
            caption="One way, of a message without content.",
        ),
    ]
    if any(path.retransmitted for path in evidence.paths):
        sections.append(
            _matrix(
                evidence,
                "Sent again",
                lambda path: _lost(path, hosts),
                low_is_bad=False,
                caption="Of the segments sent while little is sent. Marked: above "
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
        f"{_short_rate(max(path.rates))} in {len(path.rates)} measures",
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


def _together(evidence: Evidence) -> Table | None:
    if not evidence.together:
        return None
    return Table(
        title="Many at once",
        headings=("flow", "hosts", "slowest", "median", "fastest"),
        rows=[
            (
                f"{one.sources[0]} to {one.targets[0]}, and so on",
                Number(len(one.sources), str(len(one.sources))),
                *(
                    Number(rate, _short_rate(rate))
                    for rate in (min(one.rates), median(one.rates), max(one.rates))
                ),
            )
            for one in evidence.together
            if one.rates
        ],
        caption="What each flow gets while several hosts send at once: less than alone where "
        "an uplink is scarce.",
        folded=True,
    )


# ---- machines ----


def _machines(workers: Sequence[WorkerEvidence]) -> Table:
    return Table(
        title="Machines",
        headings=(
            *("worker", "threads", "cores", "busy with others", "speed"),
            *("interface", "its rate", "others"),
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
        caption="speed: of a product of matrices, over the fastest worker's.",
        folded=len(workers) > 16,
    )


def _seconds(value: float | None) -> Number | None:
    if value is None or not math.isfinite(value):
        return None
    return Number(value, _said(value))


def _said(value: float) -> str:
    return show_seconds(float(f"{value:.3g}"))
