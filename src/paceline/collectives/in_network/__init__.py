"""Sums formed where the switch is: a program on a host beside it adds up workers' chunks, over TCP.

- `algorithms`: SwitchML, Rina and ATP.
- `topology`, `pricing`: who adds up what, and how long it takes.
- `fixed_point`: numbers as integers that add up exactly, without overflow.
- `aggregator_addresses`: where racks' aggregators are.
- `aggregator_sums`: sums of real and emulated jobs; the ring when an aggregator is lost.
- `joining`: how ranks find their aggregators and each other.
- `session`, `stages`: one rank's part of each sum, over connections and without.
- `aggregator`: the chunks of several jobs that share an aggregator's memory, without I/O.
- `wire`, `server`: frames and proofs; the aggregator's process.
- `sums_service`: ATP's servers on hosts of their own.
"""
