"""Collective operations between workers, and the algorithms that form an average.

- `communicator`: the `Comm` that trainings use; start here.
- `torch_group`: its operations by torch.distributed, where processes are real.
- `registry`: `COLLECTIVES`, a row for each algorithm; `make` finds one by name, `attach` uses it for a job's averages.
- `algorithms`: the collectives of the registry.
- `schedules`: all-reduce, broadcast and others as data, and schedules made of schedules.
- `reduce_scatter`: an all-reduce in two halves.
- `execute`: performs a schedule on real tensors, for one rank or for all.
- `pending`: operations under way, and the work that follows them.
- `autotune`: the cheapest collective for a message.
- `timing`: a schedule's time on a cluster, alone or beside other traffic.
- `server_communicator`: averages formed by servers; the `Comm` of workers that meet only there.
- `process_groups`: process groups beside the job's own, and a store without long waits.
- `in_network`: sums formed beside a switch.

Importing this package imports no torch: the aggregator's process needs none.
"""
