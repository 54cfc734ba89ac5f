"""What a decision was made by: plain data, equal on all ranks but for what rank 0 alone knows."""

from __future__ import annotations

import msgspec

from paceline.interfaces import Consistency


class Tried(msgspec.Struct, kw_only=True):
    """A candidate that took turns with what ran *before*: *predicted* and measured *seconds* of a
    step, and those of what ran (0: it was never measured), and *why* it is used, or not."""

    spec: str
    before: str
    predicted: float
    seconds: float
    before_seconds: float
    better: bool
    why: str


class Found(msgspec.Struct, kw_only=True):
    """*before*: what was trained with. *usual*: seconds of a step of what was *chosen*, *waited*: the
    share of it that waited for the network, before (below 0: not known). *recalled*: it was
    decided when the same was trained before. *later*: specs, with predicted seconds, whose trials are put
    off."""

    before: str = ""
    chosen: str = ""
    usual: float = 0.0
    waited: float = -1.0
    recalled: bool = False
    tried: list[Tried] = []
    later: list[tuple[str, float]] = []


class Question(msgspec.Struct, kw_only=True, frozen=True):
    """What the planner's process is asked. *cluster*: TOML; *workload*: its fields; *optimizer*: the
    class, as ``MODULE:NAME``, and its hyperparameters. *refused*: methods that this training cannot be
    trained with, and why. *epoch_steps*: of its sampler; 0: it has none."""

    cluster: str
    workload: dict[str, object]
    consistency: Consistency
    present: str
    budget_seconds: float
    optimizer: str = ""
    hyperparameters: dict[str, object] = {}
    refused: dict[str, str] = {}
    epoch_steps: int = 0


class Predicted(msgspec.Struct, kw_only=True, frozen=True):
    """A candidate, and what a step with it is predicted to take."""

    spec: str
    consistency: Consistency
    seconds: float


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    """What it says: what is worth trying, the best first; what runs; the best of the *next*
    class, which was not allowed; the physical *limit* of an exact mean, and *one_machine* alone. *fault*:
    why nothing could be predicted."""

    best: tuple[Predicted, ...] = ()
    present: Predicted | None = None
    next: Predicted | None = None
    candidates: int = 0
    limit: float = 0.0
    one_machine: float = 0.0
    fault: str = ""
