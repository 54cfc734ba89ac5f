"""Sums formed where the switch is: a program on a host beside it adds up workers' datagrams.

Modules named as state machines do no I/O and work on whole batches.

- `switchml`, `atp`, `rina`: the collectives; `algorithms`: what they share.
- `aggregation`: which runtime forms the sums, and how.
- `datagram_sums`, `sum_queue`: sums of real and emulated jobs, one queue a thread.
- `job_end`, `lookout`: how ranks find their aggregators and each other.
- `fixed_point`: numbers as integers that add up exactly, without overflow.
- `packets`: the wire format, and how it is authenticated.
- `slots`, `best_effort`: state machines of a job's slots: leased (SwitchML, Rina) or competed for (ATP).
- `jobs`: several jobs and their leases, as a state machine.
- `stream`, `patient_stream`, `operations`, `timers`: a worker's side, as state machines.
- `forwarding`: the next aggregator's side of sums that leave a rack.
- `topology`: a ring of racks; `atp_tree`, `atp_routes`, `atp_pricing`: ATP's tree, routes and cost.
- `server`, `registration`: the aggregator process, and the connection on which jobs register.
- `client`, `ends`, `served`, `ring_session`, `atp_session`: workers' ends, on sockets.
- `atp_server`, `sums_service`: the servers that ATP falls back to.
- `datagrams`, `udp_socket`: UDP sockets, one datagram or a batch a system call.
"""
