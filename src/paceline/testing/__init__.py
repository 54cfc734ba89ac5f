"""The conformance kit: laws that methods, compressors, collectives and servers must hold, in every runtime.

A method of your own, in the simulated runtime:

    from paceline.testing import Case, check_method
    check_method(Case(method=MyMethod(period=4)))

``torchrun --nproc-per-node 3 -m paceline.testing`` checks all methods of the table in real processes.
A compressor needs no runtime: ``check_compressor(MyCompressor(density=0.01))``. A collective is
checked by its class: ``check_collective(MyCollective)``. A method whose server updates is checked by
what makes its server: ``check_server_method(lambda: MyMethod().server(3), workers=(3,))``.

- `cases`: the table of methods, one row each; start here.
- `method_checks`: the laws of methods, and which apply to a row; `__main__`: all of them in real processes.
- `script_checks`: those of what training scripts do: accumulation, clipping, loads, buffers.
- `compressor_checks`: the laws of compressors, on workers in lockstep.
- `collective_checks`: the laws of collectives, on lists of transfers and in the simulated runtime.
- `server_checks`: the laws of methods whose server updates; `server_trial`: the small training and the
  network that breaks, on which they are checked.
- `problems`: the small models that the checks train, and `inspect`, which shows what an optimizer trains with.
"""

from paceline.testing.cases import CASES, Case
from paceline.testing.collective_checks import (
    COLLECTIVE_CHECKS,
    CollectiveCheck,
    check_collective,
)
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
from paceline.testing.server_checks import check_server_method
from paceline.testing.server_trial import ServerLaws, Stages

__all__ = [
    "CASES",
    "CHECKS",
    "COLLECTIVE_CHECKS",
    "COMPRESSOR_CHECKS",
    "Case",
    "Check",
    "CheckFailedError",
    "CollectiveCheck",
    "CompressorCheck",
    "InspectedBucket",
    "Inspection",
    "ServerLaws",
    "Stages",
    "check_collective",
    "check_compressor",
    "check_method",
    "check_server_method",
    "inspect",
    "run_checks",
]
