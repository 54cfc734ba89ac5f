"""What ``paceline doctor`` launches on every worker: runs the script, if there is one, and examines."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from paceline.errors import UsageError
from paceline.runtimes.join import join_runtime
from paceline.tools.doctor.evidence import Evidence
from paceline.tools.doctor.measure import Examination


def main() -> None:
    """Join the job, train as the script says, and let rank 0 write the evidence."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds-per-pair", type=float, default=0.1)
    parser.add_argument("script", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    runtime = join_runtime()
    runtime.registry.options = replace(runtime.registry.options, tells=False)

    def write(evidence: Evidence) -> None:
        # Whoever reads it meanwhile reads all of it, or nothing.
        part = options.output.with_suffix(".part")
        part.write_bytes(evidence.to_json())
        os.replace(part, options.output)

    def say(text: str) -> None:
        print(f"doctor: {text}", file=sys.stderr, flush=True)

    examination = Examination(runtime, write, seconds=options.seconds_per_pair, say=say)
    if options.script is None:
        runtime.connect()
        # Rules of the cluster count from the start of a training.
        runtime.recorder.begin("bsp")
        return
    try:
        run_as_main(options.script, options.arguments)
    except SystemExit as end:
        if end.code:
            raise
    if not examination.is_over:
        runtime.connect()  # what is put off until the end is done only where there is a job


def run_as_main(script: str, arguments: list[str]) -> None:
    """As ``python SCRIPT ARGUMENTS`` does it, in this process."""
    try:
        code = compile(Path(script).read_bytes(), script, "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"the script {script} cannot be run: {error}") from error
    module = ModuleType("__main__")
    module.__file__ = script
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
