"""Saves decisions in a file, and describes them as text.

The next start of the same training reads the file and begins with the chosen method. A file holds decisions
of several trainings, so jobs that start in one folder do not replace each other's. A decision is used if its
`CacheKey` is the same and a measurement shows the same network.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path

import msgspec

from paceline.cluster import Cluster, cluster_toml
from paceline.errors import UsageError
from paceline.interfaces import Consistency, Runtime
from paceline.run_options import RunOptions
from paceline.tools.auto.config import AutoConfig
from paceline.tools.auto.controller import Decision, TrialResult
from paceline.tools.auto.planner_process import Answer
from paceline.tools.plan.candidates import summary_line
from paceline.units import show_seconds

FILE = "paceline-auto.json"
FORMAT = "paceline auto 2"
MOST_DECISIONS = 32
"""Decisions in a file at most; the oldest are dropped."""


class CacheKey(msgspec.Struct, kw_only=True, frozen=True):
    """Identifies a training: a decision is valid for nothing else.

    Attributes:
        model: A digest of the tensors' names and sizes.
        optimizer: The class's name.
        workers: Number of workers.
        consistency: The weakest consistency that was allowed.
        runtime: ``"real"``, ``"emulated"`` or ``"simulated"``.
        version: paceline's version.
    """

    model: str
    optimizer: str
    workers: int
    consistency: Consistency
    runtime: str
    version: str = installed_version("paceline")


class CachedDecision(msgspec.Struct, kw_only=True, frozen=True):
    """A decision in its saved form.

    Attributes:
        key: The training that it is valid for.
        spec: The method.
        seconds: Seconds of a step with it.
        cluster: The network (TOML).
        decision: The measurements behind it.
        text: The decision as text.
    """

    key: CacheKey
    spec: str
    seconds: float
    cluster: str
    decision: Decision
    text: str = ""


class _File(msgspec.Struct, kw_only=True, frozen=True):
    decisions: list[CachedDecision]
    format: str = FORMAT


def model_digest(names: Sequence[str], sizes: Sequence[int]) -> str:
    """Return a digest of a model's tensors."""
    text = "\n".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class DecisionCache:
    """The decisions of one training, in a file that several trainings share.

    Attributes:
        path: The file; None: decisions are not saved.
    """

    def __init__(self, path: Path | None, key: CacheKey) -> None:
        self.path, self._key = path, key

    @classmethod
    def of(
        cls, config: AutoConfig, options: RunOptions, key: CacheKey
    ) -> DecisionCache:
        """Return the cache of a training.

        In virtual time there is a file only if the user names one. Otherwise the second of two equal runs
        would differ.
        """
        if config.file:
            return cls(Path(config.file), key)
        if key.runtime == "simulated":
            return cls(None, key)
        return cls(Path(options.records or ".") / FILE, key)

    def load(self) -> CachedDecision | None:
        """Return the saved decision of the same training; None without a file.

        Raises:
            UsageError: The file cannot be read, or holds only decisions of other trainings.
        """
        decisions = self._decisions()
        if not decisions:
            return None
        for decision in decisions:
            if decision.key == self._key:
                return decision
        differences = [
            [
                f"{name} {getattr(decision.key, name)}, not {getattr(self._key, name)}"
                for name in CacheKey.__struct_fields__
                if getattr(decision.key, name) != getattr(self._key, name)
            ]
            for decision in decisions
        ]
        nearest = min(differences, key=len)
        raise UsageError(
            f"{self.path} has only decisions of other trainings: {', '.join(nearest)}. Remove it, or name "
            "another file (auto:file=FILE)"
        )

    def save(self, decision: Decision, cluster: Cluster, text: str) -> None:
        """Save the decision beside those of other trainings. Raises `UsageError`."""
        if self.path is None:
            return
        try:
            others = [one for one in self._decisions() if one.key != self._key]
        except UsageError:
            others = []  # Not a file of paceline, or of another version.
        mine = CachedDecision(
            key=self._key,
            spec=decision.chosen,
            seconds=decision.step_seconds,
            cluster=cluster_toml(cluster, exact=True),
            decision=decision,
            text=text,
        )
        content = _File(decisions=[*others, mine][-MOST_DECISIONS:])
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(
                msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
            )
            beside.replace(self.path)
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error}") from error

    def _decisions(self) -> list[CachedDecision]:
        if self.path is None:
            return []
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error}") from error
        try:
            found = msgspec.json.decode(content, type=_File)
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"{self.path} holds no decisions of auto: {error}. Remove it, or name another file"
            ) from error
        if found.format != FORMAT:
            raise UsageError(
                f"{self.path}: its format is {found.format!r}, not {FORMAT!r}. Remove it, or name another file"
            )
        return found.decisions


class DecisionLog:
    """Receives rank 0's decisions: writes them to standard error, the recorder's notes and the cache.

    Attributes:
        cluster: The network of the last plan, once it is known.
        answer: The planner's answer, once there is one.
    """

    def __init__(
        self, runtime: Runtime, consistency: Consistency, cache: DecisionCache
    ) -> None:
        self.cache = cache
        self.cluster: Cluster | None = None
        self.answer: Answer | None = None
        self._runtime, self._consistency = runtime, consistency

    def decided(self, decision: Decision) -> None:
        """Print a decision, and save it."""
        if self._runtime.rank:
            return
        saves = self.cluster is not None or decision.recalled
        path = str(self.cache.path) if saves and self.cache.path is not None else ""
        answer = (
            self.answer if decision.planned else None
        )  # Otherwise the answer belongs to an earlier decision.
        lines = describe_decision(
            decision, self._consistency, answer, self.cluster, path
        )
        self._print(lines)
        if decision.recalled or self.cluster is None:
            return
        try:
            self.cache.save(decision, self.cluster, "\n".join(lines))
        except UsageError as error:
            self.report(f"auto: the decision is not saved: {error}")

    def report(self, sentence: str) -> None:
        """Print a sentence."""
        if self._runtime.rank == 0:
            self._print([sentence])

    def _print(self, lines: Sequence[str]) -> None:
        note = "; ".join(" ".join(line.split()) for line in lines)
        self._runtime.recorder.add_note(note)
        text = "\n".join(lines)
        print(f"paceline {text}", file=sys.stderr, flush=True)


def describe_decision(
    decision: Decision,
    consistency: Consistency,
    answer: Answer | None = None,
    cluster: Cluster | None = None,
    file: str = "",
) -> list[str]:
    """Return a decision as text: a headline, and a line for each fact behind it."""
    facts = [("measured", _measured(decision, cluster))]
    if decision.chosen != decision.before:
        facts.insert(0, ("method", summary_line(decision.chosen)))
    if answer is not None:
        facts.append(("predicted", _predicted(answer, consistency)))
    facts += [("tried", _tried(trial)) for trial in decision.trials]
    facts += [
        (
            "postponed",
            f"{spec}: predicted {show_seconds(seconds)}; a trial costs too much of so few steps",
        )
        for spec, seconds in decision.postponed
    ]
    if answer is not None and answer.next is not None:
        facts.append(("also", _next(answer)))
    if file:
        facts.append(("saved", file))
    if decision.recalled:
        facts = [("saved", f"{file}; the network is the same")]
    lines = [f"  {name:<11}{fact}" for name, fact in facts if fact]
    return [f"auto: {_headline(decision, answer)}", *lines]


def _headline(decision: Decision, answer: Answer | None) -> str:
    step = f"{show_seconds(decision.step_seconds)} per step"
    if decision.recalled:
        return f"uses {decision.chosen}, as decided in an earlier run: {step}"
    if decision.chosen != decision.before:
        before = next(
            (one.before_seconds for one in decision.trials if one.better), 0.0
        )
        change = f"{show_seconds(before)} -> {step}" if before else step
        return f"switched from {decision.before} to {decision.chosen}: {change}"
    stays = f"stays with {decision.chosen}: {step}"
    if decision.postponed or decision.trials:
        return stays
    if answer is None:
        return f"{stays}; no other method has anything to gain"
    if answer.fault:
        return stays
    return f"{stays}; no candidate is predicted to be clearly faster"


def _measured(decision: Decision, cluster: Cluster | None) -> str:
    facts = []
    if decision.exposed >= 0:
        share = f"{100 * decision.exposed:.0f} %"
        facts.append(f"{share} of a {decision.before} step is exposed communication")
    if cluster is not None:
        facts.append(f"network: {cluster.describe()}")
    return "; ".join(facts)


def _predicted(answer: Answer, consistency: Consistency) -> str:
    if answer.fault:
        return f"nothing: {answer.fault}"
    text = f"{answer.candidates} candidates ({consistency}); lower bound {show_seconds(answer.lower_bound)}"
    if answer.present is not None:
        text += f"; {answer.present.spec} {show_seconds(answer.present.seconds)}"
    return text


def _tried(trial: TrialResult) -> str:
    times = f"predicted {show_seconds(trial.predicted)}"
    if trial.seconds:
        times += (
            f", measured {show_seconds(trial.seconds)} ({trial.before} "
            f"{show_seconds(trial.before_seconds)})"
        )
    return f"{trial.spec}: {times}: {trial.why}"


def _next(answer: Answer) -> str:
    assert answer.next is not None
    seconds = answer.next.seconds
    best = min(
        [one for one in (*answer.best, answer.present) if one is not None],
        key=lambda one: one.seconds,
        default=answer.next,
    )
    ratio = best.seconds / seconds if seconds else 1.0
    gain = "no faster"
    if ratio > 1.005:
        gain = f"{best.spec} {show_seconds(best.seconds)} ({ratio:.2f}x)"
    return (
        f"auto:consistency={answer.next.consistency} could use {answer.next.spec}: predicted "
        f"{show_seconds(seconds)}, {gain}"
    )
