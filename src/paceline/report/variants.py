"""One script under several methods: each variant in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.errors import PacelineError
from paceline.instruments import StepRecord
from paceline.report.files import make_folder
from paceline.report.result import Result

_VERBS = {"virtual": "simulate", "real": "run", "emulated": "emulate"}


class VariantFailedError(PacelineError):
    """A variant's run ended with an error."""


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
    world: str,
    script: str,
    script_arguments: Sequence[str],
    options: Sequence[str],
    folder: Path,
) -> Result:
    """Run one variant and read its result; its records stay in *folder*.

    What the script prints goes to standard error only if the run fails.
    """
    records = make_folder(str(folder / variant.file_name))
    command = [
        *(sys.executable, "-m", "paceline", _VERBS[world], script, "--json"),
        *(f"--method={variant.spec}", f"--records={records}", *options),
        *("--", *script_arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise VariantFailedError(
            f"variant {variant.spec!r} failed (exit status {done.returncode}):\n"
            f"{done.stderr.strip()}"
        )
    return msgspec.json.decode(done.stdout, type=Result)


class VariantStep(StepRecord, kw_only=True):
    """A step's record that says which variant it belongs to."""

    variant: str


def merge_records(variants: Sequence[Variant], folder: Path) -> None:
    """Gather all variants' steps in ``records.jsonl`` and name each trace after its
    variant, ``NAME.trace.json``."""
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


def to_json(results: Sequence[tuple[str, Result]]) -> str:
    """``{"variants": [...]}``: each result with its variant's spec as given."""
    rows = [{"variant": spec} | msgspec.structs.asdict(r) for spec, r in results]
    return msgspec.json.encode({"variants": rows}).decode()
