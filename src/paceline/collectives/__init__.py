"""Collective operations between workers, and the algorithms that form an average.

- `communicator`: the `Comm` over torch.distributed; start here.
- `registry`: `COLLECTIVES`, a row for each algorithm; `make` finds one by name, `over` uses it for a job's averages.
- `algorithms`: the collectives of the registry.
- `schedules`: all-reduce, broadcast and others as data; `composition`: schedules made of schedules.
- `halving_doubling`, `hierarchical`, `reduce_scatter`: one algorithm each.
- `execute`: performs a schedule on real tensors.
- `send_receive`: messages between two ranks.
- `pending`, `continuations`: operations under way, and the work that follows them.
- `autotune`: the cheapest collective for a message.
- `pricing`, `timing`: a schedule's time on a cluster, without and with other traffic.
- `placement`: the rack and host of each rank.
- `ring_order`: adds in gloo's ring order, so that real and simulated runs round alike.
- `server_communicator`: averages formed by a parameter server.
- `process_groups`: process groups beside the job's own, and a store without long waits.
- `no_collectives`: the `Comm` of workers that meet only at their servers.
- `in_network`: sums formed beside a switch.
- `docs_table`: the docs' table of collectives.

Importing this package imports no torch: the aggregator's process needs none.
"""
