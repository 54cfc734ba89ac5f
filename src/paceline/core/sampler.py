"""`Sampler`: each worker's share of every batch, in proportion to its speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Sized
from typing import Any, Literal

import torch

from paceline.errors import UsageError
from paceline.interfaces import current_runtime


class Sampler(torch.utils.data.Sampler[list[int]]):
    """A batch sampler that gives each worker its share of every batch, in proportion to its speed.

    Give it to `distribute(..., sampler=sampler)`: gradients are then weighted by samples, and a
    step equals that of one process on the union of the workers' batches (for a loss that is a
    mean over samples). All workers take the same number of steps in an epoch. Where shares are not
    whole numbers of samples, the remaining samples go to the workers that are furthest behind their
    shares.

    `set_epoch` chooses the shuffle, as in torch's DistributedSampler, and under *rotate* also each
    worker's part of the data. If the script does not call `set_epoch`, each pass over the sampler
    is a new epoch. `paceline.save` and `load` keep the epoch for the sampler given to `distribute`.
    After a load the interrupted pass is not continued: all workers begin the epoch after the saved
    one, from its first batch.

    Example:
        ::

            paceline.init()
            sampler = paceline.Sampler(dataset, batch_size=256, shares="speed")
            loader = DataLoader(dataset, batch_sampler=sampler)
            optimizer = paceline.distribute(model, optimizer, sampler=sampler)
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        shares: Sequence[float] | Literal["speed"] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rotate: bool = False,
    ) -> None:
        """Cut the data set into batches, and each batch into a part for each worker.

        Args:
            dataset: Only its length counts.
            batch_size: Samples of a batch, of all workers together.
            shares: One positive number per worker, of any scale. ``"speed"``: the speeds of the
                cluster file. None: equal shares.
            shuffle: Shuffle the samples anew in each epoch.
            seed: Seed of the shuffle, the same on all workers.
            drop_last: Leave out a last batch with fewer samples. One with fewer samples than workers
                is left out in any case.
            rotate: Give each worker another part of every batch in each pass, for methods under which
                workers run at their own pace. In its pass p worker i gets part number (i + k p) mod
                n, where k and n have no common divisor. So in n passes each worker sees all the
                data once. Excludes *shares*.

        Raises:
            UsageError: `init` was not called, *shares* do not fit the job, or a batch has fewer
                samples than there are workers.
        """
        runtime = current_runtime()
        if runtime is None:
            raise UsageError("call paceline.init() before making a Sampler")
        workers = runtime.size
        if not workers <= batch_size <= len(dataset):
            raise UsageError(
                f"batch_size: expected {workers} (one sample per worker) to "
                f"{len(dataset)} (the data set), got {batch_size}"
            )
        if rotate and shares is not None:
            raise UsageError(
                "rotate=True with shares: parts of batches rotate, so each worker would get "
                "all workers' shares in turn. Leave one of the two out (if no worker waits "
                "for slow ones, equal parts cost no time)"
            )
        if shares == "speed":
            if runtime.cluster is None:
                raise UsageError(
                    'shares="speed": this runtime does not know its workers\' speeds; give '
                    "a list of numbers, one per worker"
                )
            shares = runtime.cluster.speeds
        self.batch_size = batch_size
        self.rank = runtime.rank
        self._shares = _normalized(shares, workers)
        self._size = len(dataset)
        self._shuffle = shuffle
        self._seed = seed
        self._rotates = rotate
        self._part = self.rank
        """The part of each batch that this worker gets in the present pass."""
        self._epoch = -1
        self._epoch_is_chosen = False
        self.passes = 0
        sizes = [batch_size] * (self._size // batch_size)
        rest = self._size % batch_size
        if rest >= workers and not drop_last:
            sizes.append(rest)
        self._sizes = sizes
        self._counts = _cut(sizes, self._shares)

    def __len__(self) -> int:
        """Return the number of batches in an epoch: the same on every worker."""
        return len(self._sizes)

    @property
    def mean_samples(self) -> float:
        """A worker's samples in a full batch if all shares were equal."""
        return self.batch_size / len(self._shares)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the following passes.

        Args:
            epoch: The same on all workers.
        """
        self._epoch = epoch
        self._epoch_is_chosen = True

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch of the last pass, and whether `set_epoch` chose it."""
        return {"epoch": self._epoch, "chosen": self._epoch_is_chosen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the pass that `state_dict` told of: on any number of workers.

        Args:
            state_dict: What `state_dict` returned.
        """
        self._epoch = state_dict["epoch"]
        self._epoch_is_chosen = state_dict["chosen"]

    def weight(self, batch: int) -> float:
        """Return this worker's part of the samples of batch number *batch* of the present pass."""
        return self._counts[batch][self._part] / self._sizes[batch]

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this worker's samples, batch by batch."""
        if not self._epoch_is_chosen:
            self._epoch += 1
        self.passes += 1
        part, shuffle, workers = self.rank, self._epoch, len(self._shares)
        if self._rotates:
            shuffle = self._epoch // workers
            part = (part + _stride(workers) * self._epoch) % workers
        self._part = part
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + shuffle)
            order = torch.randperm(self._size, generator=generator).tolist()
        else:
            order = list(range(self._size))
        position = 0
        for size, counts in zip(self._sizes, self._counts, strict=True):
            start = position + sum(counts[:part])
            yield order[start : start + counts[part]]
            position += size


def _normalized(shares: Sequence[float] | None, workers: int) -> list[float]:
    if shares is None:
        return [1 / workers] * workers
    if len(shares) != workers:
        raise UsageError(
            f"shares: expected {workers} numbers, one per worker, got {len(shares)}"
        )
    for share in shares:
        if not (share > 0 and math.isfinite(share)):
            raise UsageError(f"shares: expected numbers above zero, got {share}")
    total = math.fsum(shares)
    return [share / total for share in shares]


def _stride(workers: int) -> int:
    """Return the distance from a worker's part to its part in the next pass.

    It reaches all parts. Near the golden section, the parts of a few neighbours in a few passes are
    already spread over the batch.
    """
    golden = (math.sqrt(5) - 1) / 2 * workers
    coprime = (k for k in range(1, workers + 1) if math.gcd(k, workers) == 1)
    return min(coprime, key=lambda k: abs(k - golden))


def _cut(sizes: Sequence[int], shares: Sequence[float]) -> list[list[int]]:
    """Return the number of samples of each batch for each worker.

    It is at least one, and over many batches it follows the worker's share.
    """
    given = [0] * len(shares)
    total = 0
    result = []
    for size in sizes:
        total += size
        counts = [max(1, math.floor(share * size)) for share in shares]
        # How far each worker is behind its share, including this batch's samples so far.
        behind = [
            share * total - done - count
            for share, done, count in zip(shares, given, counts, strict=True)
        ]
        while sum(counts) != size:
            step = 1 if sum(counts) < size else -1
            candidates = [w for w in range(len(shares)) if step > 0 or counts[w] > 1]
            worker = max(candidates, key=lambda w: (step * behind[w], -w))
            counts[worker] += step
            behind[worker] -= step
        given = [done + count for done, count in zip(given, counts, strict=True)]
        result.append(counts)
    return result
