"""What must hold when a job has ended, whatever happened to it. Each check returns its violations."""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Callable, Iterator

import torch

from paceline.runtimes import temporary_folder
from tests.chaos.cases import (
    HARMLESS,
    RAY,
    STEPS,
    applies_each_gradient_once,
    final_model,
)
from tests.chaos.served_job import LATE
from tests.chaos.trial import Trial

ROUNDING = 1e-3
"""Means of three gradients have no exact sum."""


def nothing_is_left(trial: Trial) -> Iterator[str]:
    """No file in the temporary folder."""
    temporary = trial.job.temporary
    if trial.has("launcher", "KILL"):
        # A killed launcher cannot remove its folder: the next one does.
        tempfile.tempdir = str(temporary)
        temporary_folder.remove_left()
        tempfile.tempdir = None
    if left := [str(path.relative_to(temporary)) for path in temporary.rglob("*")]:
        yield f"left: {left[:5]}"


def status_tells_the_end(trial: Trial) -> Iterator[str]:
    """Status 0 if and only if the training is complete; a job that was only stopped for a while completes."""
    status = trial.job.status
    if status == 0 and None in trial.results():
        yield "status 0, though not every worker has a result"
    if status != 0 and all(fault.kind in HARMLESS for fault in trial.landed):
        yield f"status {status}, though nothing was ended"


def survives(trial: Trial) -> Iterator[str]:
    """Under ``--survive`` up to two deaths do not end a job, except that of its launcher."""
    few = (
        len(trial.landed) < 3 and not trial.has("launcher") and not trial.has("stdout")
    )
    if trial.case.launcher == RAY and trial.has("service"):
        # Without a snapshot: it may be on a node that the server's new one does not reach.
        few &= (trial.folder / "disk" / "snapshot").exists()
    few &= LATE not in trial.job.stderr
    if trial.case.survive and few and trial.job.status != 0:
        yield f"status {trial.job.status}: it did not survive"


def error_names_the_process(trial: Trial) -> Iterator[str]:
    """A job that ends badly says which process was at fault."""
    status, printed = trial.job.status, trial.job.stderr
    # The signal itself has ended the launcher, perhaps before it could handle any.
    silent = trial.has("launcher") and status is not None and status < 0
    # As `paceline run | head` does.
    silent |= trial.has("stdout") and status == 128 + signal.SIGPIPE
    # On Ray the launcher is the user's own program.
    if trial.case.launcher == RAY:
        silent |= trial.has("launcher") or trial.has("stdout")
    if status == 0 or silent:
        return
    if not NAMES_A_PROCESS.search(printed):
        yield f"status {status}, and no sentence names the process at fault"
    if (rank := _only_victim(trial)) is not None and not re.search(
        rf"(rank|worker) *:? *{rank}\b", printed
    ):
        yield f"status {status}, and no sentence names worker {rank}, which was killed"


NAMES_A_PROCESS = re.compile(
    r"^paceline: .*(rank \d|worker \d|server|SIG[A-Z]+|aggregator|launcher|the process that holds)"
    r"|^process manager: a server"
    r"|Root Cause|Process \d+ got signal"  # these are torchrun's
    r"|Too many open files|No space left on device"  # nobody else is at fault
    r"|Failed to init uv loop",  # torchrun's, without descriptors
    re.MULTILINE,
)


def _only_victim(trial: Trial) -> int | None:
    """The worker whose death was the only fault."""
    if len(trial.landed) != 1:
        return None
    fault = trial.landed[0]
    known = fault.kind == "KILL" and fault.anchor != "start"
    if not known or not fault.target.startswith("worker"):
        return None
    return int(fault.target.removeprefix("worker "))


def replicas_are_equal(trial: Trial) -> Iterator[str]:
    """After `finish` all workers hold one model."""
    results = _models(trial)
    if any(not torch.equal(results[0], other) for other in results[1:]):
        yield f"replicas differ: {results}"


def each_gradient_counts_once(trial: Trial) -> Iterator[str]:
    """The model counts each worker's steps, exactly where no process died."""
    case, models = trial.case, _models(trial)
    if models and applies_each_gradient_once(case):
        counts = -models[0][:, : case.workers]
        if case.survive:
            yield from _counts_after_deaths(trial, counts)
        elif bool((counts != STEPS).any()):
            yield f"each worker did {STEPS} steps, and by block and worker these count: {counts.tolist()}"


def no_number_changes(trial: Trial) -> Iterator[str]:
    """A job without deaths, or one that went on from a checkpoint, ends with the simulator's model, bit by bit."""
    models = [] if trial.case.survive else _models(trial)
    expected = final_model(trial.case) if models else None
    if expected is not None and not torch.equal(models[0], expected):
        yield f"the simulator's model is {expected}, this one {models[0]}"


def _counts_after_deaths(trial: Trial, counts: torch.Tensor) -> Iterator[str]:
    """Bounds of the counts under ``--survive``.

    A process that died may have sent one gradient that it has not noted. A server that died may have lost the
    gradients since its snapshot. A mean over fewer workers counts each gradient for more, and all together for n.
    """
    case = trial.case
    processes = [trial.incarnations(rank) for rank in range(case.workers)]
    steps = [set().union(*each) for each in processes]
    done = torch.tensor([len(each) for each in steps])
    outside_means = [sum(step >= case.mean_steps for step in each) for each in steps]
    unnoted = [len(each) - 1 for each in processes]
    most = torch.tensor(outside_means) + torch.tensor(unnoted)
    told = f"workers noted {done.tolist()} steps in {len(unnoted) + sum(unnoted)} processes, and these count: {counts.tolist()}"
    if case.mean_steps == 0 and bool((counts > most).any()):
        yield f"a gradient counts twice: {told}"
    if bool(
        (counts.sum(1) > most.sum() + case.mean_steps * case.workers + ROUNDING).any()
    ):
        yield f"too much counts: {told}"
    may_lose = trial.has("service") or trial.has("launcher")
    if not may_lose and bool((counts < done - ROUNDING).any()):
        yield f"a gradient is lost: {told}"


def _models(trial: Trial) -> list[torch.Tensor]:
    """The results of a job that has ended well."""
    if trial.job.status != 0:
        return []
    return [result for result in trial.results() if result is not None]


INVARIANTS: tuple[Callable[[Trial], Iterator[str]], ...] = (
    nothing_is_left,
    status_tells_the_end,
    survives,
    error_names_the_process,
    replicas_are_equal,
    each_gradient_counts_once,
    no_number_changes,
)


def violations(trial: Trial) -> list[str]:
    """All that does not hold of a job that has ended."""
    return [violation for check in INVARIANTS for violation in check(trial)]
