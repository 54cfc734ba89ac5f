"""A training's compression on one worker alone, without a training."""

from types import SimpleNamespace

from paceline.core.averages import DonePending
from paceline.core.compressed_average import CompressedAverage
from paceline.core.context import ActiveWorkers
from paceline.core.settings import Settings
from paceline.core.step_listeners import StepListeners


class OneWorker:
    """As much of a `Comm` as compression needs, among one worker."""

    rank, size = 0, 1

    def all_reduce(self, buffer, operation):
        return DonePending()

    def all_gather(self, everyone, own):
        everyone.copy_(own)
        return DonePending()

    all_to_all = all_gather


def compressed_average(compressor, rank=0):
    """What a worker of *rank* compresses averages with."""
    context = SimpleNamespace(
        settings=Settings(compression=compressor),
        comm=SimpleNamespace(rank=rank, size=1),
        workers=ActiveWorkers(1, 1.0),
        listeners=StepListeners(),
    )
    return CompressedAverage(context)
