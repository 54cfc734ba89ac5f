"""The registry of synchronization methods: one row each.

``METHODS`` maps a method's name to its class. `make` turns a spec into a method object,
`check_survives` says which of them outlive a worker.

- `bsp`: averages gradients in every step, as DDP does; start here.
- `asp`, `ssp`, `dssp`, `backup`, `r2sp`: methods over a parameter server.
- `push_pull`: the worker's half of methods whose server updates.
- `sync_switch`, `grouping_sgd`: synchronous at first; synchronous inside groups.
- `forward_overlap`: exact methods whose messages overlap with the next forward pass.
- `osp`: overlapped synchronization in two stages.
- `ds_sync`: divide-and-shuffle averages of small groups.
- `gssp`: SSP inside groups of workers of similar speed.
- `local_updates`: local SGD, DiLoCo and others.
- `contrib`: relatives of these, one file each.
- `model_averaging`: flat messages over tensors, and means of whole models.
- `group_members`: groups by hand, the text of the key ``members``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import UnknownNameError, UsageError, unknown
from paceline.interfaces import Method
from paceline.methods.asp import ASP
from paceline.methods.backup import Backup
from paceline.methods.bsp import BSP
from paceline.methods.contrib.daso import DASO
from paceline.methods.contrib.sel_sync import SelSync
from paceline.methods.ds_sync import DSSync
from paceline.methods.dssp import DSSP
from paceline.methods.forward_overlap import DeAR, Priority
from paceline.methods.group_members import members_text
from paceline.methods.grouping_sgd import GroupingSGD
from paceline.methods.gssp import GSSP
from paceline.methods.local_updates import (
    DiLoCo,
    HierarchicalLocalSGD,
    LocalSGD,
    PostLocalSGD,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from paceline.methods.osp import OSP
from paceline.methods.r2sp import R2SP
from paceline.methods.ssp import SSP
from paceline.methods.sync_switch import SyncSwitch
from paceline.spec import Spec, convert_fields, field_types

METHODS: dict[str, type[Method]] = {
    ASP.name: ASP,
    Backup.name: Backup,
    BSP.name: BSP,
    DASO.name: DASO,
    DSSP.name: DSSP,
    DSSync.name: DSSync,
    DeAR.name: DeAR,
    DiLoCo.name: DiLoCo,
    GroupingSGD.name: GroupingSGD,
    GSSP.name: GSSP,
    HierarchicalLocalSGD.name: HierarchicalLocalSGD,
    LocalSGD.name: LocalSGD,
    OSP.name: OSP,
    PostLocalSGD.name: PostLocalSGD,
    Priority.name: Priority,
    R2SP.name: R2SP,
    SelSync.name: SelSync,
    SlowMo.name: SlowMo,
    SparseLoCo.name: SparseLoCo,
    SSP.name: SSP,
    SyncSwitch.name: SyncSwitch,
    StreamingDiLoCo.name: StreamingDiLoCo,
}


def make(spec: Spec, others: set[str]) -> tuple[Method, dict[str, str]]:
    """Return the method that *spec* names, and the keys that are not its own.

    *others* are keys that are not the method's; keys that begin with one of them and a dot belong to
    them. Raises `UsageError` for an unknown name, an unknown key, or a value of the wrong type.
    """
    if spec.name not in METHODS:
        raise UnknownNameError(unknown("method", spec.name, METHODS))
    cls, owner = METHODS[spec.name], f"method {spec.name!r}"
    own_keys = set(field_types(cls))
    for key in spec.values:
        if key not in own_keys and key.partition(".")[0] not in others:
            raise UsageError(f"{owner}: {unknown('key', key, own_keys | others)}")
    mine = {key: value for key, value in spec.values.items() if key in own_keys}
    rest = {key: value for key, value in spec.values.items() if key not in own_keys}
    return cls(**convert_fields(cls, mine, owner)), rest


def grouped(method: Method, of: Sequence[int]) -> Method:
    """Set the groups of a method, if it has a key ``members`` that the user has not set.

    Args:
        method: The method.
        of: The group of each worker in the cluster file; empty if it names none.
    """
    if not of or getattr(method, "members", None) != "":
        return method
    shape: Any = method
    by_hand: Method = replace(shape, members=members_text(of))
    return by_hand


def check_survives(method: Method) -> None:
    """Raise `UsageError` for a method whose job cannot continue after the death of a worker."""
    if method.updates_on != "server":
        others = sorted(n for n, cls in METHODS.items() if cls().updates_on == "server")
        raise UsageError(
            f"method {method.name!r} under --survive: its workers meet in collectives, "
            f"which a death stops. Use one whose server updates: {', '.join(others)}"
        )
