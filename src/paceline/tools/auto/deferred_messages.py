"""Small messages among all ranks, besides the training's own: sums of numbers, and a text.

All messages have one length. So a worker that is out of data can post its last message without knowing
the others' next question. Its message carries a flag, which tells the readers that a worker has finished.
After that no rank posts anything. A worker finishes between two steps, and has then posted at most one
message less than the others. Its last message makes up for it: all ranks post equally many, so no rank
waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from paceline.interfaces import Comm, Pending
from paceline.tools.auto.controller import WorkerFinishedError

WORDS = 1024
"""Numbers in a message: 8 KB."""


class DeferredMessages:
    """One rank's `RankMessages`, on a communicator of its own.

    Sums are posted after one step and read after the next, when they have arrived.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._posted: deque[tuple[Pending, torch.Tensor]] = deque()
        self._texts: deque[bytes] = deque()
        self._over = False

    @property
    def size(self) -> int:
        return self._comm.size

    def post(self, values: Sequence[float]) -> None:
        """Post at most `WORDS` numbers, equally many on all ranks."""
        self._post(0.0, values)

    def take(self) -> list[float]:
        """Return the sums over ranks of the oldest post.

        Raises:
            WorkerFinishedError: A worker is out of data.
        """
        pending, buffer = self._posted.popleft()
        pending.wait()
        sums: list[float] = buffer.tolist()
        if sums[0]:
            self._over = True
            raise WorkerFinishedError
        return sums[1:]

    def post_text(self, text: str) -> None:
        """Post rank 0's text; other ranks' texts do not matter."""
        content = text.encode() if self._comm.rank == 0 else b""
        self._texts.append(content)
        self.post([len(content), *content[: WORDS - 1]])

    def take_text(self) -> str:
        """Return rank 0's text.

        A text longer than one message needs more messages, and all ranks wait for them.

        Raises:
            WorkerFinishedError: A worker is out of data.
        """
        own = self._texts.popleft()
        length, *content = self.take()
        while len(content) < length:
            # A worker that has finished meanwhile posted its last message in place of this one.
            self.post(list(own[len(content) : len(content) + WORDS]))
            content += self.take()
        return bytes(int(one) for one in content[: int(length)]).decode()

    def finish(self) -> None:
        """Tell all ranks that this worker is out of data. Does not wait."""
        if not self._over:
            self._over = True
            self._post(1.0, ())

    def close(self) -> None:
        """Wait for this worker's posts: when the others finish, they have posted as many."""
        while self._posted:
            self._posted.popleft()[0].wait()

    def _post(self, finished: float, values: Sequence[float]) -> None:
        buffer = torch.zeros(WORDS + 1, dtype=torch.float64)
        buffer[0] = finished
        if values:
            buffer[1 : 1 + len(values)] = torch.tensor(values, dtype=torch.float64)
        buffer = buffer.to(self._device)
        self._posted.append((self._comm.all_reduce(buffer, "sum"), buffer))
