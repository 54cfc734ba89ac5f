"""Server processes: start, watch, snapshot and end them.

- `service_registry`: the kinds of services: one row each.
- `service_processes`: a worker's service process, which starts services on request.
- `__main__`: one server process, started by a supervisor.
- `control`: messages between these and whoever starts them.
- `host`, `dedicated_server`: ``paceline serve``: servers that were there before their job.
- `monitors`: workers that a server takes for lost.
- `surviving`, `snapshot`: servers that come back, and the file that they come back from.
- `metrics`: counts for Prometheus.
"""
