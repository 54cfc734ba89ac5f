"""What training costs on this machine, measured: computing (`Profiler`), and coding gradients
(`coding_times`), of which `price` makes a table."""

from paceline.profiling.busy import coding_times_of_busy
from paceline.profiling.coding import coding_times, measure_coding
from paceline.profiling.gradients import KeptGradients
from paceline.profiling.habits import StepHabits
from paceline.profiling.prices import Price, Unsuited, check_workers, price
from paceline.profiling.steps import WARM_UP_STEPS, Profiler, times_of, with_times

__all__ = [
    "WARM_UP_STEPS",
    "KeptGradients",
    "Price",
    "Profiler",
    "StepHabits",
    "Unsuited",
    "check_workers",
    "coding_times",
    "coding_times_of_busy",
    "measure_coding",
    "price",
    "times_of",
    "with_times",
]
