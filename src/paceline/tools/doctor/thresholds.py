"""Where a difference becomes a fault: all thresholds, and why they are where they are.

Two things must be true of a fault: it is beyond the noise of what was measured, and mending it
gains something (`GAIN`). So an uneven network that nobody waits for is healthy, and so is a slow
host whose share of the batch is smaller.
"""

from __future__ import annotations

GAIN = 0.05
"""Of a step: what mending must gain, by prediction. Virtual steps are within a few percent of real
ones, and for less nobody walks to a machine."""

SLOW_LINK = 0.7
"""Of the median host's link. Repeats of a goodput differ by a tenth on shared machines, links that
are slow for a cause (100 Mbit/s on a gigabit port, half duplex, a worn cable) by half and more."""

FEW_PATHS = 0.25
"""Of a host's paths, or one of them: so many may be slow by themselves. Of two racks that nobody has
recognized half are slow, and of a link all."""

VARIES = 0.6
"""The least of several repeats over the most, on the median path of a host. Where two share a link in turns it
is a half or less; a shaped or idle one stays above 0.8."""

LOST = 0.005
"""Of segments lost while little is sent. An idle network loses none in thousands; from here on a step of some
hundred segments waits for a retransmission every time."""

FEWEST_REPEATS = 3
"""Of a path's goodput, for anybody to say that it varies."""

CROWDED = 0.7
"""Of what flows get alone, where several leave a group of hosts at once: less is an uplink's doing. Both figures
carry the noise of `SLOW_LINK`."""

EXPLAINS = 0.4
"""Of the squared error of one rack without uplinks: racks that leave more are a coincidence. What is left is
noise, where they are there."""

SLOW_PASSES = 1.15
"""Times the median worker's forward and backward. Equal machines differ by a few percent, by heat and
neighbours."""

FEWEST_WORKERS = 3
"""For one of them to be slower than usual, where each was measured once."""

NOISE = 3.0
"""Standard errors by which a median must differ, too: of few or restless steps no word."""

BUSY = 0.25
"""Of a host's cores kept busy by others: that explains a slow host."""

STARVES = 0.1
"""Of a worker's passes: what it may spend between steps before that is its input's fault. Loaders that run
ahead take a hundredth."""

AT_END = 0.95
"""Of the gradients' bytes in the last tenth of backward: nothing is left to overlap. Large tied
embeddings come last too, and are seldom more than nine tenths of a model."""

START_UP = 0.1
"""Of a step that would be gained if messages began at no cost."""

FASTER_INTERFACE = 2.0
"""Times what the one in use can do."""

NEAR_ITS_LIMIT = 0.4
"""Of what the interface in use can do: a link that gives less is not held up by it."""

TOO_SLOW = 2.0
"""Times a worker's own computing: where the shortest step of any exact mean is longer, more than half of
every machine is lost whatever method sends whole gradients."""

SLOW_METHOD = 1.5
"""Times the step of another method that promises as much, or more: methods of a class differ by less where
each is used as it is meant."""

UNLIKE = 0.15
"""Of a measured step: a prediction of it that is farther off promises no gain."""

HELPS = 0.5
"""Of what the fastest class gains: the strongest promise that gains as much is recommended."""
