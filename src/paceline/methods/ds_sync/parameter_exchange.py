"""What a worker shares with its group in each step, on its way there and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from paceline.errors import UsageError
from paceline.interfaces import Comm, Pending, Run
from paceline.interfaces.buckets import stamps
from paceline.methods.flat_tensors import Flat


class Parcel:
    """One `Flat` buffer over tensors with these *names*. It is *due* from when it is sent
    until its mean is put, or dropped."""

    def __init__(self, flat: Flat, names: Sequence[str]) -> None:
        self.flat, self._names = flat, list(names)
        self.due = False
        self._pending: Pending | None = None
        self._stamps: list[int] = []
        """Of the tensors when they were sent; none where they were loaded."""

    def send(self, run: Run, group: Comm) -> None:
        """Send what the tensors hold now."""
        self._take()
        self.due = True
        self.stamp()
        self._pending = run.average(self.flat.buffer, among=group)

    def follow(self, work: Callable[[], None]) -> None:
        """Call *work* when the mean is in."""
        if self._pending is not None:
            self._pending = self._pending.then(work)

    def wait(self) -> None:
        """Return when the mean is in the buffer."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def put(self) -> None:
        """Put the mean into the tensors, if one is due."""
        if self.due:
            self.wait()
            self.due = False
            self._give()

    def drop(self) -> None:
        """The tensors hold something new, for which the mean is not."""
        self.wait()
        self.due = False

    def stamp(self) -> None:
        """Whatever was written so far is no mistake."""
        self._stamps = stamps(self.flat.of)

    def _take(self) -> None:
        self.flat.take()

    def _give(self) -> None:
        now = stamps(self.flat.of)
        for name, here, then in zip(self._names, now, self._stamps, strict=False):
            if here != then:
                raise UsageError(
                    f"{name!r} was written to since step(), while its mean was on its way: "
                    "what was written would be lost. Change parameters under "
                    "ds-sync:overlap=none, or load them (load_state_dict)"
                )
        self.flat.put()

    # ---- restarts ----

    def _kept(self) -> Mapping[str, torch.Tensor]:
        """What a mean that is due consists of."""
        return dict(zip(self._names, self.flat.views, strict=True))

    def save(self) -> dict[str, torch.Tensor]:
        """The mean that is due; nothing where none is."""
        self.wait()
        return dict(self._kept()) if self.due else {}

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `save` of all parcels gave together."""
        kept = self._kept()
        self._stamps = []
        self.due = all(name in saved for name in kept)
        if self.due:
            for name, tensor in kept.items():
                tensor.copy_(saved[name])


class BufferParcel(Parcel):
    """Buffers of the model, which a forward pass may write to while their mean is on its way:
    what they have changed by is added to it."""

    def __init__(self, flat: Flat, names: Sequence[str]) -> None:
        super().__init__(flat, names)
        self._sent = torch.zeros_like(flat.buffer)

    def _take(self) -> None:
        super()._take()
        self._sent.copy_(self.flat.buffer)

    def _give(self) -> None:
        mean = self.flat.buffer.clone()
        self.flat.take()
        now, sent = self.flat.buffer, self._sent
        now.copy_(torch.where(now == sent, mean, mean + (now - sent)))
        self.flat.put()

    def _kept(self) -> Mapping[str, torch.Tensor]:
        return {**super()._kept(), f"{self._names[0]} and others, sent": self._sent}
