"""Local SGD: every worker steps by itself, and parameters are averaged after each fourth step."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import (
    Clips,
    GradientSeen,
    MethodSummary,
    Rounds,
    Run,
    UpdatesOn,
)


@dataclass(frozen=True, kw_only=True)
class EveryFourth:
    """Average the parameters after each fourth step."""

    name: ClassVar[str] = "every-fourth"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="every worker, in every fourth step",
        sends="the parameters",
        guarantees="equal models after every fourth step, and after the last one",
    )
    rounds: ClassVar[Rounds] = Rounds(every=4)
    updates_on: ClassVar[UpdatesOn] = "worker"
    visible_gradient: ClassVar[GradientSeen] = "local"
    clips: ClassVar[Clips] = "own"

    def start(self, run: Run) -> "EveryFourthWorker":
        return EveryFourthWorker(run)


class EveryFourthWorker:
    """One worker. It keeps nothing: the models themselves differ."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def after_update(self) -> None:
        if self.run.is_round:
            parameters = self.run.parameters
            for pending in [self.run.average(parameter) for parameter in parameters]:
                pending.wait()

    def finish(self) -> None:
        source = self.run.participate_until_all_finish()
        if source is not None:
            self.run.broadcast_model(source)
