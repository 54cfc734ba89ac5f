"""Collective operations between workers, and the all-reduce algorithms behind them.

- `communicator`: the `Comm` that trainings use; start here.
- `torch_group`: its operations over torch.distributed, in real and emulated jobs.
- `registry`: `COLLECTIVES`, a row for each algorithm; `make` finds one by name, `attach` uses it for a job's averages.
- `algorithms`: the all-reduce algorithms of the registry.
- `schedules`: all-reduce, broadcast and others as data, and combinations of schedules.
- `reduce_scatter`: an all-reduce in two halves.
- `schedule_execution`: performs a schedule on tensors, for one rank or for all ranks at once.
- `gloo_sum`: the bits of gloo's own all-reduce.
- `pending`: handles of operations under way, and the work that follows them.
- `autotune`: chooses the cheapest algorithm for a message size.
- `timing`: the time of a schedule on a cluster, alone or beside other traffic.
- `server_communicator`: all-reduces by parameter servers, and the `Comm` of workers without collectives.
- `process_groups`: extra process groups, and a store that other threads can use while one waits.
- `in_network`: sums formed by aggregators beside switches.

Importing this package imports no torch, because the aggregator's process needs none.
"""
