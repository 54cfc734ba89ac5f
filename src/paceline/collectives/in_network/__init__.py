"""Sums formed where the switch is: a program on a host beside it adds up workers' datagrams.

- `packets`: what travels, and how it is known to be genuine.
- `slots`: the slots of one job, after SwitchML and Rina; `best_effort`: those that jobs
  compete for, after ATP, and the server that they fall back to.
- `jobs`: several jobs and their leases.
- `fixed_point`: numbers as integers that add up exactly, without overflow.
- `stream`, `operations`, `forwarding`, `timers`: a worker's side.
- All of these are machines without I/O, and work on whole batches. Sockets are in `server` (the
  aggregator), `client` (a worker's end, on `ends`), `atp_server` (a best-effort job's server) and
  `served` (its workers' ends), over `datagrams`; `registration` is the connection on which a job
  registers.
"""
