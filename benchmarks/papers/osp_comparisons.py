"""What OSP is compared with: other orders of importance, and other tentative steps.

Each is a method object for ``collective=native``, to give to `paceline.distribute`: only the
worker that decides ranks tensors, and only workers take tentative steps, so that no server
has to know of it.
"""

import torch

from paceline import spec
from paceline.methods.osp import OSP
from paceline.methods.osp.options import Importance, LocalStep

PREDICTED = 0.9
"""How much of the mean of mean gradients stays from one step to the next."""


class Inverse(Importance):
    """The most important first."""

    def order(self, count, seed):
        return sorted(range(count), key=lambda one: (-self.values.get(one, 0.0), one))


class Random(Importance):
    """An order drawn anew for each decision."""

    def order(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(count, generator=generator).tolist()


class PlainStep(LocalStep):
    """The learning rate times the own gradient, without momentum: another reading of LGP."""

    def values(self, updater, pieces, own, hyperparameters):
        values = []
        for piece, value, gradient in zip(
            pieces, updater.values(pieces), own, strict=True
        ):
            group = hyperparameters[updater.group_of(piece)]
            rate = -group["lr"] if group.get("maximize") else group["lr"]
            values.append(value - gradient.view_as(value) * rate)
        return values


class AverageStep(LocalStep):
    """The optimizer's step with the mean of the own gradient and of an average of past mean
    gradients."""

    def __init__(self):
        self.predicted = {}

    def values(self, updater, pieces, own, hyperparameters):
        known = [self.predicted.get(piece) for piece in pieces]
        guesses = [
            gradient if mean is None else (gradient + mean) / 2
            for gradient, mean in zip(own, known, strict=True)
        ]
        return super().values(updater, pieces, guesses, hyperparameters)

    def arrived(self, pieces, means):
        for piece, mean in zip(pieces, means, strict=True):
            if piece in self.predicted:
                self.predicted[piece].lerp_(mean, 1 - PREDICTED)
            else:
                self.predicted[piece] = mean.clone()


class InverseOSP(OSP):
    importance_class = Inverse


class RandomOSP(OSP):
    importance_class = Random


class PlainOSP(OSP):
    correction_class = PlainStep


class AverageOSP(OSP):
    correction_class = AverageStep


KINDS = {
    "inverse": InverseOSP,
    "random": RandomOSP,
    "plain": PlainOSP,
    "average": AverageOSP,
}


def compared(kind, text):
    """OSP of the spec *text*, with what *kind* names instead of its own."""
    values = spec.parse(text).values
    return KINDS[kind](**spec.convert_fields(OSP, values))
