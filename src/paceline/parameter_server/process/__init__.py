"""Starts, monitors, snapshots and ends server processes.

- `host`: a server process: one loop, one port, and the services of all its trainings; start here.
- `services`: the kinds of services, one row each, and their factories.
- `__main__`: a server process that a worker or a supervisor starts.
- `control`: lines between such a process and its parent.
- `serve`: the implementation of ``paceline serve``.
- `monitors`: observe the traffic of a service, and evict silent workers.
- `surviving`, `snapshot`: servers that restart, and the file from which they continue.
- `metrics`: counters for Prometheus.
- `logs`: log lines of these processes.
"""
