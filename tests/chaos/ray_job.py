"""A job on Ray: ``ray_job.py METHOD WORKERS SNAPSHOT RAY SCRIPT WORDS``. RAY is the folder of Ray's own files."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray

from paceline.integrations.ray import run


def loop(script: list[str]) -> None:
    """What each worker does, in each of its processes."""
    sys.argv = script
    runpy.run_path(script[0])


def main() -> None:
    method, workers, snapshot, folder, *script = sys.argv[1:]
    ray.init(
        num_cpus=int(workers) + 2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        _temp_dir=folder,
    )
    try:
        run(
            loop,
            workers=int(workers),
            method=method,
            config=script,
            snapshot=snapshot,
            snapshot_seconds=0.2,
            resume=Path(snapshot).exists(),
        )
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
