"""Measures the costs of training on this machine: computing and compressing gradients.

- `step_profiler`: compute times of a training step, tensor by tensor; the script's other work in
  each step; gradients of some steps, in files.
- `step_phases`: input, forward, backward, exposed communication and update of each step.
- `compressors`: the time to compress a gradient, alone and while all cores do so; costs and gains
  of each compressor on one model.
- `timers`: times on the host's clock or in a CUDA stream.
"""

from paceline.cluster.profiling.compressors import (
    CompressorCost,
    NotApplicable,
    coding_times,
    coding_times_of_busy,
    compressor_costs,
    measure_coding,
)
from paceline.cluster.profiling.step_profiler import (
    WARM_UP_STEPS,
    GradientDump,
    StepHabits,
    StepProfiler,
    times_of,
    with_times,
)

__all__ = [
    "WARM_UP_STEPS",
    "CompressorCost",
    "GradientDump",
    "NotApplicable",
    "StepHabits",
    "StepProfiler",
    "coding_times",
    "coding_times_of_busy",
    "compressor_costs",
    "measure_coding",
    "times_of",
    "with_times",
]
