"""Loads and other writes into a model whose parameters servers hold.

``load_state_dict``, of the model or of the optimizer, is noticed. It takes effect for all workers when
all active workers have called it: each waits for the others at its next forward pass with gradients, or
before, in `paceline.load`. A restarted worker runs its script from the top, and would load a state that
the job has long left behind: its loads before its first step are ignored.

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
    "paceline: worker {rank} was started again and has joined a job that goes on: what its "
    "script loads before its first step is not used, and it trains on with the servers' "
    "parameters"
)


class LoadTracker:
    """Notices what the script loads into one worker's model and optimizer.

    *remote* has the parameters on their servers. *hooks* are the method's.
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
        """Take the hooks out of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def is_due(self) -> bool:
        """Whether the script has loaded state that has not reached all workers."""
        return self._model_is_new or self._state is not None

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]] | None:
        """The optimizer's, where it was loaded, and is not on the servers yet."""
        return self._state

    def take_state(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """The script has loaded the optimizer's state."""
        self._state = state

    def before_step(self) -> None:
        """A step begins: all go on from what was loaded. Raises `UsageError` where the
        script has written into parameters otherwise."""
        if self.is_due:
            self.complete()
        else:
            self._remote.partition.check_unwritten(self._method)
        self._has_trained = True

    def before_update(self) -> None:
        """Raise `UsageError` where the script has loaded or written since the step began:
        what it computed with is on its way."""
        if self.is_due:
            raise UsageError(
                "load_state_dict between forward and step(): the gradients of what was "
                "there before are on their way; load after step()"
            )
        self._remote.partition.check_unwritten(self._method)

    def complete(self, whole: bool = False) -> bool:
        """Give all workers the loaded state, or the state of model and optimizer as a *whole*; return whether it
        was used. Collective over the active workers.
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
        """Whether this worker has come back to a job that goes on, and has not trained since."""
        return self._remote.synchronizer.is_late_joiner and not self._has_trained

    def _noticed(self, *_: object) -> None:
        if not self._context.evaluating:
            self._model_is_new = True
