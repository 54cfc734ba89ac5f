"""State of local-update methods: the model's fragments, their anchors, and the optimizer's moments.

An anchor is the copy of the parameters from which all workers began a round. The outer optimizer
updates it.

- `Fragment`: a part of the model that is averaged on its own, with its anchor and outer optimizer.
- `TrainedSince`: counts a worker's samples, which are its weight in the next average.
- `PendingAverage`: an average that is in flight.
- `by_parameter`, `message_tensors`, `copy_into`: the order of tensors in checkpoints.
- `optimizer_state_names`, `flatten_moments`: averaging of the inner optimizer's state.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Pending, Run
from paceline.interfaces.buckets import by_kind, stand_alike, wire_bytes
from paceline.methods.local_updates.options import Options
from paceline.methods.model_averaging import FlatTensors, ModelAverager, widen_half


@dataclass
class TrainedSince:
    """Counts the samples that this worker has trained on since the last average.

    Attributes:
        begins: The first step after the last average.
        weight: The samples of these steps, in units of an even share of the global batch.
    """

    begins: int = 0
    weight: float = 0.0

    def share(self, step: int) -> float:
        """Return this worker's weight in an average after a step.

        Args:
            step: The last step that the average covers.

        Returns:
            The mean weight of the steps since the last average: 1 for an even share in every step.
        """
        return self.weight / (step + 1 - self.begins)

    def begin(self, step: int) -> None:
        """Restart the count: the average covers all steps before *step*."""
        self.begins, self.weight = step, 0.0

    def save(self, step: int) -> list[float]:
        """Return the state for a restart before *step*."""
        return [step - self.begins, self.weight]

    @classmethod
    def load(cls, step: int, saved: Sequence[float]) -> TrainedSince:
        """Return the count that `save` returned, for a run that continues at *step*."""
        ago, weight = saved
        return cls(step - int(ago), weight)


class Fragment:
    """A part of the model that is averaged on its own, with its anchor and outer optimizer.

    Args:
        options: The method's options. They decide whether the fragment has an anchor.
        run: The training.
        parameters: The fragment's parameters, grouped by message.
        buffers: The model's buffers that are averaged with this fragment.

    Attributes:
        model: The fragment's parameters and buffers, as flat messages.
        parameters: The fragment's parameters, in the model's order.
        anchors: The parameters from which the round began: one message for each of the model's. The
            list is empty without an anchor. 16-bit parameters have anchors in float32.
        averaged: The buffers' statistics as last averaged, which belong to the anchor.
        outer: The optimizer that updates the anchors; None without anchors.
        since: The samples since the fragment's last average.
        rounds: The number of averages that were sent.
    """

    def __init__(
        self,
        options: Options,
        run: Run,
        parameters: Iterable[Sequence[torch.Tensor]],
        buffers: Iterable[torch.Tensor] = (),
    ) -> None:
        self._run = run
        self.model = ModelAverager(parameters, buffers)
        mine = {id(p) for flat in self.model.parameters for p in flat.of}
        self.parameters = [p for p in run.parameters if id(p) in mine]
        self.anchors: list[FlatTensors] = []
        self.averaged: list[FlatTensors] = []
        self.outer: torch.optim.Optimizer | None = None
        self.since, self.rounds = TrainedSince(), 0
        if options.keeps_anchor:
            self.anchors = [_like(flat) for flat in self.model.parameters]
            self.averaged = [_like(flat) for flat in self.model.statistics]
            self._values = by_parameter(run, self.anchors)
            self._changes = by_parameter(run, self.model.parameters)
            self.outer = options.outer_optimizer(self._values)
            self.take_anchor()

    def take_anchor(self) -> None:
        """Copy the current model into the anchor, and drop the outer momentum."""
        for flat in (*self.anchors, *self.averaged):
            flat.gather_in()
        self.drop_momentum()

    def put_anchor(self) -> None:
        """Copy the anchor and its statistics into the model."""
        for flat in (*self.anchors, *self.averaged):
            flat.scatter_out()

    def is_at_anchor(self) -> bool:
        """Return whether the parameters equal the anchor, rounded to the parameters' dtype."""
        return all(
            torch.equal(tensor, value.to(tensor.dtype))
            for flat in self.anchors
            for tensor, value in zip(flat.tensors, flat.views, strict=True)
        )

    def subtract_from_anchor(self, index: int) -> None:
        """Replace a message's parameters x_i by their change since the anchor: D_i = x - x_i.

        Args:
            index: The number of the message in `model.parameters`.
        """
        flat, anchor = self.model.parameters[index], self.anchors[index].buffer
        # Round the anchor as the parameters were rounded when the worker began from it.
        began = anchor.to(flat.of[0].dtype).to(anchor.dtype)
        flat.buffer.neg_().add_(began)

    def outer_step(self, rates: Sequence[float] | None) -> None:
        """Update the anchor by one outer step; the mean change D in the messages is its gradient.

        Args:
            rates: The inner learning rate of each parameter, in the model's order, as the unit of
                the outer momentum. A parameter with rate 0 moves by the plain mean, and its
                momentum stays. None: the momentum has no such unit.
        """
        assert self.outer is not None, "there are anchors"
        for value, change in zip(self._values, self._changes, strict=True):
            value.grad = change
        if rates is not None:
            # With `rescale`, each parameter has a parameter group of its own.
            groups = self.outer.param_groups
            rows = zip(self._values, self._changes, groups, rates, strict=True)
            for value, change, group, rate in rows:
                if rate:
                    change.div_(rate)
                    group["lr"] = self.outer.defaults["lr"] * rate
                else:
                    value.sub_(change)
                    value.grad = None
        self.outer.step()
        for value in self._values:
            value.grad = None

    def plain_step(self) -> None:
        """Move the anchor to the plain average, x <- x - D, and drop the outer momentum.

        The momentum comes from full rounds, so it would be too large for a round of fewer steps.
        """
        for flat, anchor in zip(self.model.parameters, self.anchors, strict=True):
            anchor.buffer.sub_(flat.buffer)
        self.drop_momentum()

    def drop_momentum(self) -> None:
        """Drop the outer optimizer's state."""
        if self.outer is not None:
            self.outer.state.clear()

    # ---- restarts ----

    def save(self, step: int) -> dict[str, Any]:
        """Return the state for a restart before *step*, with tensors in the model's order."""
        return {
            "anchors": by_parameter(self._run, self.anchors),
            "outer": self.outer.state_dict()["state"] if self.outer else {},
            "averaged": [flat.buffer for flat in self.averaged],
            "since": self.since.save(step),
            "rounds": self.rounds,
        }

    def load(self, step: int, saved: dict[str, Any]) -> None:
        """Continue from the state that `save` returned, with the current options.

        Args:
            step: The next step of the run.
            saved: The state from `save`.
        """
        copy_into(by_parameter(self._run, self.anchors), saved["anchors"])
        copy_into([flat.buffer for flat in self.averaged], saved["averaged"])
        if self.outer is not None:
            groups = self.outer.state_dict()["param_groups"]
            self.outer.load_state_dict(
                {"state": saved["outer"], "param_groups": groups}
            )
        self.since = TrainedSince.load(step, saved["since"])
        self.rounds = saved["rounds"]


def _like(flat: FlatTensors) -> FlatTensors:
    return FlatTensors(flat.of, flat.buffer.dtype)


@dataclass
class PendingAverage:
    """An average in flight.

    Attributes:
        fragment: The number of its fragment.
        due: The step after which the average is applied.
        weights: Two elements: this worker's weight, and 1 if it still trains. The average over
            workers replaces them.
        pending: The messages in flight.
        moments: Messages of the inner optimizer's state with ``state=average``, else empty.
        share: This worker's weight.
    """

    fragment: int
    due: int
    weights: torch.Tensor
    pending: list[Pending] = field(default_factory=list)
    moments: list[FlatTensors] = field(default_factory=list)
    share: float = 0.0

    def wait(self) -> None:
        for pending in self.pending:
            pending.wait()
        self.pending.clear()


def make_fragments(options: Options, run: Run) -> list[Fragment]:
    """Cut the model into fragments.

    Args:
        options: The method's options, with the number of fragments.
        run: The training.

    Returns:
        The fragments, in the order in which they are sent. A single fragment has one message for
        each bucket of the run.

    Raises:
        UsageError: The model has fewer parameters than fragments.
    """
    if options.fragments == 1:
        whole = [bucket.parameters for bucket in run.buckets]
        return [Fragment(options, run, whole, run.own_buffers)]
    return [
        # Buffers travel with the first fragment.
        Fragment(options, run, by_kind(share), () if number else run.own_buffers)
        for number, share in enumerate(deal_out(options, run.parameters))
    ]


def deal_out(
    options: Options, parameters: Sequence[torch.nn.Parameter]
) -> list[list[torch.nn.Parameter]]:
    """Distribute parameters over fragments of about equal size.

    The largest fragment sets the peak load of a link. Parameters are placed in order of falling
    size, each into the smallest fragment. So neighbours of equal size are in different fragments,
    as in the paper's strided fragments.

    Args:
        options: The method's options, with the number of fragments.
        parameters: The model's parameters.

    Returns:
        The parameters of each fragment, in the model's order.

    Raises:
        UsageError: There are fewer parameters than fragments.
    """
    count = options.fragments
    if count > len(parameters):
        raise UsageError(
            f"{options.name}:fragments={count}: expected at most one fragment for each parameter "
            f"tensor, and the model has {len(parameters)} parameters. Set fragments to that or less"
        )
    sizes = [0] * count
    members: list[list[int]] = [[] for _ in range(count)]
    order = sorted(range(len(parameters)), key=lambda i: -wire_bytes(parameters[i]))
    for index in order:
        least = min(range(count), key=lambda n: (sizes[n], n))
        sizes[least] += wire_bytes(parameters[index])
        members[least].append(index)
    return [[parameters[i] for i in sorted(own)] for own in members]


# ---- the order of tensors in checkpoints ----


def by_parameter(run: Run, flats: Sequence[FlatTensors]) -> list[torch.Tensor]:
    """Return each parameter's view into the messages, in the model's order.

    Checkpoints use this order because a restart may have other buckets.
    """
    number = {id(parameter): i for i, parameter in enumerate(run.parameters)}
    found = [
        (number[id(parameter)], view)
        for flat in flats
        for parameter, view in zip(flat.of, flat.views, strict=True)
    ]
    return [view for _, view in sorted(found, key=lambda entry: entry[0])]


def message_tensors(run: Run, model: ModelAverager) -> list[torch.Tensor]:
    """Return the tensors of a model's messages: one for each parameter, then statistics and counters."""
    rest = [flat.buffer for flat in (*model.statistics, *model.counters)]
    return by_parameter(run, model.parameters) + rest


def copy_into(own: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> None:
    """Copy each saved tensor into the tensor at the same position of *own*."""
    for tensor, value in zip(own, saved, strict=True):
        tensor.copy_(value)


# ---- averaging of the inner optimizer's state (state=average) ----

MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""The state keys under which torch's optimizers store their moments.

As in Local Adam, workers average the second moment itself, not its root. They do not average step
counters.
"""


def optimizer_state_names(optimizer: torch.optim.Optimizer) -> dict[int, list[str]]:
    """Return which moments an optimizer keeps for each parameter.

    A copy of the optimizer takes a step on a parameter of one element, and its state shows the
    moments. So all workers get the same names, even a worker that has not trained yet.

    Args:
        optimizer: The inner optimizer.

    Returns:
        The names out of `MOMENTS`, by the ``id`` of the parameter.

    Raises:
        UsageError: The copy cannot step on a single parameter.
    """
    found: dict[int, list[str]] = {}
    for group in filter(lambda group: group["params"], optimizer.param_groups):
        trial = copy.copy(optimizer)
        first = group["params"][0]
        like = torch.nn.Parameter(first.new_zeros((1,) * first.dim()))
        like.grad = torch.zeros_like(like)
        trial.state = defaultdict(dict)
        trial.param_groups = [{**group, "params": [like]}]
        try:
            trial.step()
        except Exception as error:
            raise UsageError(
                f"state=average: {type(optimizer).__name__} cannot be tried on one small "
                f"parameter to find its moments ({error}). Use state=local"
            ) from error
        state = trial.state[like]
        names = [name for name in MOMENTS if isinstance(state.get(name), torch.Tensor)]
        for parameter in group["params"]:
            found[id(parameter)] = names
    return found


def require_moments(options: Options, run: Run) -> None:
    """Raise `UsageError` if the run's optimizer keeps no moments that workers could average."""
    assert run.optimizer is not None, "workers update"
    if not any(optimizer_state_names(run.optimizer).values()):
        raise UsageError(
            f"{options.name}:state=average: {type(run.optimizer).__name__} keeps none of the moments "
            f"that workers can average ({', '.join(MOMENTS)}). Use an optimizer with momentum, or "
            "state=local"
        )


def flatten_moments(model: ModelAverager, run: Run) -> list[FlatTensors]:
    """Pack the moments of a model's parameters into messages.

    Args:
        model: The parameters.
        run: The training, with the inner optimizer.

    Returns:
        One message for each of the model's messages and each kind of moment in it. A parameter
        that was not trained yet has moments of zeros.
    """
    assert run.optimizer is not None, "workers update"
    names = optimizer_state_names(run.optimizer)
    known = {
        id(tensor): run.optimizer.state.get(tensor, {})
        for group in run.optimizer.param_groups
        for tensor in group["params"]
    }
    flats = []
    for flat in model.parameters:
        for name in MOMENTS:
            moments = [
                _moment(known[id(parameter)], name, parameter)
                for parameter in flat.of
                if name in names.get(id(parameter), ())
            ]
            if moments:
                flats.append(FlatTensors(moments, widen_half(moments[0].dtype)))
    return flats


def _moment(
    state: dict[str, torch.Tensor], name: str, parameter: torch.Tensor
) -> torch.Tensor:
    found = state.get(name)
    moment = torch.zeros_like(parameter) if found is None else found
    return stand_alike(moment.detach(), parameter)


def learning_rates(run: Run, parameters: Iterable[torch.Tensor]) -> list[float]:
    """Return the inner optimizer's current learning rate of each parameter.

    A parameter outside the optimizer has rate 1. It never moves, so the value has no effect.
    """
    assert run.optimizer is not None, "workers update"
    rates = {
        id(tensor): float(group["lr"])
        for group in run.optimizer.param_groups
        for tensor in group["params"]
    }
    return [rates.get(id(tensor), 1.0) for tensor in parameters]
