"""Faults at random instants: jobs whose processes are killed and stopped, seed by seed.

``python -m tests.chaos --seeds 40`` runs real jobs, ``--virtual`` the state machines of servers and aggregators.

- `cases`: what a seed stands for: a job and its faults.
- `job`, `counting`: the script of the job, and its model, whose parameters count gradients.
- `served_job`, `ray_job`: that script under ``paceline serve`` and a process manager, and on Ray.
- `broken_job`: the same script with a defect: the control of an invariant.
- `trial`: one job under way: starts it, injects its faults, waits for its end.
- `invariants`: what must hold when the job has ended.
- `campaign`: one seed from start to end, the restart from its checkpoint or snapshot included.
- `virtual`: the same kind of faults without processes.
- `ports`, `port_servers`: each listening socket, its honest clients, and the process that serves it.
- `port_attacks`: random and mutated messages to each port, and what must hold meanwhile (``--ports``).
"""
