"""The real runtime: one worker in one process.

- `runtime`: the runtime itself; start here.
- `launch`: ``paceline run`` over torchrun's launch API.
- `services`, `server_process`: servers, started or found.
- `job_store`: what workers tell each other through torch's store; where everything listens that
  they must reach.
- `cluster_check`: the cluster that a job is told of, and whether it can be right.
- `peer_monitor`: how every survivor learns which rank died.
- `hang_report`: names the rank that the others wait for.
- `exit`: how a worker process ends.
- `supervisor`: ``paceline run --survive``: a job that goes on when processes die.
- `survive_policy`: what such a job does when a process ends, as a pure function of what is known.
- `external_worker`: one worker of such a job, started by systemd, Kubernetes, Slurm or Ray.
- `compute`: takes a workload's compute times.
"""
