"""Loads and other writes into a model whose parameters servers hold.

Hooks notice ``load_state_dict`` of the model or the optimizer. It takes effect for all workers when
all active workers have called it: each waits for the others at its next forward pass with
gradients, or in `paceline.load`. A restarted worker runs its script from the start, and would load
an old state. So its loads before its first step are ignored.

Any other write into parameters between steps is refused: the next reply of a server would overwrite it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from paceline.core.context import TrainingContext
from paceline.core.method_hooks import MethodHooks
from paceline.errors import UsageError
from paceline.parameter_server.client.remote_model import RemoteModel
from paceline.torch_internals import Uncopied

IGNORED = (
    "paceline: worker {rank} was restarted while the job continued: what its script loads "
    "before its first step is ignored, and it continues with the servers' parameters"
)


class LoadTracker:
    """Notices the script's loads into one worker's model and optimizer.

    *remote* gives access to the parameters on their servers. *hooks* are the method's.
    """

    def __init__(
        self, context: TrainingContext, remote: RemoteModel, hooks: MethodHooks
    ) -> None:
        self._context, self._remote, self._hooks = context, remote, hooks
        self._method = context.method.name
        self._model_is_new = False
        self._state: dict[torch.Tensor, dict[str, Any]] | None = None
        self._has_trained = False
        self._handles = [
            module.register_load_state_dict_post_hook(Uncopied(self._noticed))
            for module in context.model.modules()
        ]

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def is_due(self) -> bool:
        """Whether the script has loaded state that has not reached all workers."""
        return self._model_is_new or self._state is not None

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]] | None:
        """The optimizer state that was loaded, and is not on the servers yet."""
        return self._state

    def take_state(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Note an optimizer state that the script has loaded."""
        self._state = state

    def before_step(self) -> None:
        """Begin a step: all workers continue from loaded state.

        Raises `UsageError` if the script has written into parameters in another way.
        """
        if self.is_due:
            self.complete()
        else:
            self._remote.partition.check_unwritten(self._method)
        self._has_trained = True

    def before_update(self) -> None:
        """Raise `UsageError` if the script has loaded or written parameters since the step began.

        Gradients of the former parameters were already sent.
        """
        if self.is_due:
            raise UsageError(
                "load_state_dict between forward and step(): the gradients of the former "
                "parameters were already sent. Load after step()"
            )
        self._remote.partition.check_unwritten(self._method)

    def complete(self, whole: bool = False) -> bool:
        """Give all workers the loaded state. Collective over the active workers.

        *whole*: the whole state of model and optimizer. Returns whether it was used.
        """
        state, self._state = self._state, None
        new, self._model_is_new = self._model_is_new or whole, False
        if self.is_late_joiner:
            print(
                IGNORED.format(rank=self._context.comm.rank),
                file=sys.stderr,
                flush=True,
            )
            self._remote.synchronizer.restore()
        else:
            self._remote.synchronizer.load(state, untrained=new)
        self._hooks.call("parameters_replaced")
        return not self.is_late_joiner

    @property
    def is_late_joiner(self) -> bool:
        """Whether this worker was restarted while the job continued, and has not trained since."""
        return self._remote.synchronizer.is_late_joiner and not self._has_trained

    def _noticed(self, *_: object) -> None:
        if not self._context.evaluating:
            self._model_is_new = True
