"""Methods with a state of their own, and a compressor: some of them forget to save it."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression import BF16
from paceline.interfaces import Rounds
from paceline.methods.bsp import BSP, BSPWorker


@dataclass(frozen=True, kw_only=True)
class Forgetful(BSP):
    """Sends gradients in steps of 1/8, and keeps the rest of each for the next time."""

    name: ClassVar[str] = "forgetful"

    def start(self, run):
        return ForgetfulWorker(run, self)


class ForgetfulWorker(BSPWorker):
    def __init__(self, run, method):
        super().__init__(run, method)
        self.left = {}

    def bucket_ready(self, bucket):
        for name, view in zip(bucket.names, bucket.views, strict=True):
            whole = view + self.left.get(name, 0.0)
            view.copy_(torch.round(8 * whole) / 8)
            self.left[name] = whole - view
        super().bucket_ready(bucket)


@dataclass(frozen=True, kw_only=True)
class Remembers(Forgetful):
    name: ClassVar[str] = "remembers"

    def start(self, run):
        return RemembersWorker(run, self)


class RemembersWorker(ForgetfulWorker):
    def save_state(self):
        return {"left": dict(self.left)}

    def load_state(self, saved):
        self.left = saved["left"]


@dataclass(frozen=True, kw_only=True)
class ForgetsToLoad(Remembers):
    def start(self, run):
        return ForgetsToLoadWorker(run, self)


class ForgetsToLoadWorker(RemembersWorker):
    def load_state(self, saved):
        pass


@dataclass(frozen=True, kw_only=True)
class Shares(Remembers):
    def start(self, run):
        return SharesWorker(run, self)


class SharesWorker(RemembersWorker):
    def redistribute_state(self, parts):
        kept = [part["left"] for part in parts]
        names = {name for left in kept for name in left}
        sums = {name: sum(left.get(name, 0.0) for left in kept) for name in names}
        size = self.run.comm.size
        return {"left": {name: left / size for name, left in sums.items()}}


@dataclass(frozen=True, kw_only=True)
class Averages:
    """Averages parameters after every third step; its result is their average."""

    name: ClassVar[str] = "averages"
    updates_on: ClassVar[str] = "worker"
    visible_gradient: ClassVar[str] = "local"
    clips: ClassVar[str] = "own"
    rounds: ClassVar[Rounds] = Rounds(every=3)
    consolidates_together: ClassVar[bool] = True

    def start(self, run):
        return AveragesWorker(run)


class AveragesWorker:
    def __init__(self, run):
        self.run = run

    def after_update(self):
        if self.run.is_round:
            self._average()

    def _average(self):
        for parameter in self.run.parameters:
            self.run.average(parameter).wait()

    def consolidate(self):
        run = self.run
        own = [parameter.data.clone() for parameter in run.parameters]
        for parameter in run.parameters:
            parameter.data.div_(run.comm.size)
            run.comm.all_reduce(parameter.data, "sum").wait()

        def undo():
            for parameter, value in zip(run.parameters, own, strict=True):
                parameter.data.copy_(value)

        return undo

    def finish(self):
        source = self.run.participate_until_all_finish()
        if source is not None:
            self.run.broadcast_model(source)


@dataclass(frozen=True, kw_only=True)
class Pairs(Averages):
    """Averages over pairs of four workers, in turn other ones."""

    name: ClassVar[str] = "pairs"
    rounds: ClassVar[Rounds] = Rounds(groups=True)

    def start(self, run):
        return PairsWorker(run)


class PairsWorker(AveragesWorker):
    def _average(self):
        run = self.run
        other = run.comm.rank ^ (1 + run.step % 2)
        pair = run.comm.group(sorted([run.comm.rank, other]))
        for parameter in run.parameters:
            run.average(parameter, among=pair).wait()


@dataclass(frozen=True, kw_only=True)
class CountsRounds(Averages):
    """Every second average is the one that counts, and nobody saves which one is next."""

    def start(self, run):
        return CountsRoundsWorker(run)


class CountsRoundsWorker(AveragesWorker):
    rounds = 0

    def after_update(self):
        if self.run.is_round:
            self.rounds += 1
            if self.rounds % 2:
                self._average()


@dataclass(frozen=True, kw_only=True)
class Hides(BF16):
    """A code with residuals, which it keeps in itself, where no checkpoint finds them."""

    name: ClassVar[str] = "hides"

    def __post_init__(self):
        object.__setattr__(self, "hidden", {})

    def average(self, parts, states, workers, sent=None):
        shapes = tuple(part.shape for part in parts)
        left = self.hidden.setdefault(shapes, [torch.zeros_like(p) for p in parts])
        for part, rest in zip(parts, left, strict=True):
            rest.add_(part)
            part.copy_(rest)
        sent = [torch.empty_like(part) for part in parts]
        yield from super().average(parts, states, workers, sent)
        for rest, own in zip(left, sent, strict=True):
            rest.sub_(own)
