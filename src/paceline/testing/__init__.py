"""The conformance kit: laws that every method, compressor and server must hold, in every runtime.

A method of your own, in the simulated runtime:

    from paceline.testing import Case, check_method
    check_method(Case(method=MyMethod(period=4)))

``torchrun --nproc-per-node 3 -m paceline.testing`` checks all methods of the table in real processes.
A compressor needs no runtime: ``check_compressor(MyCompressor(density=0.01))``. Nor does a method
whose server updates: ``check_server(lambda: MyMethod().server(3), workers=(3,))``.

- `cases`: the table of methods, one row each; start here.
- `method_checks`: the laws of methods, and which apply to a row; `__main__`: all of them in real processes.
- `script_checks`: those of what training scripts do: accumulation, clipping, loads, buffers.
- `compressor_checks`: the laws of compressors, on workers in lockstep.
- `server_checks`: the laws of methods whose server updates.
- `problems`: the small models that the checks train, and `inspect`, which shows what an optimizer trains with.
"""

from paceline.testing.cases import CASES, Case
from paceline.testing.compressor_checks import (
    COMPRESSOR_CHECKS,
    CompressorCheck,
    check_compressor,
)
from paceline.testing.method_checks import CHECKS, Check, check_method, run_checks
from paceline.testing.problems import (
    CheckFailedError,
    InspectedBucket,
    Inspection,
    inspect,
)
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
