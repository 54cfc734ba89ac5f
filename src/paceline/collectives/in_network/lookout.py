"""What others say in the job's store, looked for in a thread of its own.

An answer of the store passes the same links as all else, and may take as long as their queues are;
who looks for it himself sends nothing meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paceline.errors import PeerLostError

LOOK_SECONDS = 0.1


class Lookout:
    """Looks in *store* under what *key* gives then: ten times a second, as long as somebody
    asks."""

    def __init__(self, store: Any, key: Callable[[], str]) -> None:
        self._store, self._key = store, key
        self._said: tuple[str, str] | None = None
        self._fault: BaseException | None = None
        self._asked, self._over = threading.Event(), threading.Event()
        threading.Thread(
            target=self._look, name="paceline lookout", daemon=True
        ).start()

    def check(self) -> None:
        """Raise `PeerLostError` where somebody has said that somebody is lost, as far as is known,
        and what the store raised."""
        if self._fault is not None:
            raise self._fault
        if self._said is not None and self._said[0] == self._key():
            raise PeerLostError(self._said[1])
        self._asked.set()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._asked.set()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self._asked.wait()
            self._asked.clear()
            if self._over.is_set():
                return
            try:
                key = self._key()
                if self._store.check([key]):
                    self._said = key, self._store.get(key).decode()
            except BaseException as fault:
                self._fault = fault
                return
