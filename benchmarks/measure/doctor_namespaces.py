"""A real job of two machines, as far as it knows: two network namespaces, joined by a cable (eth1) and by
bridges at a tenth of its rate (br0). Packets can be lost on the cable. Needs root, `ip`, `tc`, and for losses
clang and a kernel with BPF.

    python -m benchmarks.measure.doctor_namespaces
"""

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

SLOW, FAST = "br0", "eth1"
PORT = "29431"
LOSING = """
static unsigned (*const dice)(void) = (void *)7; /* bpf_get_prandom_u32 */
__attribute__((section("tc"), used)) int lose(void *packet)
{{
    return dice() % 1000 < {per_thousand} ? 2 : -1; /* lost, or as ever */
}}
"""


def sh(text):
    subprocess.run(text.split(), check=True, capture_output=True)


@contextmanager
def namespaces(mbit, per_cent):
    """The names of both, for the length of a ``with``."""
    names = [f"doctor{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for name in names:
            sh(f"ip netns add {name}")
        # Others have the numbers in between: as with containers, two ends have different ones.
        sh(f"ip -n {names[0]} link add unused type bridge")
        for port in ("port0", FAST):
            sh(
                f"ip link add {port} netns {names[0]} type veth "
                f"peer name {port} netns {names[1]}"
            )
        for number, name in enumerate(names, 1):
            inside = f"ip -n {name}"
            sh(f"{inside} link add {SLOW} type bridge")
            sh(f"{inside} link set port0 master {SLOW}")
            sh(f"{inside} addr add 10.8.0.{number}/24 dev {FAST}")
            sh(f"{inside} addr add 10.9.0.{number}/24 dev {SLOW}")
            for device in ("lo", "port0", SLOW, FAST):
                sh(f"{inside} link set {device} up")
            for device, rate in (("port0", mbit / 10), (FAST, mbit)):
                sh(
                    f"tc -n {name} qdisc add dev {device} root tbf rate {rate:g}mbit "
                    "burst 128kb latency 50ms"
                )
        if per_cent:
            lose(names[1], per_cent)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def lose(name, per_cent):
    """That part of the packets that come by the cable: of what it cannot send, a TCP would know."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "lose.c", Path(folder) / "lose.o"
        source.write_text(LOSING.format(per_thousand=int(10 * per_cent)))
        sh(f"clang -O2 -target bpf -c {source} -o {made}")
        sh(f"tc -n {name} qdisc add dev {FAST} clsact")
        sh(
            f"tc -n {name} filter add dev {FAST} ingress bpf direct-action "
            f"object-file {made} section tc"
        )


def doctor_in_namespaces(script, arguments, interface=FAST, mbit=200, per_cent=0):
    """What ``paceline doctor`` says, as JSON, of a job that sends over *interface*."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
    with namespaces(mbit, per_cent) as names:
        running = []
        try:
            for number, name in enumerate(names):
                words = ["ip", "netns", "exec", name, sys.executable, "-m", "paceline"]
                words += [
                    "doctor",
                    script,
                    "--json",
                    "--no-html",
                    "--nnodes",
                    "2",
                    "--node-rank",
                ]
                words += [str(number), "--master-addr", "10.8.0.1"]
                words += ["--master-port", PORT, "--", *arguments]
                running.append(
                    subprocess.Popen(
                        words,
                        env=environment,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            said = [one.communicate(timeout=240) for one in running]
        finally:
            for one in running:
                one.kill()
    if running[0].returncode not in (0, 1):
        raise SystemExit("\n".join(errors for _, errors in said))
    return said[0][0]


if __name__ == "__main__":
    from doctor import EMULATED, SCRIPT

    for made in ({}, {"per_cent": 3}, {"interface": SLOW}):
        print(made, doctor_in_namespaces(SCRIPT, EMULATED, **made))
