"""What training costs on this machine, measured: computing and compressing gradients.

- `step_profiler`: `Profiler`: compute times of a training step, tensor by tensor.
- `timers`: times on the host's clock or in a CUDA stream.
- `step_habits`: passes in a step, and whether the script uses gradients.
- `gradient_dump`: real gradients of some steps, in files.
- `compressors`: `coding_times`: the time to compress a gradient.
- `loaded_compressor_times`: the same while all cores compress.
- `compressor_costs`: `price`: time and size of each compressor on one model.
"""

from paceline.cluster.profiling.compressor_costs import (
    Price,
    Unsuited,
    price,
)
from paceline.cluster.profiling.compressors import coding_times, measure_coding
from paceline.cluster.profiling.gradient_dump import KeptGradients
from paceline.cluster.profiling.loaded_compressor_times import coding_times_of_busy
from paceline.cluster.profiling.step_habits import StepHabits
from paceline.cluster.profiling.step_profiler import (
    WARM_UP_STEPS,
    Profiler,
    times_of,
    with_times,
)

__all__ = [
    "WARM_UP_STEPS",
    "KeptGradients",
    "Price",
    "Profiler",
    "StepHabits",
    "Unsuited",
    "coding_times",
    "coding_times_of_busy",
    "measure_coding",
    "price",
    "times_of",
    "with_times",
]
