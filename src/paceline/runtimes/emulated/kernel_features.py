"""Lists the kernel features that an emulated cluster needs, and how to get them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelFeature:
    """One kernel feature.

    Attributes:
        purpose: Its use in an emulated cluster.
        required: Whether emulation is impossible without it.
        option: The kernel's configuration option.
        module: The kernel module that contains it.
    """

    purpose: str
    required: bool
    option: str
    module: str

    def how_to_get(self) -> str:
        """Return how to get it, as text for the user."""
        return (
            f"needs a kernel with {self.option}; where it is a module, "
            f"sudo modprobe {self.module}"
        )


FEATURES = {
    "veth": KernelFeature(
        "cables between hosts and switches", True, "CONFIG_VETH", "veth"
    ),
    "bridge": KernelFeature("switches", True, "CONFIG_BRIDGE", "bridge"),
    "tbf": KernelFeature("link rates, cuts", True, "CONFIG_NET_SCH_TBF", "sch_tbf"),
    "netem": KernelFeature("latency", False, "CONFIG_NET_SCH_NETEM", "sch_netem"),
}
