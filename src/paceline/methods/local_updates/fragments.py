"""State of local updates: fragments of the model with their anchors, and the inner optimizer's state.

An anchor is the model from which all workers began a round. The outer optimizer steps on it.
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
    """The samples that this worker has trained on since an average was formed."""

    begins: int = 0
    """The first step after the average."""
    weight: float = 0.0
    """Of the samples of these steps; one step of an even share counts as 1."""

    def share(self, step: int) -> float:
        """Return the weight in an average after *step*: 1 for an even share in all its steps."""
        return self.weight / (step + 1 - self.begins)

    def begin(self, step: int) -> None:
        """Start again: an average was formed of what there was before *step*."""
        self.begins, self.weight = step, 0.0

    def save(self, step: int) -> list[float]:
        """Return the state for a restart before *step*."""
        return [step - self.begins, self.weight]

    @classmethod
    def load(cls, step: int, saved: Sequence[float]) -> TrainedSince:
        """Return what `save` has kept, before *step*."""
        ago, weight = saved
        return cls(step - int(ago), weight)


class Fragment:
    """A part of the model that is averaged by itself.

    Attributes:
        model: Its parameters and buffers, as messages.
        parameters: In the model's order.
        anchors: The parameters from which the round began, a message for each of the model's; or
            none. In float32 where the parameters have half of its bits.
        averaged: The statistics that belong to the anchor.
        outer: The optimizer that steps on the anchors, if there are any.
        since: The samples since the fragment's last average.
        rounds: The averages that were sent.
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
        """Begin anew from the present model, without outer momentum."""
        for flat in (*self.anchors, *self.averaged):
            flat.gather_in()
        self.drop_momentum()

    def put_anchor(self) -> None:
        """Put the anchor, and its statistics, into the model."""
        for flat in (*self.anchors, *self.averaged):
            flat.scatter_out()

    def is_at_anchor(self) -> bool:
        """Return whether the model is the anchor, rounded to the parameters' type."""
        return all(
            torch.equal(tensor, value.to(tensor.dtype))
            for flat in self.anchors
            for tensor, value in zip(flat.tensors, flat.views, strict=True)
        )

    def subtract_from_anchor(self, index: int) -> None:
        """Replace the parameters x_i in a message by their change: D_i = x - x_i."""
        flat, anchor = self.model.parameters[index], self.anchors[index].buffer
        # Workers began from the anchor in the parameters' own type.
        began = anchor.to(flat.of[0].dtype).to(anchor.dtype)
        flat.buffer.neg_().add_(began)

    def outer_step(self, rates: Sequence[float] | None) -> None:
        """Step on the anchor with the mean change D, which is in the messages, as gradient.

        Args:
            rates: The inner learning rate of each parameter, in the model's order: the outer
                momentum is in units of it. A parameter with rate 0 has no such unit: it takes the
                plain mean, and its momentum stays.
        """
        assert self.outer is not None, "there are anchors"
        for value, change in zip(self._values, self._changes, strict=True):
            value.grad = change
        if rates is not None:
            groups = self.outer.param_groups  # one for each parameter
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
        """Step to the mean: x <- x - D, and drop the momentum.

        The momentum of many steps must not follow a round of few.
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
        """Return the state for a restart before *step*; tensors are in the model's order."""
        return {
            "anchors": by_parameter(self._run, self.anchors),
            "outer": self.outer.state_dict()["state"] if self.outer else {},
            "averaged": [flat.buffer for flat in self.averaged],
            "since": self.since.save(step),
            "rounds": self.rounds,
        }

    def load(self, step: int, saved: dict[str, Any]) -> None:
        """Go on from what `save` gave. Options are those of now."""
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
    """An average under way.

    Attributes:
        fragment: The number of its fragment.
        due: It is applied after this step.
        weights: Becomes the mean of the workers' weights, and of how many still train.
        pending: The messages under way.
        moments: Messages of the inner optimizer's state, where that is averaged, too.
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
    """Cut the model into fragments. One alone has the messages of the planned buckets."""
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
    """Deal parameters to fragments of about one size: the largest fragment is a link's peak.

    The largest parameter goes first, to the smallest fragment. So neighbours of one size are in
    different fragments, as in the paper's strided ones.
    """
    count = options.fragments
    if count > len(parameters):
        raise UsageError(
            f"{options.name}:fragments={count}: the model has {len(parameters)} parameters, "
            "and a fragment has one at least"
        )
    sizes = [0] * count
    members: list[list[int]] = [[] for _ in range(count)]
    order = sorted(range(len(parameters)), key=lambda i: -wire_bytes(parameters[i]))
    for index in order:
        least = min(range(count), key=lambda n: (sizes[n], n))
        sizes[least] += wire_bytes(parameters[index])
        members[least].append(index)
    return [[parameters[i] for i in sorted(own)] for own in members]


# ---- in the order in which checkpoints keep tensors ----


def by_parameter(run: Run, flats: Sequence[FlatTensors]) -> list[torch.Tensor]:
    """Return the messages' parts of each parameter, in the model's order.

    A restart may send parameters in other buckets.
    """
    number = {id(parameter): i for i, parameter in enumerate(run.parameters)}
    found = [
        (number[id(parameter)], view)
        for flat in flats
        for parameter, view in zip(flat.of, flat.views, strict=True)
    ]
    return [view for _, view in sorted(found, key=lambda entry: entry[0])]


def message_tensors(run: Run, model: ModelAverager) -> list[torch.Tensor]:
    """Return the contents of a model's messages: by parameter, and then all others."""
    rest = [flat.buffer for flat in (*model.statistics, *model.counters)]
    return by_parameter(run, model.parameters) + rest


def copy_into(own: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> None:
    """Copy saved tensors into their places."""
    for tensor, value in zip(own, saved, strict=True):
        tensor.copy_(value)


# ---- the inner optimizer's state, where workers average it ----

MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""The names under which torch's optimizers keep their moments.

The moments themselves are averaged, never the root of the second: that is Local Adam's mean.
Counters of steps stay each worker's own.
"""


def optimizer_state_names(optimizer: torch.optim.Optimizer) -> dict[int, list[str]]:
    """Return the names of each parameter's moments, by the parameter's identity.

    All workers get the same names, also one that has not trained yet: a copy of the optimizer
    steps on a parameter of one element.

    Raises:
        UsageError: Where the copy cannot step.
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
                f"state=average: {type(optimizer).__name__} cannot be tried on a single "
                f"small parameter, which shows what it keeps ({error}); use state=local"
            ) from error
        state = trial.state[like]
        names = [name for name in MOMENTS if isinstance(state.get(name), torch.Tensor)]
        for parameter in group["params"]:
            found[id(parameter)] = names
    return found


def require_moments(options: Options, run: Run) -> None:
    """Raise `UsageError` where the optimizer keeps nothing that could be averaged."""
    assert run.optimizer is not None, "workers update"
    if not any(optimizer_state_names(run.optimizer).values()):
        raise UsageError(
            f"{options.name}:state=average: {type(run.optimizer).__name__} keeps none of "
            f"{', '.join(MOMENTS)} of its parameters, so there is nothing to average: take "
            "an optimizer with momentum, or state=local"
        )


def flatten_moments(model: ModelAverager, run: Run) -> list[FlatTensors]:
    """Make messages of the moments of a model's parameters; zeros where none was trained yet."""
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
    """Return the inner optimizer's present learning rate of each parameter.

    1 for a parameter that the optimizer does not have: it does not move.
    """
    assert run.optimizer is not None, "workers update"
    rates = {
        id(tensor): float(group["lr"])
        for group in run.optimizer.param_groups
        for tensor in group["params"]
    }
    return [rates.get(id(tensor), 1.0) for tensor in parameters]
