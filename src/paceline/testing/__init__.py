"""The conformance kit: checks of methods, compressors, collectives and servers, in every runtime.

A method of your own, in the simulated runtime:

    from paceline.testing import Case, check_method
    check_method(Case(method=MyMethod(period=4)))

``torchrun --nproc-per-node 3 -m paceline.testing`` checks all methods of the table in real processes.
A compressor needs no runtime: ``check_compressor(MyCompressor(density=0.01))``. A collective is checked by its
class: ``check_collective(MyCollective)``. A method that updates on a server is checked by a function that makes
its server: ``check_server_method(lambda: MyMethod().server(3), workers=(3,))``.

The checked properties are called laws.

- `cases`: the table of methods, one row each; start here.
- `method_checks`: the laws of methods, and the rows that each applies to; `__main__`: all in real processes.
- `script_checks`: laws about training scripts: accumulation, clipping, loads, buffers.
- `compressor_checks`: the laws of compressors, on workers in lockstep.
- `collective_checks`: the laws of collectives, on lists of transfers and in the simulated runtime.
- `server_checks`: the laws of methods that update on a server; `server_trial`: the small training over an
  unreliable network on which they are checked.
- `problems`: the small models that the checks train, and `inspect`, which shows an optimizer's training state.
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
