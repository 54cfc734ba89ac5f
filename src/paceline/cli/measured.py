"""Where the times to compute come from if nobody names any: measured, and kept."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from paceline.cli.options import standard_output_for_result
from paceline.errors import UsageError
from paceline.network import Cluster
from paceline.options import RunOptions
from paceline.worlds.virtual import ComputeModel
from paceline.worlds.virtual.kept import find_profile, keep_profile
from paceline.worlds.virtual.profile import profile_script


def profiled(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    compute: ComputeModel,
    options: RunOptions,
    patience: float = 20.0,
) -> ComputeModel:
    """*compute* with the script's own times: from the profile that is kept of it, made now
    if there is none, or none that fits. What the script prints meanwhile goes to standard
    error."""
    kept, stale = find_profile(script, arguments)
    if kept is None:
        return profiled_anew(
            script, arguments, cluster, compute, options, patience, why=stale
        )
    if kept.made is None:
        hint = "not made by simulate: delete it to have it made"
    else:
        hint = "of the same script and arguments; delete it to profile again"
    print(f"compute: from {kept.path} ({hint})", file=sys.stderr)
    return replace(
        compute,
        workload=kept.workload,
        what=str(kept.path),
        kept=kept.made is not None,
        inputs=None if kept.made is None else kept.made.inputs,
    )


def profiled_anew(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    compute: ComputeModel,
    options: RunOptions,
    patience: float = 20.0,
    *,
    why: str,
) -> ComputeModel:
    """*compute* with the script's own times, measured now; *why* they are measured again,
    if they are."""
    if why:
        print(f"compute: profiling again: {why}", file=sys.stderr)
    with standard_output_for_result(True):
        profile = profile_script(
            str(script), arguments, cluster, options, patience=patience
        )
    if profile is None:
        return replace(compute, workload=None, what="", kept=False, inputs=None)
    workload, what = profile.workload, "measured now"
    try:
        what = str(keep_profile(script, arguments, workload, profile.inputs).path)
        print(f"compute: profiled {script} once: {what}", file=sys.stderr)
    except UsageError as error:
        print(f"compute: profiled {script}, for this time: {error}", file=sys.stderr)
    return replace(compute, workload=workload, what=what, kept=False, inputs=None)
