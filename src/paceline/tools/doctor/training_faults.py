"""Faults of what is trained, and how: looked for once what the machines and links have is mended.

Each asks the simulated runtime: what would a step take if messages began at no cost, if gradients went
otherwise, if another class was allowed?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.bucketing.rules import FIXED
from paceline.cluster import Processor
from paceline.collectives.registry import COLLECTIVES
from paceline.core.settings import parse_method, short_spec
from paceline.interfaces import CONSISTENCIES, Consistency, weaker
from paceline.spec import Spec, parse
from paceline.tools.doctor.fault_kinds import Detection, command_of
from paceline.tools.doctor.network_model import NetworkModel
from paceline.tools.doctor.thresholds import (
    GAIN,
    HELPS,
    SLOW_METHOD,
    START_UP,
    TOO_SLOW,
)
from paceline.tools.doctor.training_model import TrainingModel
from paceline.tools.plan.candidates import consistency_of, first
from paceline.units import show_bytes, show_rate, show_seconds

NEAR = ("auto", "embedded")
"""Where servers are beside rank 0, unless the cluster has hosts for them."""

WEAKER: tuple[Consistency, ...] = ("delayed", "lossy", "local")
"""Classes that are recommended where exact methods cannot be fast enough."""


def start_up(picture: NetworkModel, patient: TrainingModel) -> Detection | None:
    """A step that would be much shorter if its messages began at no cost, and has fewer or shorter
    chains of them under another rule or collective."""
    steps = [one.step for one in picture.evidence.workers if one.step is not None]
    now, free = patient.step_seconds(), _at_no_cost(patient).step_seconds()
    if not steps or now is None or free is None or now - free < START_UP * now:
        return None
    found = [
        (seconds, spec)
        for spec in _otherwise(patient.spec)
        if (seconds := patient.step_seconds(spec)) is not None
    ]
    best, spec = min(found, default=(now, ""))
    if now - best < GAIN * now:
        return None
    messages = max(1.0, steps[0].messages)
    each = show_bytes(float(f"{steps[0].bytes_sent / messages:.2g}"))
    return Detection(
        where="every worker",
        because=f"{messages:.0f} messages a step of {each} each; their starts take "
        f"{_seconds(now - free)} of it",
        do=f"merge them, or send them along shorter chains: {spec}",
        mend=lambda patient: replace(patient, spec=spec),
        command=command_of(picture.evidence, "run", "--method", spec),
    )


def _at_no_cost(patient: TrainingModel) -> TrainingModel:
    """With messages that cost only their bytes."""
    processor = patient.processor
    if processor is not None:
        processor = Processor(byte=processor.byte, cores=processor.cores)
    return replace(patient, latency=0.0, uplink_latency=0.0, processor=processor)


def _otherwise(text: str) -> list[str]:
    """The spec under each fixed bucket rule, and with each collective that any network has."""
    spec = parse(text)
    rows = [
        {"collective": name}
        for name, row in COLLECTIVES.items()
        if row.needs == "nothing"
    ]
    changes: list[dict[str, str]] = [{"buckets": rule} for rule in FIXED]
    changes += [{"buckets": "ddp"} | row for row in rows if row["collective"] != "ring"]
    specs = [str(Spec(spec.name, spec.values | change)) for change in changes]
    return [one for one in dict.fromkeys(specs) if one != text]


def slow_method(picture: NetworkModel, patient: TrainingModel) -> Detection | None:
    """A method whose step takes far longer than one of another that promises as much, or more."""
    if not picture.trains:
        return None
    now = patient.step_seconds()
    if now is None:  # such as a script's own method, which is registered there alone
        return None
    method, settings = parse_method(patient.spec)
    name, own = short_spec(method, settings), consistency_of(method, settings)
    bound = patient.lower_bound_seconds if own == "exact" else patient.least_seconds
    if now <= SLOW_METHOD * bound:
        return None
    among, _ = first(patient.cluster)
    about: dict[Consistency, tuple[float, str]] = {}
    for one in among:
        if weaker(one.consistency, own) == own and one.spec != name:
            seconds = patient.about_seconds(one.spec)
            if seconds is not None:
                best = about.get(one.consistency, (seconds, one.spec))
                about[one.consistency] = min(best, (seconds, one.spec))
    found: dict[Consistency, tuple[float, str]] = {}
    for consistency, (_, spec) in about.items():
        # What a short run has as the fastest may be no faster than the usual one, once buckets are planned.
        for text in dict.fromkeys(("bsp", spec) if consistency == "exact" else (spec,)):
            seconds = patient.step_seconds(text)
            usual = found.get(consistency, (now / SLOW_METHOD, ""))[0]
            least = (1 - GAIN) * usual if consistency in found else usual
            if seconds is not None and seconds < least:
                found[consistency] = seconds, text
    if not found:
        return None
    consistency = _strongest(found, now, CONSISTENCIES)
    seconds, spec = found[consistency]
    because = (
        f"{name} takes {_seconds(now)} a step here, and {spec}, which is {consistency}, "
        f"{_seconds(seconds)}"
    )
    do = f"--method {spec}"
    if _on_one_server(patient):
        because += "; all gradients pass the one server beside worker 0"
        spread = parse(name)
        spread = Spec(spread.name, spread.values | {"servers": "per-node"})
        there = patient.step_seconds(str(spread))
        if there is not None and now > SLOW_METHOD * there:
            do += f", or a server on each host: {spread} ({_seconds(there)})"
    return Detection(
        where="every worker",
        because=because,
        do=do,
        mend=lambda patient: replace(patient, spec=spec),
        command=command_of(picture.evidence, "run", "--method", spec),
    )


def _on_one_server(patient: TrainingModel) -> bool:
    method, settings = parse_method(patient.spec)
    served = COLLECTIVES[settings.collective].needs == "servers"
    return (
        (method.updates_on == "server" or served)
        and settings.servers in NEAR
        and not patient.cluster.servers
    )


def too_slow(picture: NetworkModel, patient: TrainingModel) -> Detection | None:
    """A network on which the shortest step of any exact mean is far longer than computing."""
    limit, compute = patient.lower_bound_seconds, patient.compute_seconds
    now = patient.step_seconds()
    if not picture.trains or now is None:
        return None
    if (
        consistency_of(*parse_method(patient.spec)) != "exact"
        or limit <= TOO_SLOW * compute
    ):
        return None
    consistency, spec = _advised(patient)
    enough = picture.usual_link * limit / (TOO_SLOW * compute)
    return Detection(
        where="the whole network",
        because=f"no exact method comes below {_at_least(limit)} a step, of which "
        f"{_seconds(compute)} compute",
        do=f"a method of class {consistency}: {spec}; or links of "
        f"{show_rate(float(f'{8 * enough:.2g}') / 8)}",
        mend=lambda patient: replace(patient, spec=spec),
        command=command_of(picture.evidence, "run", "--method", spec),
    )


def _advised(patient: TrainingModel) -> tuple[Consistency, str]:
    """A weaker class and its fastest spec, of the plan's first candidates."""
    now = patient.about_seconds(patient.spec) or math.inf
    among, _ = first(patient.cluster)
    found: dict[Consistency, tuple[float, str]] = {}
    for one in among:
        if one.consistency in WEAKER:
            seconds = patient.about_seconds(one.spec)
            if seconds is not None:
                best = found.get(one.consistency, (now, ""))
                found[one.consistency] = min(best, (seconds, one.spec))
    consistency = _strongest(found, now, WEAKER)
    return consistency, found[consistency][1]


def _strongest(
    found: Mapping[Consistency, tuple[float, str]],
    now: float,
    ranked: Sequence[Consistency],
) -> Consistency:
    """From the strongest promise on the first class that gains enough."""
    most = max(now - seconds for seconds, _ in found.values())
    return next(
        consistency
        for consistency in ranked
        if consistency in found and now - found[consistency][0] >= HELPS * most
    )


def _seconds(value: float) -> str:
    return show_seconds(float(f"{value:.3g}"))


def _at_least(value: float) -> str:
    """Rounded down: a bound is never above what was measured beside it."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return show_seconds(float(f"{math.floor(value / unit) * unit:.3g}"))
