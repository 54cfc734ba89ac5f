"""The kit itself: methods that break one law each must be caught."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from paceline.errors import CollectiveMismatchError, WorkerFailedError
from paceline.methods.bsp import BSP
from paceline.testing import Case, CheckFailedError, check_method


@dataclass(frozen=True, kw_only=True)
class NeverAgrees:
    """Sends nothing: every worker trains alone."""

    name: ClassVar[str] = "never-agrees"
    updates_on: ClassVar[str] = "worker"
    gradient_seen_by_user: ClassVar[str] = "local-kept"

    def init(self, run):
        return None


@dataclass(frozen=True, kw_only=True)
class SumsInsteadOfMean(BSP):
    """Sums gradients; right for one worker only."""

    def backward_ended(self, state, run):
        super().backward_ended(state, run)
        for bucket in run.buckets:
            bucket.buffer.mul_(run.comm.size)


@dataclass(frozen=True, kw_only=True)
class LeavesTheOthersAlone(BSP):
    """A worker out of data just goes."""

    def finish(self, state, run):
        pass


@dataclass(frozen=True, kw_only=True)
class EvaluationLeaks(BSP):
    """What undoes a consolidation leaves the model changed."""

    def consolidate(self, state, run):
        def undo():
            with torch.no_grad():
                run.buckets[0].parameters[0].add_(0.01)

        return undo


@dataclass(frozen=True, kw_only=True)
class AlsoScalesAlone(BSP):
    """Changes the gradient of a single worker."""

    def backward_ended(self, state, run):
        super().backward_ended(state, run)
        for bucket in run.buckets:
            bucket.buffer.mul_(1.0 + 1e-6)


@pytest.mark.parametrize(
    ("method", "law"),
    [
        (NeverAgrees(), "from the optimum"),
        (SumsInsteadOfMean(), "from the optimum"),
        (EvaluationLeaks(), "evaluations in between change the result"),
        (AlsoScalesAlone(), "one worker differs from the reference"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_broken_law_is_caught(method, law):
    with pytest.raises(WorkerFailedError) as caught:
        check_method(Case(method=method), workers=(1, 3))
    assert isinstance(caught.value.__cause__, CheckFailedError)
    assert law in str(caught.value.__cause__)


def test_a_worker_that_leaves_is_an_error_and_not_a_hang():
    with pytest.raises(CollectiveMismatchError, match="worker 0 called all_gather"):
        check_method(Case(method=LeavesTheOthersAlone()), workers=(2,))
