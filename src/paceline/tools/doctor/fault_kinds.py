"""What a fault is, before it has cost anything: `Detection`, and a row of the registry."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.tools.doctor.evidence import Evidence
from paceline.tools.doctor.network_model import NetworkModel
from paceline.tools.doctor.training_model import TrainingModel

Hosts = frozenset[int]


@dataclass(frozen=True)
class Detection:
    """Something wrong. *hosts* are those it is wrong with; *mend* gives the patient without it (None:
    nobody knows what it would be without). *command*: what to run, if something is to be run."""

    where: str
    because: str
    do: str
    mend: Callable[[TrainingModel], TrainingModel] | None
    hosts: Hosts = field(default=frozenset())
    command: str = ""

    def with_symptom(self, symptom: Detection, hosts: Hosts) -> Detection:
        """The same, whose mending mends *symptom*, too, on *hosts*."""
        cause, other = self.mend, symptom.mend
        if cause is None or other is None:
            return self

        def mend(patient: TrainingModel) -> TrainingModel:
            patient = cause(patient)
            return patient.as_in(other(patient), hosts)

        return replace(self, mend=mend)


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault. *seen*: by which measures; *do*: against it, for the page. *find* is not to
    look at the hosts that it is given: their fault has been named already. *explains*: rows below that are mere
    symptoms on the same hosts."""

    name: str
    seen: str
    do: str
    find: Callable[[NetworkModel, Hosts], Detection | None]
    explains: tuple[str, ...] = ()


@dataclass(frozen=True)
class LateRow:
    """As `FaultKind`, of a fault that is looked for when all those are mended."""

    name: str
    seen: str
    do: str
    find: Callable[[NetworkModel, TrainingModel], Detection | None]


def listed(words: list[str]) -> str:
    """``a, b and c``; of many the first few."""
    if len(words) > 4:
        words = [*words[:3], f"{len(words) - 3} more"]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def command_of(evidence: Evidence, *words: str) -> str:
    """A command on the script that ran."""
    script = [evidence.script or "SCRIPT"]
    more = ["--", *evidence.arguments] if evidence.arguments else []
    return shlex.join(["paceline", words[0], *script, *words[1:], *more])
