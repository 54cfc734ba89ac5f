"""Gradients, from their hooks into flat buckets, and these on in plan order.

A hook on every trainable parameter fires when its gradient is complete. The gradient is
copied into its place in a bucket, and ``.grad`` becomes that place (the next backward pass
then adds into it, with no copy at all). Buckets are delivered in plan order, on every
rank, whatever order autograd chose: collectives must match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.buckets import (
    Bucket,
    make_buckets,
    stand_for_the_same,
    strides_in_bucket,
    view_in_bucket,
)
from paceline.core.batch_weights import Weights
from paceline.errors import UsageError

Parameters = Sequence[tuple[str, torch.nn.Parameter]]


class Arrivals:
    """One worker's gradients of the backward pass under way.

    A gradient is multiplied by this worker's share while it is copied; *averages* says
    that buckets hold shares of a mean at all. *deliver* is given each bucket when its turn
    has come; *at_the_end*: none before the pass has ended. *refused* makes the error for
    what leaves ranks out of step.
    """

    def __init__(
        self,
        parameters: Parameters,
        weight: float,
        averages: bool,
        deliver: Callable[[Bucket], None],
        at_the_end: bool,
        refused: Callable[[str], Exception],
    ) -> None:
        self._parameters, self._averages = parameters, averages
        self._deliver, self._at_the_end, self._refused = deliver, at_the_end, refused
        self.share = weight if averages else 1.0
        self.buckets: list[Bucket] = []
        self.in_backward = False
        self._place: list[tuple[Bucket, int]] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._strides: list[tuple[int, ...]] = []
        """Of each parameter, when its bucket was made."""
        self._addresses: list[int] = []
        """Of each parameter's part of its bucket."""
        self._seen = [False] * len(parameters)
        self._left_out: set[int] = set()
        """What this pass was expected to have no gradient of."""
        self._next_bucket = 0

    def make_buckets(self, groups: Sequence[Sequence[int]]) -> None:
        """Buckets of *groups* of parameters, as indices; gradients move into them."""
        made_before = bool(self.buckets)
        self.buckets = make_buckets(self._parameters, groups)
        places = {
            id(parameter): (bucket, slot)
            for bucket in self.buckets
            for slot, parameter in enumerate(bucket.parameters)
        }
        self._place = [places[id(parameter)] for _, parameter in self._parameters]
        self._bucket_of = {key: bucket for key, (bucket, _) in places.items()}
        self._strides = [parameter.stride() for _, parameter in self._parameters]
        self._addresses = [b.views[slot].data_ptr() for b, slot in self._place]
        if not made_before:
            return
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                    parameter.grad = view

    def bucket_of(self, parameter: torch.Tensor) -> Bucket | None:
        """Where the gradient of a parameter is; None for one that is not trained."""
        return self._bucket_of.get(id(parameter))

    # ---- one backward pass ----

    @property
    def some_have_left(self) -> bool:
        """Whether a bucket of this pass was delivered."""
        return self._next_bucket > 0

    def begin(self) -> None:
        """A backward pass begins."""
        self._seen = [False] * len(self._parameters)
        self._left_out.clear()
        self._next_bucket = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def check_memory(self) -> None:
        """Gradients are about to come: see to it that they can go where buckets have a place
        for them. ``model.to(...)`` gives a parameter other strides, and what ``.grad`` is
        other memory. Raises an error for other strides, since other ranks would add up
        elements in another order."""
        now = [parameter.stride() for _, parameter in self._parameters]
        if now != self._strides:
            for (name, parameter), before in zip(
                self._parameters, self._strides, strict=True
            ):
                self._require_strides(name, parameter, before)
            self._strides = now
        addresses = [bucket.views[slot].data_ptr() for bucket, slot in self._place]
        if addresses != self._addresses:
            for index, (bucket, _) in enumerate(self._place):
                if addresses[index] != self._addresses[index]:
                    self._view_anew(bucket)

    def _require_strides(
        self, name: str, parameter: torch.Tensor, before: tuple[int, ...]
    ) -> None:
        was = torch.empty_strided(parameter.shape, before, device="meta")
        strides = strides_in_bucket(parameter), strides_in_bucket(was)
        rows = zip(*strides, parameter.shape, strict=True)
        if any(now != then and size > 1 for now, then, size in rows):
            raise self._refused(
                f"parameter {name!r} has strides {parameter.stride()} now, and had "
                f"{before} when distribute was called: gradients would be added up in "
                "another order than on other ranks. Change the memory format before "
                "distribute"
            )

    def _view_anew(self, bucket: Bucket) -> None:
        """Point the views of a bucket into its buffer again, with what they hold now."""
        sizes = [parameter.numel() for parameter in bucket.parameters]
        views = []
        for parameter, part, old in zip(
            bucket.parameters, bucket.buffer.split(sizes), bucket.views, strict=True
        ):
            view = view_in_bucket(part, parameter)
            stand_for_the_same(view, parameter)
            if view.data_ptr() != old.data_ptr():
                view.copy_(old)
            if parameter.grad is old:
                parameter.grad = view
            views.append(view)
        bucket.views = tuple(views)

    @property
    def all_came(self) -> bool:
        """Whether every tensor took part in this pass."""
        return all(self._seen) and not self._left_out

    def came(self) -> list[int]:
        """The parameters whose gradients are there."""
        left_out = self._left_out
        return [i for i, seen in enumerate(self._seen) if seen and i not in left_out]

    def leave_out(self, indices: Sequence[int]) -> None:
        """Of these parameters no gradient will come in this pass: buckets do not wait for
        them."""
        for index in indices:
            self._seen[index] = True
            self._fill(index)
            self._place[index][0].missing -= 1
        self._left_out.update(indices)
        if not self._at_the_end:
            self.deliver_complete()

    def take(self, index: int) -> None:
        """The gradient of one parameter is there."""
        if self._seen[index]:
            self._take_again(index)
            return
        self._seen[index] = True
        self._fill(index)
        bucket = self._place[index][0]
        bucket.missing -= 1
        if not bucket.missing and not self._at_the_end:
            self.deliver_complete()

    def _take_again(self, index: int) -> None:
        """A gradient comes that nothing waits for: well where it was left out, and its bucket
        has not left."""
        bucket, slot = self._place[index]
        is_open = bucket.index >= self._next_bucket and not bucket.used[slot]
        if index in self._left_out and is_open:
            self._left_out.discard(index)
            self._fill(index)
            return
        raise self._refused(
            f"the gradient of {self._parameters[index][0]!r} came twice in one backward "
            "pass, or is not in its graph, and came after its bucket may have been sent; "
            "under activation checkpointing use checkpoint(..., use_reentrant=False)"
        )

    def fill_rest(self) -> bool:
        """The pass is over: tensors that took no part are zero in their buckets. Returns
        whether all took part."""
        all_came = self.all_came
        for index in sorted(self._left_out):
            bucket, slot = self._place[index]
            set_otherwise = self._parameters[index][1].grad is not None
            if set_otherwise and not bucket.used[slot]:  # in a hook of the script's
                self._take_again(index)
        for index, seen in enumerate(self._seen):
            if not seen:
                self._fill(index)
                self._place[index][0].missing -= 1
        return all_came

    def deliver_complete(self) -> None:
        """Deliver what is complete, in plan order."""
        while self._next_bucket < len(self.buckets):
            bucket = self.buckets[self._next_bucket]
            if bucket.missing:
                return
            self._next_bucket += 1
            self._deliver(bucket)

    def deliver_nothing(self) -> None:
        """Deliver all buckets with zeros in them, as a worker without data."""
        for bucket in self.buckets:
            bucket.buffer.zero_()
            bucket.used[:] = [False] * len(bucket.used)
        for bucket in self.buckets:
            self._deliver(bucket)

    def _fill(self, index: int) -> None:
        """Put a gradient into its bucket, if it is not there already."""
        parameter = self._parameters[index][1]
        bucket, slot = self._place[index]
        view, gradient = bucket.views[slot], parameter.grad
        bucket.used[slot] = gradient is not None
        if gradient is None:
            view.zero_()
        elif gradient is view:
            if self.share != 1.0:
                view.mul_(self.share)
        else:
            if gradient.layout != torch.strided:
                raise self._refused(
                    f"the gradient of {self._parameters[index][0]!r} is sparse, and only "
                    "dense gradients can be averaged; build the embedding with "
                    "sparse=False"
                )
            if gradient.requires_grad:  # backward(create_graph=True)
                gradient = gradient.detach()
            if self.share == 1.0:
                view.copy_(gradient)
            else:
                torch.mul(gradient, self.share, out=view)
            parameter.grad = view

    # ---- what passes weigh ----

    def weigh_next(self, weights: Weights, delivered: bool) -> float:
        """This rank's share of the next mean is its share of the samples. What earlier
        passes under `no_sync` left was to be weighted by theirs. Returns this rank's weight."""
        weight = weights.next_share()
        share = weight if self._averages else 1.0
        if share != self.share:
            for _, parameter in self._parameters:
                if parameter.grad is not None and not delivered:
                    parameter.grad.mul_(self.share / share)
            self.share = share
        return weight

    def weigh_unannounced(self, weights: Weights, accumulated: bool) -> float:
        """No forward pass of the model has told that this pass would come: a submodule
        was called, or another method. Returns this rank's weight."""
        weight = weights.next_share()
        share = weight if self._averages else 1.0
        if share != self.share and accumulated:
            raise UsageError(
                f"this batch's share of the samples is {share:.4g} and that of what was "
                f"accumulated under no_sync is {self.share:.4g}; only a call of the model "
                "that was given to distribute tells in time that a batch begins, and its "
                "submodule, or another of its methods, was called instead. Call the model "
                "itself, or step after every batch"
            )
        self.share = share
        return weight

    # ---- means ----

    def show(self) -> None:
        """A tensor that only other ranks used has a gradient too; one that nobody used
        has none, else momentum and weight decay would move it."""
        for bucket in self.buckets:
            for parameter, view, used in zip(
                bucket.parameters, bucket.views, bucket.used, strict=True
            ):
                if not used:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = view

    def require_finite(self, step: int) -> None:
        """Raise an error that names the first gradient that is not finite."""
        for bucket in self.buckets:
            if torch.isfinite(bucket.buffer).all():
                continue
            for name, view in zip(bucket.names, bucket.views, strict=True):
                if not torch.isfinite(view).all():
                    raise self._refused(
                        f"the gradient of {name!r} is not finite in step {step}; lower "
                        "the learning rate, clip gradients, or use a GradScaler without "
                        "check_finite"
                    )
