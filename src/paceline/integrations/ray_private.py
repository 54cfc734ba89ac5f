"""Every private name of Ray that paceline uses, in one place. Checked against Ray 2.60."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray._private import state

_WITHOUT = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING")


def without_process(actors: Mapping[str, Any]) -> set[str]:
    """Those of *actors*, by name, that no process runs just now: Ray is about to start one, or has no
    room. (``ray.util.state`` says it, too, where a dashboard runs.)"""
    waiting = {
        identity for one in _WITHOUT for identity in state.actors(actor_state_name=one)
    }
    return {name for name, actor in actors.items() if actor._actor_id.hex() in waiting}
