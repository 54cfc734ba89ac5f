"""Predicts methods in a separate process while a training runs: both sides of that process.

A simulation needs a process for itself, so a worker cannot predict. The process has low priority. It reads
a `Question` from an open file and prints an `Answer`; failures are an `Answer`, too. It always ends with its
worker: the worker holds the other end of its standard input, an empty pipe that closes when the worker ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING

import msgspec

from paceline.errors import PacelineError
from paceline.interfaces import CONSISTENCIES, Consistency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.tools.plan.estimates import Estimate, Plan
    from paceline.tools.plan.predict import MakeOptimizer, TrainingJob

MODULE = "paceline.tools.auto"
NICE = 19
PATIENCE, LEAST_PATIENCE = 30.0, 120.0
"""Patience: a multiple of the time that its simulated events take on one core, and the least seconds. A process
of low priority on a busy machine may take that long."""
TRIALS = 2
"""Candidates that are tried."""
ALIKE = 1.02
"""If the predictions of two candidates differ by less, the one with the stronger consistency comes first."""
_NOT_INHERITED = (
    *("PACELINE_", "TORCHELASTIC_", "PET_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_"),
    *("RANK", "WORLD_SIZE", "OMPI_", "PMI_", "SLURM_"),
)
"""Environment variables that would make the process a worker."""


class Question(msgspec.Struct, kw_only=True, frozen=True):
    """A question to the planner process.

    Attributes:
        cluster: The network, TOML.
        workload: The fields of a `Workload`.
        consistency: The weakest consistency that is allowed.
        present: The spec of the present method.
        max_events: Simulated events after which the search stops.
        optimizer: The class's name in `torch.optim`; empty: not one of torch's.
        hyperparameters: Its arguments.
        refused: Methods that cannot train this model or script, and why.
        epoch_steps: Steps in an epoch of the sampler; 0: without a sampler.
    """

    cluster: str
    workload: dict[str, object]
    consistency: Consistency
    present: str
    max_events: int
    optimizer: str = ""
    hyperparameters: dict[str, object] = {}
    refused: dict[str, str] = {}
    epoch_steps: int = 0


class Predicted(msgspec.Struct, kw_only=True, frozen=True):
    """A method, and its predicted seconds of a step."""

    spec: str
    consistency: Consistency
    seconds: float


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    """The planner process's answer.

    Attributes:
        best: Candidates worth trying, the best first.
        present: The present method.
        next: The best method of the next weaker consistency, which was not allowed.
        candidates: How many were predicted.
        lower_bound: Seconds of the shortest step of any exact method.
        fault: Why nothing could be predicted.
    """

    best: tuple[Predicted, ...] = ()
    present: Predicted | None = None
    next: Predicted | None = None
    candidates: int = 0
    lower_bound: float = 0.0
    fault: str = ""


# ---- in the worker ----


class PlannerProcess:
    """A question in progress. Raises nothing: `answer` reports failures."""

    def __init__(
        self, question: Question, environment: Mapping[str, str] = os.environ
    ) -> None:
        from paceline.tools.plan.predictor import EVENTS_PER_SECOND

        seconds = question.max_events / EVENTS_PER_SECOND
        patience = max(LEAST_PATIENCE, PATIENCE * seconds)
        self._deadline = time.monotonic() + patience
        # Files instead of pipes: a pipe blocks the process unless the worker reads it.
        self._errors, self._output, asked = _file(), _file(), _file()
        self._fault = ""
        self._process: subprocess.Popen[bytes] | None = None
        variables = {
            name: value
            for name, value in environment.items()
            if not name.startswith(_NOT_INHERITED)
        }
        variables["OMP_NUM_THREADS"] = "1"
        try:
            asked.write(msgspec.json.encode(question))
            asked.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(asked.fileno())],
                pass_fds=[asked.fileno()],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._errors,
                env=variables,
            )
        except OSError as error:
            self._fault = f"it cannot be started: {error}"
        finally:
            asked.close()

    @property
    def is_over(self) -> bool:
        """Whether the answer is available."""
        if self._process is None or self._fault:
            return True
        if self._process.poll() is not None:
            return True
        if time.monotonic() > self._deadline:
            self._fault = "it has taken too long"
            self._process.kill()
            return True
        return False

    def wait(self) -> None:
        """Wait for the answer, however long it takes.

        In virtual time the step at which it is used must not depend on this machine's speed.
        """
        if self._process is not None:
            self._process.wait()

    def answer(self) -> Answer:
        """Return the answer, once `is_over` is true."""
        status = None if self._process is None else self._process.poll()
        output, errors = _content(self._output), _content(self._errors)
        self.end()
        if not self._fault and status == 0:
            try:
                return msgspec.json.decode(output, type=Answer)
            except msgspec.MsgspecError as error:
                self._fault = f"its answer is none: {error}"
        lines = errors.decode(errors="replace").strip().splitlines()
        last = lines[-1][:300] if lines else "without a word"
        return Answer(fault=self._fault or f"it ended with status {status}: {last}")

    def end(self) -> None:
        """End the process if it still runs."""
        self._output.close()
        self._errors.close()
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.kill()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        process.wait()


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


# ---- in the planner process, which imports torch and the simulator ----


def main() -> None:
    """Answer the question in the file whose descriptor is the first argument."""
    import torch

    with contextlib.suppress(OSError):
        os.nice(NICE)
    torch.set_num_threads(1)
    with open(int(sys.argv[1]), "rb") as asked:
        question = msgspec.json.decode(asked.read(), type=Question)
    threading.Thread(target=_end_with_worker, daemon=True).start()
    output = os.dup(1)
    os.dup2(2, 1)  # Other output must not mix with the answer.
    try:
        result = answer(question)
    except PacelineError as error:
        result = Answer(fault=str(error))
    except Exception as error:  # The training must continue after any failure.
        traceback.print_exc()
        result = Answer(fault=f"{type(error).__name__}: {error}")
    with open(output, "wb") as stream:
        stream.write(msgspec.json.encode(result))
    sys.stdout.flush()
    os._exit(0)  # A thread still reads standard input.


def _end_with_worker() -> None:
    """Wait for the end of standard input, which is closed when the worker ends."""
    while os.read(0, 1):
        pass
    os._exit(1)


def answer(question: Question) -> Answer:
    """Make a plan from a training's measurements."""
    from paceline.cluster import Workload, parse_cluster
    from paceline.tools.plan.predict import TrainingJob
    from paceline.tools.plan.search import plan

    cluster = parse_cluster(question.cluster)
    workload = msgspec.convert(question.workload, Workload)
    allowed = CONSISTENCIES[: CONSISTENCIES.index(question.consistency) + 1]
    following = CONSISTENCIES[len(allowed) : -1][:1]
    optimizer = optimizer_like(question)
    made = plan(
        cluster,
        workload,
        allowed=(*allowed, *following),
        max_events=question.max_events,
        optimizer=optimizer,
        refused=question.refused,
        epoch_steps=question.epoch_steps,
    )
    job = TrainingJob(
        cluster=cluster,
        workload=workload,
        optimizer=optimizer,
        epoch_steps=question.epoch_steps,
    )
    present = predict_present(made, question.present, job)
    recommended = made.recommended
    return Answer(
        best=tuple(map(_predicted, worth_trying(made, allowed, present))),
        present=present,
        next=_predicted(recommended[following[0]])
        if set(following) & set(recommended)
        else None,
        candidates=len(made.estimates),
        lower_bound=made.baseline.lower_bound_seconds,
    )


def predict_present(made: Plan, spec: str, job: TrainingJob) -> Predicted | None:
    """Predict the present method: from the plan, or by a prediction of its own; None if it cannot run."""
    from paceline.tools.plan.estimates import Estimate
    from paceline.tools.plan.predict import predict

    planned = made.estimate(spec)
    if planned is not None and planned.fidelity == "full":
        return _predicted(planned)
    found = predict(job, spec)
    return _predicted(found) if isinstance(found, Estimate) else None


def worth_trying(
    made: Plan, allowed: Sequence[Consistency], present: Predicted | None
) -> list[Estimate]:
    """Return the best allowed methods that are predicted to be clearly faster than the present one.

    They differ in more than the bucket rule. Of lossy, local and asynchronous methods only the
    recommended ones are returned.
    """
    from paceline.bucketing.tuner import WORTH_IT
    from paceline.tools.plan.estimates import LOSSLESS

    most = float("inf") if present is None else WORTH_IT * present.seconds
    recommended, fastest = made.recommended, made.fastest
    usable = [
        one
        for one in made.estimates
        if one.consistency in allowed
        # A short run counts only if its consistency has no full run.
        and one.rejected <= fastest[one.consistency].rejected
        and one.step_seconds < most
        and (one.consistency in LOSSLESS or one == recommended.get(one.consistency))
    ]
    chosen: list[Estimate] = []
    while usable and len(chosen) < TRIALS:
        least = min(one.step_seconds for one in usable)
        near = [one for one in usable if one.step_seconds <= ALIKE * least]
        first = min(near, key=lambda one: CONSISTENCIES.index(one.consistency))
        chosen.append(first)
        usable = [one for one in usable if _kind(one.spec) != _kind(first.spec)]
    return chosen


def _kind(text: str) -> tuple[str, ...]:
    from paceline.spec import parse

    spec = parse(text)
    values_of_keys = (spec.values.get(key, "") for key in ("collective", "compression"))
    return spec.name, *values_of_keys


def _predicted(found: Estimate) -> Predicted:
    return Predicted(
        spec=found.spec, consistency=found.consistency, seconds=found.step_seconds
    )


def optimizer_like(question: Question) -> MakeOptimizer:
    """Return a factory of the training's optimizer class if it is torch's own; else of plain SGD."""
    from functools import partial

    import torch

    from paceline.tools.plan.predict import plain_sgd

    cls = getattr(torch.optim, question.optimizer, None)
    if cls is None:
        return plain_sgd
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in question.hyperparameters.items()
    }
    make: MakeOptimizer = partial(cls, **values)
    try:
        make([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError, RuntimeError):
        return plain_sgd
    return make
