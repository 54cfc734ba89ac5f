"""The real runtime: one worker per process.

- `runtime`: the runtime itself; start here.
- `launch`: ``paceline run`` over torchrun's launch API.
- `services`, `server_process`: servers, started or found.
- `job_store`: exchanges addresses and tokens between workers through torch's store.
- `cluster_check`: compares the cluster file of a job with its machines.
- `peer_monitor`: informs every survivor which rank died.
- `hang_report`: names the rank that the other ranks wait for.
- `exit`: ends a worker process.
- `supervisor`: ``paceline run --survive``: a job that continues when processes die.
- `survive_policy`: decides how such a job continues when a process ends, as a pure function.
- `external_worker`: one worker of such a job, started by systemd, Kubernetes, Slurm or Ray.
- `compute`: takes a workload's compute times.
"""
