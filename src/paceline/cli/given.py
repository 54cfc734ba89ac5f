"""Options that describe a network or times to compute: each has worlds where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Given:
    """Options that only some worlds have, by name; None: not given."""

    network: Mapping[str, object]
    times: Mapping[str, object]
    jitter: float | None
    pace: str | None

    @property
    def _virtual(self) -> dict[str, object]:
        return {**self.times, "--jitter": self.jitter}

    def check(self, world: str) -> None:
        """Raises `UsageError` where one is of another world."""
        pace: dict[str, object] = {"--pace": self.pace}
        foreign: dict[str, dict[str, object]] = {
            "virtual": pace,
            "emulated": self._virtual,
            "real": {**self.network, **self._virtual, **pace},
        }
        for name, value in foreign[world].items():
            if value is not None:
                raise UsageError(
                    f"{name} means nothing in the {world} world; leave it out"
                )

    def options(self, world: str, shared: Mapping[str, object]) -> list[str]:
        """As words for a variant's command, with those that all worlds have. What was measured stands
        in *shared*, in place of what nobody gave."""
        of_world: dict[str, Mapping[str, object]] = {
            "virtual": {**self._virtual, **shared, **self.network},
            "emulated": {**shared, **self.network, "--pace": self.pace},
            "real": shared,
        }
        items = of_world[world].items()
        return [f"{name}={value}" for name, value in items if value is not None]
