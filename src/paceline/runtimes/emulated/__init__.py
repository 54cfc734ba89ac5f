"""A cluster's shaped network inside one Linux machine, without a trace left on it.

How the files stack, top to bottom:

    network          what callers use: hosts, processes in them, rules, measuring
    link_check       what each link really gives
    link_trials      which streams find that out
    machine_check    what this machine can do, and how to get the rest
    memory           how many hosts fit
    host_process     a process inside a host, seen from outside
    control          starts the keeper and asks it
    permission       what to say to a user who may not
    keeper           the process that holds every namespace; its death removes everything
    switchboard      namespaces, bridges, veth pairs
    shaping          rate, delay and loss of one link
    spawning         the keeper's own children
    namespaces       unshare, setns, mount, prctl
    kernel_features  what the kernel must have
    control_messages what client and keeper say to each other
    network_plan     a cluster as hosts and devices; no I/O
    errors

This file imports nothing: the keeper imports it, and must start without torch.
"""
