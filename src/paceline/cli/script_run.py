"""The body that `run`, `emulate` and `simulate` share: one job, from options to result.

1. `checked_job`: checks the script and options, so that errors are reported once instead of by every worker.
2. The command makes its cluster and its workers; only this step differs.
3. Inside `script_run` the command launches `ScriptRun.job`. Then records are merged, the result is shown as a
   table or as JSON, and the process ends with the job's exit status.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.cli import options as o
from paceline.cluster import Workload
from paceline.errors import UnknownNameError, UsageError
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.results import standard_output_for_result
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.tools.report.run_files import forget_workers, merge_workers

if TYPE_CHECKING:
    from paceline.cluster import Cluster
    from paceline.runtimes.results import RunResult


REGISTRIES = frozenset({"METHODS", "COMPRESSORS", "COLLECTIVES"})
APART = frozenset({"paceline", "torch", *sys.stdlib_module_names})
"""Packages whose import never registers a method or compressor."""


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
    """Make the job from a command's options. Raises `UsageError`."""
    check_job(script, method)
    if report_to is not None:
        from paceline.core.step_loggers import check_place

        check_place(report_to)
    if pace is not None:
        Workload.load(pace)  # Raises here once, and not in every worker.
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


def check_lone_worker(
    survive: bool,
    server: str | None,
    torchrun_options: Sequence[str],
    snapshot: Path | None,
    resume: bool,
) -> None:
    """Raise `UsageError` for options without meaning for one worker whose server is elsewhere."""
    if not survive or server is None:
        raise UsageError(
            "--server and --rank are of one worker of a job that survives: expected --survive "
            "--server HOST:PORT"
        )
    if torchrun_options:
        raise UsageError(
            f"--server: this command is one worker: leave out {' '.join(torchrun_options)}"
        )
    if snapshot is not None or resume:
        raise UsageError(
            "--snapshot and --resume are the server's: paceline serve --survive --snapshot "
            "FILE, which goes on from the file that is there"
        )


def check_job(script: Path, *specs: str | None) -> None:
    """Check a job before its workers start, so that an error is reported once.

    Names in specs are not checked if the script may register them.

    Raises:
        UsageError: The script is missing, or a spec has an unknown name.
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}")
    if not any(specs):
        return
    from paceline.core.settings import parse_method
    from paceline.tools.auto.config import parse_auto

    for spec in specs:
        if spec is not None and parse_auto(spec) is None:
            try:
                parse_method(spec)
            except UnknownNameError:
                if not may_register(script):
                    raise


def check_workers(spec: str | None, workers: int, groups: Sequence[int] = ()) -> None:
    """Check that a method can train with *workers* workers, so that an error is reported once.

    Args:
        spec: The method.
        workers: Number of workers.
        groups: The group of each worker, if the cluster file sets it.

    Raises:
        UsageError: The method cannot, for example because its groups have another size.
    """
    if spec is None:
        return
    from paceline import methods
    from paceline.core.settings import parse_method
    from paceline.interfaces import UpdatesOnServer
    from paceline.tools.auto.config import parse_auto

    auto = parse_auto(spec)
    if auto is not None:
        auto.load_cluster(workers)  # Raises if it has another number of workers.
        return
    try:
        method = methods.grouped(parse_method(spec)[0], groups)
    except UnknownNameError:
        return  # The script may register it: see `check_job`.
    if method.updates_on == "server":
        cast(UpdatesOnServer, method).server(workers)


def may_register(script: Path) -> bool:
    """Return whether *script*, or a module that it imports, may register names.

    It may if it mentions a registry. Of modules outside the script's folder only the first file is read,
    and mentioning paceline is enough.
    """
    folder = script.resolve().parent
    left, seen = [script.resolve()], set[Path]()
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        tree = _tree(file)
        if any(_name(node) in REGISTRIES for node in ast.walk(tree)):
            return True
        for module in _imports(tree):
            beside = _beside(folder, module)
            if beside:
                left += beside
            elif _names_paceline(module.partition(".")[0]):
                return True
    return False


def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # Running the script reports it.
        return ast.Module([], [])


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.name if isinstance(node, ast.alias) else ""


def _imports(tree: ast.Module) -> Iterator[str]:
    """Imported modules by full names, including names that may be modules of a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield module
            yield from (f"{module}.{one.name}".strip(".") for one in node.names)


def _beside(folder: Path, module: str) -> list[Path]:
    """Files of a module in the script's folder: its own, and those of its packages."""
    found: list[Path] = []
    at = folder
    for part in module.split(".") if module else []:
        files = (at / f"{part}.py", at / part / "__init__.py")
        found += [file for file in files if file.is_file()]
        at /= part
    return found


def _names_paceline(package: str) -> bool:
    if not package or package in APART:
        return False
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    tree = _tree(Path(spec.origin))
    return any(name.partition(".")[0] == "paceline" for name in _imports(tree))


@dataclass
class ScriptRun:
    """A *job* to be launched, and its outcome, which the command fills in.

    Worker processes write their result and records to files that the job's options name. A simulation has both
    in memory: it sets *result*, and writes its records itself.
    """

    job: ScriptJob
    status: int = 0
    result: RunResult | None = None


@contextmanager
def script_run(
    job: ScriptJob, json: bool, cluster: Cluster | None = None
) -> Iterator[ScriptRun]:
    """Return a context in which the command launches the job.

    At its end the result is shown, and the process ends. *cluster* is the described network, if there is one.
    """
    records = job.options.records
    if records is not None:
        forget_workers(records)
    with (
        scratch_folder() as scratch,
        standard_output_for_result(json) as output,
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
            # None on other machines than rank 0's, or if nothing was trained.
            run.result = read_result(file)
        if run.result is not None:
            if cluster is not None:
                run.result.network = cluster.describe()
                print(f"compute: {run.result.compute}", file=sys.stderr)
            o.show(run.result, json, output)
    sys.exit(run.status)
