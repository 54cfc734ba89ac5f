"""Faults of what is trained, and how: looked for once what the machines and links have is mended.

Each asks the virtual world: what would a step take if messages began at no cost, if gradients went
otherwise, if another class was allowed?
"""

from __future__ import annotations

from dataclasses import replace

from paceline.chosen import read_spec
from paceline.collectives import COLLECTIVES
from paceline.doctor.faults_kinds import Found, command_of
from paceline.doctor.faults_limits import GAIN, HELPS, START_UP, TOO_SLOW
from paceline.doctor.faults_patient import Patient
from paceline.doctor.faults_picture import Picture
from paceline.fusion import FIXED
from paceline.interfaces import Quality
from paceline.network import Processor
from paceline.plan.candidates import first, quality_of
from paceline.spec import Spec, parse
from paceline.units import show_bytes, show_rate, show_seconds

WEAKER: tuple[Quality, ...] = ("late", "lossy", "local")
"""Classes that are advised where exact methods cannot be fast enough."""


def start_up(picture: Picture, patient: Patient) -> Found | None:
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
    return Found(
        where="every worker",
        because=f"{messages:.0f} messages a step of {each} each; their starts take "
        f"{_seconds(now - free)} of it",
        do=f"merge them, or send them along shorter chains: {spec}",
        mend=lambda patient: replace(patient, spec=spec),
        command=command_of(picture.evidence, "run", "--method", spec),
    )


def _at_no_cost(patient: Patient) -> Patient:
    """With messages that cost only their bytes."""
    processor = patient.processor
    if processor is not None:
        processor = Processor(byte=processor.byte, cores=processor.cores)
    return replace(patient, latency=0.0, uplink_latency=0.0, processor=processor)


def _otherwise(text: str) -> list[str]:
    """The spec under each fixed rule of fusion, and with each collective that any network has."""
    spec = parse(text)
    rows = [
        {"collective": name}
        for name, row in COLLECTIVES.items()
        if not row.needs_servers and not getattr(row, "needs_aggregators", False)
    ]
    changes: list[dict[str, str]] = [{"fusion": rule} for rule in FIXED]
    changes += [{"fusion": "ddp"} | row for row in rows if row["collective"] != "ring"]
    specs = [str(Spec(spec.name, spec.values | change)) for change in changes]
    return [one for one in dict.fromkeys(specs) if one != text]


def too_slow(picture: Picture, patient: Patient) -> Found | None:
    """A network on which the shortest step of any exact mean is far longer than computing."""
    if not picture.trains or quality_of(*read_spec(patient.spec)) != "exact":
        return None
    limit, compute = patient.limit_seconds, patient.compute_seconds
    now = patient.step_seconds()
    if now is None or limit <= TOO_SLOW * compute:
        return None
    quality, spec = _advised(patient, now)
    enough = picture.usual_link * limit / (TOO_SLOW * compute)
    return Found(
        where="the whole network",
        because=f"no exact method comes below {_seconds(limit)} a step, of which "
        f"{_seconds(compute)} compute",
        do=f"a method of class {quality}: {spec}; or links of "
        f"{show_rate(float(f'{8 * enough:.2g}') / 8)}",
        mend=lambda patient: replace(patient, spec=spec),
        command=command_of(picture.evidence, "run", "--method", spec),
    )


def _advised(patient: Patient, now: float) -> tuple[Quality, str]:
    """A class and its fastest spec, of the plan's first candidates: from the strongest promise on
    the first that gains enough."""
    among, _ = first(patient.cluster)
    found: dict[Quality, tuple[float, str]] = {}
    for one in among:
        if one.quality in WEAKER:
            seconds = patient.step_seconds(one.spec)
            if seconds is not None:
                best = found.get(one.quality, (now, ""))
                found[one.quality] = min(best, (seconds, one.spec))
    most = max(now - seconds for seconds, _ in found.values())
    return next(
        (quality, found[quality][1])
        for quality in WEAKER
        if quality in found and now - found[quality][0] >= HELPS * most
    )


def _seconds(value: float) -> str:
    return show_seconds(float(f"{value:.2g}"))
