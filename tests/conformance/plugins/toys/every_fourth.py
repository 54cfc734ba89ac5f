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

    def init(self, run: Run) -> None:
        """Nothing is kept: the models themselves differ."""

    def after_update(self, state: None, run: Run) -> None:
        if run.meets:
            for pending in [run.average(parameter) for parameter in run.parameters]:
                pending.wait()

    def finish(self, state: None, run: Run) -> None:
        source = run.participate_until_all_finish()
        if source is not None:
            run.broadcast_model(source)
