"""What training costs on this machine, measured: computing (`Profiler`), and coding gradients
(`coding_times`), of which `price` makes a table."""

from paceline.cluster.profiling.busy import coding_times_of_busy
from paceline.cluster.profiling.compressor_costs import (
    Price,
    Unsuited,
    price,
)
from paceline.cluster.profiling.compressors import coding_times, measure_coding
from paceline.cluster.profiling.gradient_dump import KeptGradients
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
