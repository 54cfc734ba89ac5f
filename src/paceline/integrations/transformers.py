"""Transformers: ``attach(Trainer(...), method="osp")``, for any `Trainer`, TRL's too.

It works on the instance, so subclasses keep their own optimizers, losses and loaders.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from paceline.integrations.common import require

# The parts of Trainer that attach changes exist since 5.3.
require("transformers", "5.3", "6")

from transformers import Trainer  # noqa: E402

from paceline.core.optimizer import DistributedOptimizer, training_of  # noqa: E402
from paceline.errors import UsageError  # noqa: E402
from paceline.integrations.accelerate import check_same_workers, hand_over  # noqa: E402
from paceline.integrations.common import (  # noqa: E402
    asks_for_fsdp,
    check_chosen,
    check_plain,
    shows_mean,
)

T = TypeVar("T", bound=Trainer)
_ATTACHED = "_attached_by_paceline"


def attach(trainer: T, method: str | None = None, **settings: Any) -> T:
    """Let paceline train *trainer*'s model; returns *trainer*.

    *method* and *settings* are arguments of `distribute`. If ``.grad`` holds the mean, the trainer clips it as
    usual. Otherwise gradients have been sent before the trainer could clip: ``max_grad_norm`` becomes
    ``clip_norm``, and the logged norm is that of ``.grad``. Evaluation and checkpoints see the method's
    documented result. Trainer's checkpoints do not contain a method's own state (error feedback, rounds).

    Raises:
        UsageError: The model is sharded, the trainer was attached before or has trained, or a setting is
            unknown.
    """
    if not isinstance(trainer, Trainer):
        raise UsageError(
            f"attach(trainer): expected a transformers.Trainer, got {type(trainer).__name__}"
        )
    _check_attachable(trainer)
    check_plain(trainer.model, trainer.optimizer, "attach(trainer)")
    chosen = check_chosen({"method": method, **settings})
    norm = trainer.args.max_grad_norm
    if norm and settings.get("clip_norm") is not None:
        raise UsageError(
            f"clip_norm={settings['clip_norm']} and max_grad_norm={norm}: leave one of "
            "them out (TrainingArguments(max_grad_norm=0) clips nothing)"
        )
    check_same_workers(trainer.accelerator)
    if not shows_mean(method):
        trainer._clip_grad_norm = trainer._get_grad_norm = _norm
        if norm:
            chosen["clip_norm"] = norm
    attached = vars(trainer)[_ATTACHED] = _Attached(trainer, chosen)
    trainer.create_optimizer = attached.create_optimizer(trainer.create_optimizer)
    accelerator = trainer.accelerator
    accelerator.prepare_model = _unwrapped(accelerator.prepare_model)
    for name in ("evaluate", "predict", "_save_checkpoint", "save_model"):
        setattr(trainer, name, attached.looks(getattr(trainer, name)))
    trainer._maybe_log_save_evaluate = attached.looks_once(
        trainer._maybe_log_save_evaluate
    )
    trainer._finalize_training = attached.ends(trainer._finalize_training)
    return trainer


class _Attached:
    """Replacements of a trainer's methods; *settings* are for `distribute`."""

    def __init__(self, trainer: Trainer, settings: dict[str, Any]) -> None:
        self._trainer, self._settings = trainer, settings
        self._optimizer: DistributedOptimizer | None = None

    def create_optimizer(self, create: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(create)
        def created(*arguments: Any, **named: Any) -> DistributedOptimizer:
            if self._optimizer is None:
                optimizer = create(*arguments, **named)
                self._optimizer = hand_over(
                    self._trainer.model, optimizer, self._settings
                )
            elif training_of(self._optimizer).finished:
                raise UsageError(
                    "train() again: the workers have parted when the first training "
                    "ended; make a new Trainer of the model, and attach to that"
                )
            self._trainer.optimizer = self._optimizer
            return self._optimizer

        return created

    def looks(self, look: Callable[..., Any]) -> Callable[..., Any]:
        """Call *look* with the method's documented result in the model. Collective."""

        @wraps(look)
        def looked(*arguments: Any, **named: Any) -> Any:
            if self._optimizer is None:
                return look(*arguments, **named)
            with self._optimizer.consolidated():
                return look(*arguments, **named)

        return looked

    def looks_once(self, look: Callable[..., Any]) -> Callable[..., Any]:
        """Let *look* evaluate and then save one and the same result. If workers do not wait for each other, two
        results differ, and the best metric would not belong to the saved weights. Collective if either is
        due."""
        looked = self.looks(look)

        @wraps(look)
        def looked_where_due(*arguments: Any, **named: Any) -> Any:
            control = self._trainer.control
            due = control.should_evaluate or control.should_save
            return (looked if due else look)(*arguments, **named)

        return looked_where_due

    def ends(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """End together with all workers, before the best checkpoint is loaded into the model."""

        @wraps(finalize)
        def ended(*arguments: Any, **named: Any) -> Any:
            if self._optimizer is not None:
                self._optimizer.finish()
            return finalize(*arguments, **named)

        return ended


def _check_attachable(trainer: Trainer) -> None:
    if _ATTACHED in vars(trainer):
        raise UsageError("attach: this trainer was attached before; once is enough")
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if sharded or asks_for_fsdp():
        raise UsageError(
            "attach: the trainer shards its model (FSDP, DeepSpeed), and paceline averages "
            "gradients of whole models that every worker holds; leave fsdp= and deepspeed= "
            "out of TrainingArguments"
        )
    if isinstance(trainer.optimizer, DistributedOptimizer):
        raise UsageError(
            "attach: the trainer was given an optimizer that distribute has made; give it "
            "the plain one, attach calls distribute"
        )


def _unwrapped(prepare_model: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(prepare_model)
    def prepared(model: Any, device_placement: Any = None, **_: Any) -> Any:
        return prepare_model(model, device_placement, evaluation_mode=True)

    return prepared


def _norm(model: torch.nn.Module, grad_norm: Any = None) -> Any:
    """Return the norm for the log only: `distribute` clips."""
    if grad_norm is not None:
        return grad_norm
    return torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    )
