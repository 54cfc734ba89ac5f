"""The table of all faults (`FAULTS`), and the training's faults: start here.

Faults of the system are in `paceline.tools.doctor.system_faults`. Faults of the training are detected after
those are fixed. Their detectors simulate other steps: with messages that start without cost, or with other
methods. Their advice is the recommendation of ``paceline plan`` for the same job.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

import msgspec

from paceline.bucketing.rules import FIXED
from paceline.cluster import Cluster, Processor, Workload
from paceline.collectives.registry import COLLECTIVES
from paceline.core.settings import parse_method, short_spec
from paceline.errors import UsageError
from paceline.interfaces import CONSISTENCIES, Consistency, weaker
from paceline.spec import Spec, parse
from paceline.tools.doctor.evidence import Evidence
from paceline.tools.doctor.system_faults import (
    SYSTEM_FAULTS,
    Detection,
    FaultKind,
    Observed,
)
from paceline.tools.doctor.training_model import TrainingModel
from paceline.tools.plan.candidates import consistency_of
from paceline.tools.plan.estimates import Estimate, recommend
from paceline.tools.plan.predictor import Predictor
from paceline.tools.plan.search import plan
from paceline.units import show_bytes, show_rate, show_seconds

GAIN = 0.05
"""Share of a step that a fix must save, by prediction. Simulated steps are within a few percent of real ones, and
a smaller gain is not worth an intervention."""


def _recommended(
    seen: Observed, allowed: Collection[Consistency]
) -> dict[Consistency, Estimate]:
    """Return the recommendation of ``paceline plan`` for the training; empty if nothing can run."""
    training = seen.training
    classes = tuple(one for one in CONSISTENCIES if one in allowed)
    try:
        found = _estimates(
            training.job.cluster, training.workload, classes, seen.processes
        )
    except UsageError:
        return {}
    recommended = recommend(found, allowed)
    if not any(training.inputs):
        return recommended
    # A plan assumes that workers do not wait for batches.
    took = {q: training.step_seconds(one.spec) for q, one in recommended.items()}
    return {
        q: msgspec.structs.replace(one, step_seconds=seconds)
        for q, one in recommended.items()
        if (seconds := took[q]) is not None
    }


@lru_cache(maxsize=8)
def _estimates(
    cluster: Cluster,
    workload: Workload,
    allowed: tuple[Consistency, ...],
    processes: int,
) -> tuple[Estimate, ...]:
    """Cached, since several faults ask the same of one job."""
    with Predictor(processes) as predictor:
        made = plan(cluster, workload, allowed=allowed, predictor=predictor)
    return made.estimates


def _as_strong(own: Consistency) -> list[Consistency]:
    """Consistencies at least as strong as *own*."""
    return [one for one in CONSISTENCIES if weaker(one, own) == own]


# ---- messages ----

MESSAGE_OVERHEAD = 0.1
"""Share of a step that would be saved if messages started without cost."""


def message_overhead(seen: Observed) -> Detection | None:
    """Detect steps that are long because many messages start one after another.

    Other buckets or another collective have fewer of them, or shorter chains.
    """
    training = seen.training
    steps = [one.step for one in seen.network.evidence.workers if one.step is not None]
    now, free = training.step_seconds(), _without_overhead(training).step_seconds()
    if not steps or now is None or free is None or now - free < MESSAGE_OVERHEAD * now:
        return None
    enough = (1 - GAIN) * now
    known = [(training.step_seconds(spec), spec) for spec in _variations(training.spec)]
    faster = [(took, spec) for took, spec in known if took and took < enough]
    if not faster:
        return None
    best, spec = min(faster)
    own = consistency_of(*parse_method(training.spec))
    for one in _recommended(seen, _as_strong(own)).values():
        if one.step_seconds <= best:
            spec = one.spec
            break
    messages = max(1.0, steps[0].messages)
    each = show_bytes(steps[0].bytes_sent / messages)
    return Detection(
        location="every worker",
        cause=f"a step has {messages:.0f} messages of {each}, and starting them takes "
        f"{show_seconds(now - free)}",
        advice=f"Use fewer messages or shorter chains of them: --method {spec}.",
        fix=lambda training: replace(training, spec=spec),
        command=_run(seen.network.evidence, spec),
    )


def _without_overhead(training: TrainingModel) -> TrainingModel:
    """Return the training with messages that cost only their bytes."""
    processor = training.processor
    if processor is not None:
        processor = Processor(byte=processor.byte, cores=processor.cores)
    return replace(training, latency=0.0, uplink_latency=0.0, processor=processor)


def _variations(text: str) -> list[str]:
    """Return the spec with each fixed bucket rule, and with each collective that runs on any network."""
    spec = parse(text)
    changes: list[dict[str, str]] = [{"buckets": rule} for rule in FIXED]
    changes += [
        {"buckets": "ddp", "collective": name}
        for name, row in COLLECTIVES.items()
        if row.needs == "nothing" and name != "ring"
    ]
    specs = [str(Spec(spec.name, spec.values | change)) for change in changes]
    return [one for one in dict.fromkeys(specs) if one != text]


# ---- methods ----

SLOW_METHOD = 1.5
"""Factor over the step of another method of equal or stronger consistency. Methods of one consistency differ by
less if each is used as intended."""

ON_RANK_0 = ("auto", "embedded")
"""Settings that start one server beside worker 0, unless the cluster has dedicated server hosts."""


def slow_method(seen: Observed) -> Detection | None:
    """Detect a method whose step is much longer than that of a method of equal or stronger consistency."""
    training = seen.training
    if not seen.network.trains:
        return None
    now = training.step_seconds()
    if now is None:  # For example, only the script registers the method.
        return None
    method, settings = parse_method(training.spec)
    name, own = short_spec(method, settings), consistency_of(method, settings)
    bound = (
        training.lower_bound_seconds
        if own == "exact"
        else training.fastest_worker_seconds
    )
    if now <= SLOW_METHOD * bound:
        return None
    better = [
        one
        for one in _recommended(seen, _as_strong(own)).values()
        if now > SLOW_METHOD * one.step_seconds
    ]
    if not better:
        return None
    best = better[0]  # The one with the strongest consistency.
    spec = best.spec
    cause = (
        f"{name} takes {show_seconds(now)} per step, {spec} ({best.consistency}) "
        f"{show_seconds(best.step_seconds)} (both predicted, without faults of the system)"
    )
    advice = f"Use --method {spec}"
    if _on_one_server(training):
        cause += "; all gradients go through the server beside worker 0"
        spread = parse(name)
        spread = Spec(spread.name, spread.values | {"servers": "per-node"})
        there = training.step_seconds(str(spread))
        if there is not None and now > SLOW_METHOD * there:
            advice += f", or a server on each host: {spread} ({show_seconds(there)})"
    return Detection(
        location="every worker",
        cause=cause,
        advice=f"{advice}.",
        fix=lambda training: replace(training, spec=spec),
        command=_run(seen.network.evidence, spec),
    )


def _on_one_server(training: TrainingModel) -> bool:
    method, settings = parse_method(training.spec)
    served = COLLECTIVES[settings.collective].needs == "servers"
    return (
        (method.updates_on == "server" or served)
        and settings.servers in ON_RANK_0
        and not training.cluster.servers
    )


# ---- exact averaging ----

TOO_SLOW = 2.0
"""Factor over a worker's compute time. If no exact method has a shorter step, every method that sends whole
gradients wastes more than half of each machine."""

WEAKER: dict[Consistency, str] = {
    "delayed": "delayed averages",
    "lossy": "compression",
    "local": "local updates",
}
"""Consistencies that are recommended if exact methods are too slow, for readers."""


def network_too_slow(seen: Observed) -> Detection | None:
    """Detect a network on which the shortest step of any exact method is much longer than computing."""
    training = seen.training
    limit, compute = training.lower_bound_seconds, training.compute_seconds
    now = training.step_seconds()
    if not seen.network.trains or now is None or limit <= TOO_SLOW * compute:
        return None  # The step is unknown if only the script registers the method.
    if consistency_of(*parse_method(training.spec)) != "exact":
        return None
    rate = seen.network.usual_link * limit / (TOO_SLOW * compute)
    rate = float(f"{8 * rate:.2g}") / 8
    faster = [
        one
        for one in _recommended(seen, WEAKER).values()
        if one.step_seconds < (1 - GAIN) * now
    ]
    faster.sort(key=lambda one: one.step_seconds)
    single = training.single_seconds
    use = ", ".join(
        f"{WEAKER[one.consistency]} ({one.spec}: {show_seconds(one.step_seconds)}, "
        f"{single / one.step_seconds:.1f}x one machine)"
        for one in faster
    )
    links = f"links of {show_rate(rate)} or more"
    spec = faster[0].spec if faster else ""
    return Detection(
        location="the whole network",
        cause=f"no exact method can take less than {_at_least(limit)} per step; computing "
        f"takes {show_seconds(compute)}",
        advice=f"Use {use}, or {links}." if use else f"Use {links}.",
        fix=(lambda training: replace(training, spec=spec))
        if spec
        else (lambda training: training.with_links(rate)),
        command=_run(seen.network.evidence, spec) if spec else "",
    )


def _run(evidence: Evidence, spec: str) -> str:
    """Return the command that runs the script with another method."""
    words = ["paceline", "run", evidence.script or "SCRIPT", "--method", spec]
    more = ["--", *evidence.arguments] if evidence.arguments else []
    return shlex.join([*words, *more])


def _at_least(value: float) -> str:
    """Format *value* rounded down, so that the bound is never above a measurement beside it."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return show_seconds(math.floor(value / unit) * unit)


FAULTS: tuple[FaultKind, ...] = (
    *SYSTEM_FAULTS,
    FaultKind(
        name="message-overhead",
        title="Message overhead",
        checks="message overhead",
        measured_by="a simulated step with the measured cost of starting messages, against one without this cost",
        remedy="use the other buckets, collective or method that doctor names",
        detect=message_overhead,
        stage="training",
        needs_script=True,
    ),
    FaultKind(
        name="slow-method",
        title="Slow method",
        checks="method",
        measured_by="a simulated step of the method in use, against methods of the same or a stronger consistency",
        remedy="use the method that doctor names, or a server on each host",
        detect=slow_method,
        stage="training",
        needs_script=True,
    ),
    FaultKind(
        name="network-too-slow",
        title="Network too slow for exact averaging",
        checks="bandwidth",
        measured_by="the shortest step of any exact method, against the compute time",
        remedy="use the method of another consistency that doctor names, or faster links",
        detect=network_too_slow,
        stage="training",
        needs_script=True,
    ),
)
"""All faults, root causes first."""


def faults_table() -> str:
    """Return the table of docs/how-to/find-what-is-slow.md."""
    lines = ["| fault | measured by | remedy |", "|---|---|---|"]
    lines += [f"| {row.name} | {row.measured_by} | {row.remedy} |" for row in FAULTS]
    return "\n".join(lines)
