"""The conformance kit: what every synchronization method must hold, in every runtime.

One table of rows (`CASES`), one list of checks (`CHECKS`); every row runs every check that
applies to it under every bucket rule, in the simulated runtime (`check_method`) and in real processes
(``torchrun --nproc-per-node 3 -m paceline.testing``). A method of your own:

    from paceline.testing import Case, check_method
    check_method(Case(method=MyMethod(period=4)))

`inspect` tells a test what an optimizer trains with: buckets, the method's state, records.

Compressors have a list of laws of their own (`COMPRESSOR_CHECKS`), held on workers that are
only simulated: ``check_compressor(MyCompressor(density=0.01))``. So have methods whose server
updates (`paceline.testing.server_checks`): ``check_server(lambda: MyMethod().server(3), workers=(3,))``.

- `cases`: the table of methods: a row each; start here.
- `method_checks`, `restart_checks`: laws of methods; `__main__`: all of them in real processes.
- `compressor_checks`, `lockstep`, `comparisons`: laws of compressors.
- `server_checks`: laws of methods whose server updates.
- `task`, `problems`: what the checks train.
- `inspection`: what an optimizer trains with.
"""

from paceline.testing.cases import CASES, Case
from paceline.testing.compressor_checks import (
    COMPRESSOR_CHECKS,
    CompressorCheck,
    check_compressor,
)
from paceline.testing.inspection import InspectedBucket, Inspection, inspect
from paceline.testing.method_checks import CHECKS, Check, check_method, run_checks
from paceline.testing.problems import CheckFailedError
from paceline.testing.server_checks import check_server

__all__ = [
    "CASES",
    "CHECKS",
    "COMPRESSOR_CHECKS",
    "Case",
    "Check",
    "CheckFailedError",
    "CompressorCheck",
    "InspectedBucket",
    "Inspection",
    "check_compressor",
    "check_method",
    "check_server",
    "inspect",
    "run_checks",
]
