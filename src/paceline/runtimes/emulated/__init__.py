"""Emulates a cluster's shaped network inside one Linux machine, and leaves no trace there.

This file imports nothing: the keeper imports it, and must start without torch. From top to bottom:

- `runtime`: one worker: a real process in an emulated host.
- `launch`: a training job, and its aggregators.
- `network`: hosts, processes in them, rules; start here.
- `link_check`: measures the goodput of each link.
- `machine_check`, `memory`: the features of this machine, and how many hosts fit.
- `keeper_client`, `control_messages`: starts the keeper and sends it requests; a process inside a
  host, seen from outside.
- `permission`: tells a user without permission how to get it.
- `keeper`: the process that holds every namespace, and makes bridges and veth pairs; its death
  removes everything.
- `shaping`: rate, delay and loss of one link.
- `namespaces`: unshare, setns, mount, prctl.
- `kernel_features`: the kernel features that emulation needs.
- `network_plan`: a cluster as hosts and devices; no I/O.
- `errors`: errors, by their cause.
"""
