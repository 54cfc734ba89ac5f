"""A cluster's shaped network inside one Linux machine, without a trace left on it.

This file imports nothing: the keeper imports it, and must start without torch. From top to bottom:

- `runtime`: one worker: a real process in an emulated host.
- `launch`: a training job, and its aggregators.
- `network`: hosts, processes in them, rules; start here.
- `link_check`: measures the goodput that each link gives.
- `machine_check`, `memory`: what this machine can do, and how many hosts fit.
- `keeper_client`, `control_messages`: starts the keeper and asks it; a process inside a host, seen from
  outside.
- `permission`: what to say to a user who may not.
- `keeper`: the process that holds every namespace, and makes bridges and veth pairs; its death
  removes everything.
- `shaping`: rate, delay and loss of one link.
- `namespaces`: unshare, setns, mount, prctl.
- `kernel_features`: what the kernel must have.
- `network_plan`: a cluster as hosts and devices; no I/O.
- `errors`: what can go wrong, by whose fault it is.
"""
