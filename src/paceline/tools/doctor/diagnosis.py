"""Names the faults that slow a training down, and predicts the gain of each fix.

1. The system faults of `FAULTS` are detected, root causes first. A fault that causes others takes over their
   hosts: if packets are lost the link is slow, too, but only the loss is reported.
2. Each fix changes a `TrainingModel`, and the simulated runtime predicts the gain. A fault with too small a gain
   is dropped (`GAIN`), unless the runtime does not model it (`FaultKind.always_report`).
3. The training's faults are then detected in a training without the system faults, if it can be predicted.

Gains add up: each is the gain of a fix after all faults above it are fixed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from statistics import harmonic_mean

import msgspec

from paceline.tools.doctor.evidence import Evidence
from paceline.tools.doctor.faults import FAULTS, GAIN
from paceline.tools.doctor.network_model import NetworkModel
from paceline.tools.doctor.system_faults import Detection, Hosts, Observed
from paceline.tools.doctor.training_model import TrainingModel

UNLIKE = 0.15
"""Share of a measured step: if the prediction differs by more, no gain is predicted."""

_KINDS = {row.name: row for row in FAULTS}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that costs time.

    Attributes:
        name: Its name in the table of faults.
        location: Host, link, path or rack.
        cause: The measurement that shows it.
        advice: The recommended action.
        command: A command that fixes it, if there is one.
        gain_seconds: Predicted seconds that the fix saves per step. None if it cannot be predicted, or
            if the step itself was predicted wrongly.
        hosts: Hosts that have the fault.
    """

    name: str
    location: str
    cause: str
    advice: str
    command: str = ""
    gain_seconds: float | None = None
    hosts: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """The fault's name for readers."""
        return _KINDS[self.name].title


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Faults of a training, or of a network if no script ran.

    Attributes:
        faults: In the order in which to fix them.
        harmless: Deviations that cost less than `GAIN` of a step.
        checked: The checks that were made.
        runtime: ``"real"``, ``"emulated"`` or ``"simulated"``.
        workers: Number of workers.
        spec: The method in use.
        trained: Whether a script ran. If not, figures are of an all-reduce of 64 MiB.
        step_seconds: Measured; None if no script ran.
        predicted_seconds: Predicted from the measured parts.
        fixed_seconds: Predicted without the faults; None if it cannot be predicted.
        single_seconds: One machine's step with the same global batch.
        lower_bound_seconds: The shortest step of any exact method on this network, with its faults.
        notes: Reasons why the figures may mislead.
    """

    faults: tuple[Fault, ...]
    harmless: tuple[Fault, ...] = ()
    checked: tuple[str, ...] = ()
    runtime: str
    workers: int
    spec: str
    trained: bool
    predicted_seconds: float | None
    fixed_seconds: float | None
    lower_bound_seconds: float
    step_seconds: float | None = None
    single_seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        return not self.faults

    @property
    def speedup(self) -> float | None:
        """Speed relative to one machine with the same global batch."""
        if not self.step_seconds or not self.single_seconds:
            return None
        return self.single_seconds / self.step_seconds

    @property
    def unexplained_seconds(self) -> float | None:
        """Measured minus predicted step time; may be negative."""
        if self.step_seconds is None or self.predicted_seconds is None:
            return None
        return self.step_seconds - self.predicted_seconds

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


def diagnose(evidence: Evidence, *, processes: int = 1) -> Diagnosis:
    """Name the faults that slow a training down, and predict the time that their fixes save.

    Equal evidence gives equal diagnoses, to the bit. It occupies the process with simulations.

    Args:
        evidence: The measurements of ``paceline doctor``.
        processes: Processes that predict other methods.

    Returns:
        The faults, the one with the largest gain first.

    Raises:
        UsageError: The evidence is incomplete.
    """
    network = NetworkModel(evidence)
    training = TrainingModel.of(network)
    estimator = GainEstimator(training, detect_faults(network, training))
    estimator.remove_harmless()
    checked = [row for row in FAULTS if row.stage == "system"]
    if all(found.fix is not None for found in estimator.found.values()):
        for row in FAULTS:
            if row.stage == "training":
                left = estimator.fixed(estimator.found)
                found = row.detect(Observed(network, left, processes=processes))
                checked.append(row)
                if found is not None:
                    estimator.found[row.name] = found
    estimator.remove_harmless()
    seen = [one.checks for one in checked if network.trains or not one.needs_script]
    return _diagnosis(network, estimator, seen)


def detect_faults(
    network: NetworkModel, training: TrainingModel
) -> dict[str, Detection]:
    """Detect the system's faults, whatever their cost; root causes first.

    The fix of a fault also fixes its symptoms, on its hosts.
    """
    explained: dict[str, dict[str, Hosts]] = defaultdict(dict)  # by symptom and cause
    detected: dict[str, Detection] = {}
    for row in FAULTS:
        if row.stage != "system":
            continue
        causes = explained[row.name]
        seen = Observed(network, training)
        spared = frozenset[int]().union(*causes.values())
        found = row.detect(replaced(seen, explained=spared))
        theirs: dict[str, Hosts] = {}
        if found is not None:
            detected[row.name] = found
            theirs[row.name] = found.hosts
        everywhere = row.detect(seen) if spared else None
        if everywhere is not None:
            for cause, hosts in causes.items():
                detected[cause] = detected[cause].with_symptom(everywhere, hosts)
                # Symptoms of this symptom have the same root cause.
                theirs[cause] = everywhere.hosts & hosts
        for name in row.symptoms:
            for cause, hosts in theirs.items():
                known = explained[name].get(cause, frozenset())
                explained[name][cause] = known | hosts
    return detected


@dataclass
class GainEstimator:
    """Predicts steps of *training* without some of the *found* faults."""

    training: TrainingModel
    found: dict[str, Detection]
    harmless: dict[str, Detection] = field(default_factory=dict)
    _steps: dict[tuple[str, ...], float | None] = field(default_factory=dict)

    def fixed(self, names: Iterable[str]) -> TrainingModel:
        """Return the training without the faults *names*."""
        names, training = set(names), self.training
        for name, found in self.found.items():
            if name in names and found.fix is not None:
                training = found.fix(training)
        return training

    def step_seconds(self, names: Collection[str]) -> float:
        """Return a step without the faults *names*; infinite if it cannot be predicted."""
        key = tuple(name for name in self.found if name in names)
        if key not in self._steps:
            self._steps[key] = self.fixed(key).step_seconds()
        return self._steps[key] or math.inf

    def remove_harmless(self) -> None:
        """Remove faults without a gain: neither alone, nor after all others are fixed.

        Both are checked because one fault may hide another.
        """
        for name, found in list(self.found.items()):
            if _KINDS[name].always_report or found.fix is None:
                continue
            others = [other for other in self.found if other != name]
            alone = 1 - self.step_seconds([name]) / self.step_seconds(())
            last = 1 - self.step_seconds([*self.found]) / self.step_seconds(others)
            if max(alone, last) < GAIN:
                self.harmless[name] = self.found.pop(name)
                self._steps.clear()

    def ranked(self) -> list[tuple[str, float | None]]:
        """Faults with their gains: each next fault is the one with the largest remaining gain.

        Faults with unknown gain come first, faults of the training last.
        """
        done: list[str] = []
        ranked: list[tuple[str, float | None]] = []
        left = [name for name, found in self.found.items() if found.fix is not None]
        while left:
            now = self.step_seconds(done)
            best = max(
                left,
                key=lambda name: (
                    _KINDS[name].stage == "system",
                    now - self.step_seconds([*done, name]),
                ),
            )
            gain = now - self.step_seconds([*done, best])
            ranked.append((best, gain if math.isfinite(gain) else None))
            done.append(best)
            left.remove(best)
        unknown = [name for name, found in self.found.items() if found.fix is None]
        return [(name, None) for name in unknown] + ranked


def _diagnosis(
    network: NetworkModel, estimator: GainEstimator, checked: Iterable[str]
) -> Diagnosis:
    evidence, training = network.evidence, estimator.training
    measured = [one.step.step.median for one in evidence.workers if one.step]
    # Workers that do not wait for each other do different numbers of steps, so their rates are added.
    step = harmonic_mean(measured) if network.trains else None
    predicted = training.step_seconds()
    unmodelled = [name for name in estimator.found if _KINDS[name].gain_is_unmodelled]
    off = _why_no_gains(step, predicted, losing=bool(unmodelled))
    beyond = 0.0
    if unmodelled and step is not None and predicted is not None:
        beyond = step - predicted if step - predicted > GAIN * step else 0.0
    faults = [
        _fault(
            name,
            estimator.found[name],
            None
            if off
            else (gain or 0.0) + beyond
            if name in unmodelled and beyond
            else gain,
        )
        for name, gain in estimator.ranked()
    ]
    return Diagnosis(
        faults=tuple(faults),
        harmless=tuple(_fault(*one, None) for one in estimator.harmless.items()),
        checked=tuple(checked),
        runtime=evidence.runtime,
        workers=len(evidence.workers),
        spec=evidence.spec,
        trained=network.trains,
        step_seconds=step,
        predicted_seconds=predicted,
        fixed_seconds=None if off else estimator.fixed(estimator.found).step_seconds(),
        single_seconds=training.single_seconds if network.trains else None,
        lower_bound_seconds=training.lower_bound_seconds,
        notes=(*evidence.notes, *([off] if off else [])),
    )


def _fault(name: str, found: Detection, gain: float | None) -> Fault:
    return Fault(
        name=name,
        location=found.location,
        cause=found.cause,
        advice=found.advice,
        command=found.command,
        gain_seconds=gain,
        hosts=tuple(sorted(found.hosts)),
    )


def _why_no_gains(step: float | None, predicted: float | None, *, losing: bool) -> str:
    """Why no gain of this step can be predicted; empty if it can.

    If packets are lost, retransmissions explain a longer step.
    """
    if step is None or (losing and predicted is not None and step > predicted):
        return ""
    if predicted is None:
        return "This step cannot be predicted from its parts, so no gain is predicted."
    part = abs(step - predicted) / step
    if part <= UNLIKE:
        return ""
    return (
        f"The prediction is {100 * part:.0f} % off the measured step, so no gain is "
        "predicted."
    )
