"""Options that describe a network or times to compute: each has runtimes where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Given:
    """Options that only some runtimes have, by name; None: not given."""

    network: Mapping[str, object]
    times: Mapping[str, object]
    jitter: float | None
    pace: str | None

    @property
    def _simulated(self) -> dict[str, object]:
        return {**self.times, "--jitter": self.jitter}

    def check(self, runtime: str) -> None:
        """Raises `UsageError` where one is of another runtime."""
        pace: dict[str, object] = {"--pace": self.pace}
        foreign: dict[str, dict[str, object]] = {
            "simulated": pace,
            "emulated": self._simulated,
            "real": {**self.network, **self._simulated, **pace},
        }
        for name, value in foreign[runtime].items():
            if value is not None:
                raise UsageError(
                    f"{name} means nothing in the {runtime} runtime; leave it out"
                )

    def options(self, runtime: str, shared: Mapping[str, object]) -> list[str]:
        """As words for a variant's command, with those that all runtimes have. What was measured stands
        in *shared*, in place of what nobody gave."""
        of_runtime: dict[str, Mapping[str, object]] = {
            "simulated": {**self._simulated, **shared, **self.network},
            "emulated": {**shared, **self.network, "--pace": self.pace},
            "real": shared,
        }
        items = of_runtime[runtime].items()
        return [f"{name}={value}" for name, value in items if value is not None]
