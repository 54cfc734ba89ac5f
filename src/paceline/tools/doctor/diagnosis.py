"""What the evidence says: faults by name, and what they cost.

1. `FAULTS` are asked in turn, root causes first; a fault that explains others takes its hosts from
   them: a host whose packets are lost has a slow link, and only the first is named.
2. Each mends a `TrainingModel`, and virtual time says what that gains; a fault that gains too little is
   none (`thresholds`), but for those of `CERTAIN`, of which virtual time knows nothing.
3. `LATER` are asked of the patient that is left when all those are mended, if anybody can know it.

Gains add up: each is what its mending gains once the faults above it are mended.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import harmonic_mean

import msgspec

from paceline.tools.doctor.evidence import Evidence
from paceline.tools.doctor.fault_kinds import Detection, FaultKind, Hosts, LateRow
from paceline.tools.doctor.network_faults import (
    contention,
    loss,
    scarce_uplink,
    slow_link,
    slow_path,
    wrong_interface,
)
from paceline.tools.doctor.network_model import NetworkModel
from paceline.tools.doctor.thresholds import GAIN, UNLIKE
from paceline.tools.doctor.training_faults import slow_method, start_up, too_slow
from paceline.tools.doctor.training_model import TrainingModel, patient_of
from paceline.tools.doctor.worker_faults import (
    input_starves,
    no_overlap,
    slow_host,
    threads,
)
from paceline.tools.plan.predict import predict_single

FAULTS: tuple[FaultKind, ...] = (
    FaultKind(
        name="threads",
        seen="threads of all workers of a host, and its cores",
        do="`OMP_NUM_THREADS`: cores divided by workers; torchrun sets 1 where nothing is said",
        find=threads,
        # Processors that are short also hold up what is sent and received.
        explains=("slow host", "input starves", "contention"),
    ),
    FaultKind(
        name="wrong interface",
        seen="the interface that carries the collectives, and the others that are up",
        do="`GLOO_SOCKET_IFNAME` (NCCL: `NCCL_SOCKET_IFNAME`), and an address of that network as `MASTER_ADDR`",
        find=wrong_interface,
        explains=("loss", "contention", "slow link", "slow path"),
    ),
    FaultKind(
        name="loss",
        seen="segments that are sent again, on each path",
        do="cable, port, driver, radio",
        find=loss,
        explains=("contention", "slow link", "slow path"),
    ),
    FaultKind(
        name="contention",
        seen="goodput of each path, several times, apart in time",
        do="another link, or another hour, for whoever else uses it",
        find=contention,
        explains=("slow link", "slow path"),
    ),
    FaultKind(
        name="scarce uplink",
        seen="what hosts get that all send at once, in rounds, against alone",
        do="a faster uplink, or `collective=hierarchical`",
        find=scarce_uplink,
    ),
    FaultKind(
        name="slow link",
        seen="goodput between each two hosts, each direction; a link is as its best paths",
        do="cable, port, duplex; or train without that host",
        find=slow_link,
    ),
    FaultKind(
        name="slow path",
        seen="goodput between two hosts that both reach others faster",
        do="what only they share: route, cable between switches, member of a bundle (LAG); or other neighbours in the ring",
        find=slow_path,
    ),
    FaultKind(
        name="slow host",
        seen="forward and backward on each worker, without waits",
        do="end other programs there, or give it a smaller part: `paceline.Sampler(shares=...)`",
        find=slow_host,
    ),
    FaultKind(
        name="input starves",
        seen="time from a step's end to the next forward pass, on each worker",
        do="more loader processes that run ahead; less work between steps",
        find=input_starves,
    ),
    FaultKind(
        name="no overlap",
        seen="when in backward gradients' bytes become ready; whether the model is compiled whole",
        do="compile blocks: `for block in model.blocks: block.compile()`",
        find=no_overlap,
    ),
)
"""Root causes first."""

LATER: tuple[LateRow, ...] = (
    LateRow(
        name="start-up",
        seen="a step in virtual time, with messages as measured and with ones that begin at no cost",
        do="another bucket rule or collective, which it names",
        find=start_up,
    ),
    LateRow(
        name="slow method",
        seen="a step in virtual time by the method in use, against others that promise as much or more",
        do="the method that it names, or a server on each host",
        find=slow_method,
    ),
    LateRow(
        name="too slow for exact",
        seen="the shortest step of any exact mean, against computing",
        do="the class that helps, with the command; or faster links",
        find=too_slow,
    ),
)
"""Asked when the others are mended."""

CERTAIN = ("threads", "loss")
"""Wrong whatever virtual time says: it runs no threads and loses no packets."""

UNSEEN = "loss"
"""What a step takes beyond its prediction is this one's doing: retransmissions wait."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """*name*: of the registry. *where*: which host, link or rack. *because*: what was measured.
    *do*: what to do, *command*: what to run, if that is to be run. *gains_seconds*: by how much a step is shorter
    then, predicted (None: nobody can know, or the step itself was predicted wrongly)."""

    name: str
    where: str
    because: str
    do: str
    command: str = ""
    gains_seconds: float | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """*faults*, from what is to be done first. *step_seconds* as measured, *predicted_seconds* of the job as its
    parts were measured, *mended_seconds* without its faults (None: nobody can know); *alone_seconds*: one machine's, *lower_bound_seconds*: of any
    exact mean on the network as it is. Where no script *ran* they are those of an all-reduce of 64 MiB, and there is no step. *notes* say
    why figures tell little, if they do."""

    faults: tuple[Fault, ...]
    runtime: str
    workers: int
    spec: str
    ran: bool
    predicted_seconds: float | None
    mended_seconds: float | None
    lower_bound_seconds: float
    step_seconds: float | None = None
    alone_seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        return not self.faults

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


def diagnose(evidence: Evidence) -> Diagnosis:
    """Name what is wrong, and predict what mending it gains: a pure function, to the bit, which
    takes the process for its simulations. Raises `UsageError` for evidence that cannot be."""
    picture = NetworkModel(evidence)
    visit = _Visit(patient_of(picture), suspected(picture))
    visit.leave_out_what_gains_nothing()
    known = all(found.mend is not None for found in visit.found.values())
    for late in LATER if known else ():
        found = late.find(picture, visit.mended(visit.found))
        if found is not None:
            visit.found[late.name] = found
    visit.leave_out_what_gains_nothing()
    return _diagnosis(picture, visit)


def suspected(picture: NetworkModel) -> dict[str, Detection]:
    """What of `FAULTS` is to be seen, whatever it costs; root causes first. Mending one mends its
    symptoms, on its hosts."""
    explained: dict[str, dict[str, Hosts]] = defaultdict(dict)  # by symptom and cause
    suspects: dict[str, Detection] = {}
    for row in FAULTS:
        causes = explained[row.name]
        spared = frozenset[int]().union(*causes.values())
        found = row.find(picture, spared)
        theirs: dict[str, Hosts] = {}
        if found is not None:
            suspects[row.name] = found
            theirs[row.name] = found.hosts
        everywhere = row.find(picture, frozenset()) if spared else None
        if everywhere is not None:
            for cause, hosts in causes.items():
                suspects[cause] = suspects[cause].with_symptom(everywhere, hosts)
                # A symptom's symptoms are the cause's.
                theirs[cause] = everywhere.hosts & hosts
        for name in row.explains:
            for cause, hosts in theirs.items():
                known = explained[name].get(cause, frozenset())
                explained[name][cause] = known | hosts
    return suspects


@dataclass
class _Visit:
    """A patient, what was *found*, and steps in virtual time with some of it mended."""

    patient: TrainingModel
    found: dict[str, Detection]
    _steps: dict[tuple[str, ...], float | None] = field(default_factory=dict)

    def mended(self, names: Sequence[str] | dict[str, Detection]) -> TrainingModel:
        """Without these faults."""
        patient = self.patient
        for name, found in self.found.items():
            if name in names and found.mend is not None:
                patient = found.mend(patient)
        return patient

    def step(self, names: Sequence[str]) -> float:
        """Seconds of a step without these faults."""
        key = tuple(name for name in self.found if name in names)
        if key not in self._steps:
            self._steps[key] = self.mended(key).step_seconds()
        return self._steps[key] or math.inf

    def leave_out_what_gains_nothing(self) -> None:
        """One fault may hide another: what gains neither alone nor last is none."""
        for name, found in list(self.found.items()):
            if name in CERTAIN or found.mend is None:
                continue
            others = [other for other in self.found if other != name]
            alone = 1 - self.step([name]) / self.step(())
            last = 1 - self.step([*self.found]) / self.step(others)
            if max(alone, last) < GAIN:
                del self.found[name]
                self._steps.clear()

    def ranked(self) -> list[tuple[str, float | None]]:
        """Faults, each the one that gains most once those before it are mended, and what; those of
        `LATER` last."""
        done: list[str] = []
        ranked: list[tuple[str, float | None]] = []
        later = [row.name for row in LATER]
        left = [name for name, found in self.found.items() if found.mend is not None]
        while left:
            now = self.step(done)
            best = max(
                left,
                key=lambda name: (name not in later, now - self.step([*done, name])),
            )
            gains = now - self.step([*done, best])
            ranked.append((best, gains if math.isfinite(gains) else None))
            done.append(best)
            left.remove(best)
        unknown = [name for name, found in self.found.items() if found.mend is None]
        return [(name, None) for name in unknown] + ranked


def _diagnosis(picture: NetworkModel, visit: _Visit) -> Diagnosis:
    evidence, patient = picture.evidence, visit.patient
    measured = [one.step.step.median for one in evidence.workers if one.step]
    # Workers that wait for nobody do different numbers of steps: their rates add up.
    step = harmonic_mean(measured) if picture.trains else None
    predicted = patient.step_seconds()
    notes = list(evidence.notes)
    off = _off(step, predicted, losing=UNSEEN in visit.found)
    if off:
        notes.append(off)
    faults = [
        Fault(
            name=name,
            where=visit.found[name].where,
            because=visit.found[name].because,
            do=visit.found[name].do,
            command=visit.found[name].command,
            gains_seconds=None if off else _with_unseen(name, gains, step, predicted),
        )
        for name, gains in visit.ranked()
    ]
    return Diagnosis(
        faults=tuple(faults),
        runtime=evidence.runtime,
        workers=len(evidence.workers),
        spec=evidence.spec,
        ran=picture.trains,
        step_seconds=step,
        predicted_seconds=predicted,
        mended_seconds=None if off else visit.mended(visit.found).step_seconds(),
        alone_seconds=predict_single(patient.job).step_seconds / len(patient.hosts)
        if picture.trains
        else None,
        lower_bound_seconds=patient.lower_bound_seconds,
        notes=tuple(notes),
    )


def _off(step: float | None, predicted: float | None, *, losing: bool) -> str:
    """Why nothing that is predicted of this step is to be believed, or nothing. What a step takes longer
    where packets are lost is known: retransmissions."""
    if step is None or (losing and predicted is not None and step > predicted):
        return ""
    if predicted is None:
        return "this step cannot be predicted from its parts, and so no gain can"
    part = abs(step - predicted) / step
    if part <= UNLIKE:
        return ""
    return (
        f"the step was predicted {100 * part:.0f} % off what was measured: so no gain is "
        "predicted"
    )


def _with_unseen(
    name: str, gains: float | None, step: float | None, predicted: float | None
) -> float | None:
    """With what a step took beyond its prediction, where that is this fault's doing."""
    if name != UNSEEN or step is None or predicted is None:
        return gains
    beyond = max(0.0, step - predicted)
    return (gains or 0.0) + beyond if beyond > GAIN * step else gains
