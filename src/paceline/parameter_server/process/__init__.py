"""Server processes: start, watch, snapshot and end them.

- `host`: a server process: one loop, one port, and the services of all its trainings; start here.
- `services`: the kinds of services, one row each, and what makes one.
- `__main__`: a server process that a worker or a supervisor starts.
- `control`: lines between such a process and its parent.
- `serve`: what ``paceline serve`` does.
- `monitors`: look at the traffic of a service, and take silent workers for lost.
- `surviving`, `snapshot`: servers that come back, and the file that they come back from.
- `metrics`: counts for Prometheus.
- `logs`: log lines of these processes.
"""
