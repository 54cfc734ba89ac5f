"""What one worker's training does under ``method="auto"``: `Program`, joined to it.

After each step the program goes on by one step, and may name the spec to go on with. Whatever it finds is
said by rank 0, in one paragraph, and kept in a file.
"""

from __future__ import annotations

import sys
from typing import ClassVar

import torch

from paceline.collectives.communicator import Communicator
from paceline.core.settings import Settings
from paceline.core.training import Training
from paceline.core.training_setup import TrainingInputs
from paceline.tools.auto.agreement import Exchange
from paceline.tools.auto.config import FIRST, Auto
from paceline.tools.auto.controller import Program
from paceline.tools.auto.decision import Found
from paceline.tools.auto.decision_text import paragraph
from paceline.tools.auto.measurements import Forbid, TrainingSenses
from paceline.tools.auto.method_switching import Auto as Changing


def changing(wish: Auto, settings: Settings) -> Changing:
    """What `distribute` begins: a training that goes on as *wish* says. *settings* are those that
    the user gave."""
    return Changing(
        lambda inputs: Course(inputs, wish, settings),
        begins=FIRST,
        consistency=wish.consistency,
    )


class Course:
    """See `paceline.tools.auto.method_switching.Course`. Made on all workers at once: collective."""

    meets: ClassVar[bool] = True

    def __init__(self, inputs: TrainingInputs, wish: Auto, settings: Settings) -> None:
        self._runtime, self._wish = inputs.runtime, wish
        whole = Communicator(inputs.runtime, f"auto {inputs.number}")
        self._comm = whole.channel("course")
        device = torch.device("cpu")
        if not self._comm.moves_host_tensors:
            device = inputs.parameters[0][1].device
        self._exchange = Exchange(self._comm, device)
        self._whole = whole
        self.senses = TrainingSenses(
            inputs, wish, settings, self._comm, device, self._say
        )
        self.program = Program(
            self.senses, self._exchange, FIRST, self._decided, self._say
        )
        self._run = self.program.run()
        self._runtime.recorder.decides(True)

    def after_step(self, step: int) -> str | None:
        """A step has ended: the spec to go on with, the same on all workers; None: as before."""
        self.senses.step_ended()
        wanted = next(self._run)
        self._runtime.recorder.decides(not self.program.is_settled)
        if wanted is not None:
            self.senses.refused = ""
            self._before, self.senses.present = self.senses.present, wanted
        return wanted

    def begin(self, training: Training, forbid: Forbid) -> None:
        """Its first training has begun; *forbid* tells why a method cannot be begun."""
        self.senses.begin(training, forbid)

    def refused(self, spec: str, why: str) -> None:
        """What it has asked for cannot be begun, on any worker."""
        self.senses.refused, self.senses.present = why, self._before

    def leave(self) -> None:
        """This worker is out of data: all learn it, and nothing changes any more."""
        self._exchange.leave()

    def close(self, *, well: bool) -> None:
        """The training is over on all workers, or (not *well*) broken."""
        self.senses.close()
        if well:
            self._exchange.close()
            self._whole.close()

    def _decided(self, found: Found) -> None:
        planned = self.senses.planned
        text = paragraph(
            found,
            self._wish.consistency,
            planned.answer,
            planned.cluster,
            self.senses.file,
        )
        self._say(text)
        if not found.recalled:
            self.senses.keep(found, text)

    def _say(self, sentence: str) -> None:
        if self._runtime.rank == 0:
            self._runtime.recorder.add_note(sentence)
            print(f"paceline: {sentence}", file=sys.stderr, flush=True)
