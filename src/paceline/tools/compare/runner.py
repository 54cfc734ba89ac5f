"""One script under several methods: each variant in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.records import StepRecord
from paceline.runtimes.processes import ends_with_this
from paceline.runtimes.results import FailedRun, Outcome, RunResult
from paceline.tools.compare.goal import Goal
from paceline.tools.report.run_files import claim, make_folder
from paceline.transport.liveness import without_interrupts

_VERBS = {"simulated": "simulate", "real": "run", "emulated": "emulate"}


@dataclass(frozen=True)
class Variant:
    """A method's spec, as given, and its place in the table."""

    number: int
    spec: str

    @property
    def file_name(self) -> str:
        """A name for its files: its number and the spec, in safe characters."""
        return f"{self.number + 1}-{re.sub(r'[^A-Za-z0-9.-]+', '-', self.spec)}"


def run_variant(
    variant: Variant,
    runtime: str,
    script: str,
    script_arguments: Sequence[str],
    options: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    started: Callable[[subprocess.Popen[str]], None],
) -> tuple[Outcome, str]:
    """Run one variant and read its result; its records stay in *folder*. Returns also what
    it wrote to standard error. *environment*: variables of its own. *started* is given its process,
    which never hears of Ctrl-C: whoever waits for it ends it.
    """
    with _ONE_AT_A_TIME:
        claim(str(folder), variant.file_name)
        records = make_folder(str(folder / variant.file_name))
    command = [
        *(sys.executable, "-m", "paceline", _VERBS[runtime], script, "--json"),
        *(f"--method={variant.spec}", f"--records={records}", *options),
        *("--", *script_arguments),
    ]
    with without_interrupts():
        process = subprocess.Popen(
            ends_with_this(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
    started(process)
    said, errors = process.communicate()
    status = process.returncode
    if status or not said.strip():
        with suppress(OSError):
            records.rmdir()  # unless there is something in it
        return FailedRun(failed=_reason(errors, status), exit_status=status), errors
    return msgspec.json.decode(said, type=RunResult), errors


_ONE_AT_A_TIME = threading.Lock()
"""Who claims files; variants may run beside each other."""

_OURS = "paceline: "


def _reason(errors: str, status: int) -> str:
    """In one line why a run failed: what paceline said last, or else what anybody did."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    ours = [line.removeprefix(_OURS) for line in lines if line.startswith(_OURS)]
    return (ours or lines or [f"exit status {status}"])[-1]


class VariantStep(StepRecord, kw_only=True):
    """A step's record that says which variant it belongs to."""

    variant: str


def reached(
    goal: Goal, variant: Variant, result: RunResult, folder: Path
) -> StepRecord | None:
    """The step with which worker 0 of *variant* logged as much as the goal says, if it did. Before
    records are merged."""
    lines = (folder / variant.file_name / "records.jsonl").read_bytes()
    steps = msgspec.json.Decoder(StepRecord).decode_lines(lines)
    mine = [step for step in steps if step.worker == 0]
    return goal.reached(mine, result.metrics.get(goal.metric))


def merge_records(variants: Sequence[Variant], folder: Path) -> None:
    """Gather the steps of *variants*, which have all run to their end, in
    ``records.jsonl`` and name each trace after its variant, ``NAME.trace.json``."""
    claim(
        str(folder), "records.jsonl", *(f"{v.file_name}.trace.json" for v in variants)
    )
    decode = msgspec.json.Decoder(StepRecord).decode_lines
    steps: list[VariantStep] = []
    for variant in variants:
        own = folder / variant.file_name
        for record in decode((own / "records.jsonl").read_bytes()):
            fields = msgspec.structs.asdict(record)
            steps.append(VariantStep(variant=variant.spec, **fields))
        (own / "records.jsonl").unlink()
        (own / "records.trace.json").replace(folder / f"{variant.file_name}.trace.json")
        own.rmdir()
    (folder / "records.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(steps))


def to_json(
    results: Sequence[tuple[str, Outcome]],
    when: Sequence[StepRecord | None] = (),
    **more: object,
) -> str:
    """``{"variants": [...]}``: each result, or why there is none, with its variant's spec
    as given, and the step and the seconds of training *when* it reached the goal. *more*: other
    keys, without those that are None."""
    rows = [{"variant": spec} | msgspec.structs.asdict(r) for spec, r in results]
    for row, step in zip(rows, when, strict=False):
        if step is not None:
            row |= {"reached_seconds": step.end_seconds, "reached_step": step.step}
    known = {key: value for key, value in more.items() if value is not None}
    return msgspec.json.encode({"variants": rows} | known).decode()
