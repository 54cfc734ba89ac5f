"""Errors of an emulated cluster, by their cause: the machine, the caller, or paceline."""

from __future__ import annotations

from paceline.errors import PacelineError


class EmulationError(PacelineError):
    """The emulated cluster cannot be made, or no longer exists."""


class EmulationPermissionError(EmulationError):
    """The machine does not let this user make namespaces."""


class KernelLacksError(EmulationError):
    """The kernel has no such device or queueing discipline."""


class KeeperLostError(EmulationError):
    """The process that held the emulated cluster ended, and the cluster with it."""
