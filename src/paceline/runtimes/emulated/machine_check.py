"""Checks which features of an emulated cluster this machine has, and how to get the others."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.runtimes.emulated import memory
from paceline.runtimes.emulated.control_messages import Probe, Probed
from paceline.runtimes.emulated.errors import EmulationError
from paceline.runtimes.emulated.keeper_client import Client
from paceline.runtimes.emulated.kernel_features import FEATURES
from paceline.runtimes.emulated.network_plan import MAX_HOSTS


@dataclass(frozen=True)
class Capability:
    """One feature that an emulated cluster needs or can use.

    *remedy* says what is missing and how to get it; it is empty if the feature is *present*.
    """

    name: str
    purpose: str
    present: bool
    required: bool
    remedy: str = ""


@dataclass(frozen=True)
class Capabilities:
    """The result of `paceline check`.

    Attributes:
        mode: How namespaces are made, ``"root"`` or ``"user namespace"``; None: they are not
            permitted.
        hosts: How many hosts the free memory holds, with a worker of `memory.WORKER_BYTES` in each.
    """

    mode: str | None
    items: tuple[Capability, ...]
    hosts: int

    @property
    def enough(self) -> bool:
        """Whether an emulated cluster can be started at all."""
        return all(item.present for item in self.items if item.required)


def capabilities() -> Capabilities:
    """Try all features, in scratch namespaces.

    A missing feature raises no error.
    """
    mode, missing, refusal = None, {}, ""
    own_proc = False
    try:
        with Client() as client:
            mode, own_proc = client.ready.mode, client.ready.own_proc
            missing = client.ask(Probe(), Probed).missing
    except EmulationError as error:
        refusal = str(error)
    items = [
        Capability(
            name="namespaces",
            purpose="hosts with a network of their own",
            present=mode is not None,
            required=True,
            remedy=refusal,
        )
    ]
    for feature, wanted in FEATURES.items():
        remedy = ""
        if mode is None:
            remedy = "could not be tried without namespaces"
        elif feature in missing:
            remedy = f"{wanted.how_to_get()} (the kernel said: {missing[feature]})"
        items.append(
            Capability(
                name=feature,
                purpose=wanted.purpose,
                present=not remedy,
                required=wanted.required,
                remedy=remedy,
            )
        )
    items.append(
        Capability(
            name="own /proc",
            purpose="processes in hosts see their own numbers",
            present=own_proc,
            required=False,
            remedy=""
            if own_proc
            else "this system refuses to mount /proc anew, as containers do: run "
            "outside, or with --security-opt systempaths=unconfined",
        )
    )
    hosts = min(MAX_HOSTS, memory.most_hosts(memory.available(), memory.WORKER_BYTES))
    return Capabilities(mode=mode, items=tuple(items), hosts=hosts)
