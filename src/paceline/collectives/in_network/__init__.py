"""In-network aggregation: a program on a host beside a switch sums workers' chunks, over TCP.

- `algorithms`: SwitchML, Rina and ATP.
- `topology`, `pricing`: which switch or server sums which contributions, and how long it takes.
- `fixed_point`: numbers as integers whose sums are exact and do not overflow.
- `aggregator_addresses`: the addresses of racks' aggregators.
- `worker_sums`: sums of real and emulated jobs; they go around a ring after an aggregator is lost.
- `joining`: how ranks connect to their aggregators and to each other.
- `session`, `stages`: one rank's part of each sum, with connections and without I/O.
- `aggregator`: the chunks of several jobs that share an aggregator's memory, without I/O.
- `wire`, `server`: frames and authentication; the aggregator's process.
- `sums_service`: ATP's servers on dedicated hosts.
"""
