"""Extra process groups, and a store that other threads can use while one thread waits.

torch's store has one connection per process. A thread that waits for a key holds that connection,
so all other threads of the process wait, too. Another process may wait in the same way for a key
that one of them would set: a deadlock. gloo itself waits in the store for the addresses of a new
group's members. Two threads that each made a group were enough for a deadlock
(`collectives.pending`: continuations that issue an operation for the first time).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import UsageError
from paceline.torch_internals import (
    backend_names,
    default_group_store,
    gloo_timeout,
    groups_named,
    unregistered_gloo_group,
)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01  # seconds


_times_made: dict[tuple[str, tuple[int, ...]], int] = {}
"""How often this process has made each group. All members count alike, so the number keeps the
store's keys of an earlier group apart from those of the next one."""


def group_beside(parent: Any, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make a process group *name* of the members *ranks* of *parent*, with its own queues and
    connections.

    All its members, and only they, call this, in any thread. Under gloo the group is not in torch's
    registry, so its threads and connections end with its last reference.
    """
    if backend_names(parent) != {"gloo"}:
        return _registered_group(parent, name, ranks)
    timeout = gloo_timeout(parent)
    key = name, tuple(ranks)
    times = _times_made[key] = _times_made.get(key, 0) + 1
    store = dist.PrefixStore(  # type: ignore[attr-defined] # C++ has it
        f"{name}/{times}/", parent.get_group_store()
    )
    patient = PollingStore(store)
    rank = list(ranks).index(parent.rank())
    what = f"process group {name!r}"
    meet(patient, rank, ranks, what, timeout, "before")
    group = unregistered_gloo_group(parent, name, store, patient, rank, len(ranks))
    # From now on, no connection is being made: a member that drops the group breaks nothing.
    meet(patient, rank, ranks, what, timeout, "after")
    return group


def _registered_group(
    parent: Any, name: str, ranks: Sequence[int]
) -> dist.ProcessGroup:
    members = dist.get_process_group_ranks(parent)
    with groups_named(name):
        group: dist.ProcessGroup = dist.new_group(
            [members[rank] for rank in ranks],
            use_local_synchronization=True,
            sort_ranks=False,
        )
    return group


class PollingStore(dist.Store):  # type: ignore[name-defined] # C++ has it
    """A store that polls *store* instead of waiting in it.

    gloo uses it like torch's own stores while a group is made, and does not need it later.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all *keys* are set.

        Raises torch's `DistStoreError` after *timeout* (None: the store's own timeout).
        """
        limit = self._store.timeout if timeout is None else timeout
        deadline, pause = time.monotonic() + limit.total_seconds(), _FIRST_PAUSE
        while not self.check(keys):
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self.check([key])]
                raise dist.DistStoreError(
                    f"no process has set {', '.join(missing)} in the job's store within "
                    f"{limit}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def default_store() -> PollingStore:
    """The store that set up the default process group."""
    return PollingStore(default_group_store())


FIRST_TAG = 1 << 30
"""Tags from here on are paceline's; smaller ones remain free for ``dist.send`` and ``dist.recv``."""


def agreed_tag(stream: str) -> int:
    """The unique tag of a stream of messages, the same on all ranks.

    The first rank that asks puts a number for *stream* into the job's store. gloo's tags have 31
    bits.
    """
    store: Any = dist.PrefixStore("tags", default_group_store())  # type: ignore[attr-defined]
    number = store.add("streams", 1)
    return FIRST_TAG + int(store.compare_set(f"of {stream}", "", str(number)))


def meet(
    store: PollingStore,
    rank: int,
    members: Sequence[int],
    what: str,
    timeout: timedelta,
    when: str,
) -> None:
    """Return when all *members* of *what* have called this; *rank* is the caller's index among
    them."""
    keys = [f"{when} {place}" for place in range(len(members))]
    store.set(keys[rank], "here")
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        missing = [
            member
            for key, member in zip(keys, members, strict=True)
            if not store.check([key])
        ]
        raise UsageError(
            f"{what}: rank {missing} has not asked for it within {timeout}. All members "
            "must ask for the same groups and channels, in the same order"
        ) from error
