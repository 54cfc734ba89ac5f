"""The body that `run`, `emulate` and `simulate` share: one job, from options to result.

1. `checked_job`: the script and what is asked of it, refused here where every worker would fail.
2. The command makes its cluster and its workers; only this differs.
3. Within `script_run` the command launches `ScriptRun.job`. Records are merged, the result is
   shown as a table or as JSON, and the process ends with the job's exit status.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import options as o
from paceline.cluster import Workload
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.tools.report.run_files import forget_workers, merge_workers

if TYPE_CHECKING:
    from paceline.cluster import Cluster
    from paceline.runtimes.results import RunResult


def checked_job(
    script: Path,
    arguments: list[str] | None,
    *,
    method: str | None,
    steps: int | None,
    seed: int | None,
    records: Path | None,
    report_to: str | None,
    cluster: Path | None = None,
    pace: str | None = None,
) -> ScriptJob:
    """Make the job of a command's options. Raises `UsageError`."""
    o.check_job(script, method)
    if report_to is not None:
        from paceline.core.step_loggers import check_place

        check_place(report_to)
    if pace is not None:
        Workload.load(pace)  # raises here, once, and not in every worker
    options = RunOptions(
        method=method,
        steps=steps,
        seed=seed,
        report_to=report_to,
        # Full paths: a script may leave this folder.
        records=None if records is None else str(records.resolve()),
        cluster=None if cluster is None else str(cluster.resolve()),
        pace=str(Path(pace).resolve()) if pace and Path(pace).exists() else pace,
    )
    return ScriptJob(str(script), arguments or [], options)


@dataclass
class ScriptRun:
    """A *job* as it is to be launched, and how it ended, which the command fills in.

    Worker processes leave their result and their records in files that the job's options name. A
    simulation has both in memory: it sets *result*, and writes its records itself.
    """

    job: ScriptJob
    status: int = 0
    result: RunResult | None = None


@contextmanager
def script_run(
    job: ScriptJob, json: bool, cluster: Cluster | None = None
) -> Iterator[ScriptRun]:
    """Within it a command launches the job; then this shows its result, and ends the process.
    *cluster*: what the job runs on, where that is described."""
    records = job.options.records
    if records is not None:
        forget_workers(records)
    with (
        scratch_folder() as scratch,
        o.standard_output_for_result(json) as output,
    ):
        file = Path(scratch) / "result.json"
        options = replace(job.options, json=True, result=str(file))
        run = ScriptRun(replace(job, options=options))
        if cluster is not None:
            print(f"network: {cluster.describe()}", file=sys.stderr)
        yield run
        if run.result is None:
            from paceline.runtimes.results import read_result

            if records is not None:
                merge_workers(records, "records")
            run.result = read_result(file)  # where rank 0 is, if anything was trained
        if run.result is not None:
            if cluster is not None:
                run.result.network = cluster.describe()
                print(f"compute: {run.result.compute}", file=sys.stderr)
            o.show(run.result, json, output)
    sys.exit(run.status)
