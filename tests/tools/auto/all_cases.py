"""Run by torchrun: every case on real processes, a line each."""

import sys
import traceback

import paceline
from tests.tools.auto import cases, script_cases

CASES = cases.CASES | script_cases.CASES
paceline.init()
failed = False
for name, case in CASES.items():
    try:
        case()
        sys.stdout.write(f"rank {paceline.rank()} {name}: ok\n")
    except Exception:
        failed = True
        sys.stdout.write(f"rank {paceline.rank()} {name}: FAILED\n")
        traceback.print_exc()
        break  # the ranks may be out of step
sys.exit(failed)
