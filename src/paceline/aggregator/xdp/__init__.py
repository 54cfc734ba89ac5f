"""Sums in the kernel's receive path: the protocol of `paceline.aggregator`, as programs for Linux.

- ``aggregate.bpf.c``, with ``slots.h`` (the slot machine), ``seal.h`` (tags) and ``layout.h`` (packets
  and maps): two programs at one interface, one of which adds up and one of which answers.
- `build` compiles them on first use; `libbpf` loads and attaches; `layout` is the maps in Python.
- `kernel` is all of that as one object; `aggregator` is the control side in front of it.

Optional: it needs clang, libbpf, Linux 6.6 and root's rights. The aggregator in user space
(`paceline.aggregator.udp`) works everywhere, and speaks the same protocol.
"""
