"""Each worker's share of a loader's samples, where a trainer does not see to it."""

from __future__ import annotations

import os

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)


def dealt(loader: object, workers: int, rank: int) -> object:
    """A loader like *loader* with the samples of worker *rank*, as Lightning makes it:
    shuffled where it was, padded to equal shares. What has a sampler of its own, or is no plain `DataLoader`, is
    given back as it is.
    """
    if type(loader) is not DataLoader or loader.batch_size is None:
        return loader
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return loader
    sampler: DistributedSampler[object] = DistributedSampler(
        loader.dataset,
        num_replicas=workers,
        rank=rank,
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=0,  # workers share this process
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
    )
