"""Every fault that `paceline doctor` names, made and named; and healthy networks, on which it names none.

    python -m benchmarks.measure.doctor --virtual            # no clock of this machine counts: about 8 minutes
    python -m benchmarks.measure.doctor --emulated           # an idle machine, root: about 12 minutes
    python -m benchmarks.measure.doctor                      # both
    python -m benchmarks.measure.doctor --only slow-link --runs 1
    python -m benchmarks.measure.doctor --virtual --store    # runs all anew

Each run is `paceline doctor SCRIPT` as a user starts it, on another place, or of another size. What is
done stands in --output and is not done again. Right is: this fault and no other, where it is.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import stored

HERE = Path(__file__).parent
SCRIPT = str(HERE / "doctor_training.py")
RUNS, HEALTHY_RUNS = 5, 10


@dataclass
class Case:
    """A cluster file's text, and what runs on it. *names*: faults that are right; *location*: theirs. *made*: variables of the environment, or what `doctor_in_namespaces` is to make."""

    cluster: str
    names: tuple[str, ...] = ()
    location: str = ""
    script: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    made: dict = field(default_factory=dict)
    runtime: str = "simulated"


def rack(workers, mbit, more="", latency="50 us"):
    """A [[rack]] table."""
    link = mbit if isinstance(mbit, str) else f'"{mbit} Mbit/s"'
    text = f'[[rack]]\nworkers = {workers}\nlink = {link}\nlatency = "{latency}"\n'
    return f"{text}{more}\n"


def rule(action, at, more=""):
    """A [[rule]] table."""
    return f'[[rule]]\nat = "{at:g} s"\n{action}\n{more}\n'


def rates(values):
    """One for each host of a rack."""
    return "[" + ", ".join(f'"{value} Mbit/s"' for value in values) + "]"


# ---- faults ----


def slow_link(rnd):
    """One host's, both ways."""
    count, mbit = rnd.choice((4, 6, 8)), rnd.choice((200, 400, 1000))
    bad = rnd.randrange(count)
    links = [mbit // rnd.choice((4, 10)) if i == bad else mbit for i in range(count)]
    where, script = f"worker {bad}", ("--megabytes", str(mbit / 100))
    return Case(rack(count, rates(links)), ("slow-link",), where, script)


def one_direction(rnd):
    count, mbit = rnd.choice((4, 6, 8)), rnd.choice((200, 400, 1000))
    bad, way = rnd.randrange(count), rnd.choice(("out", "in"))
    slow = f'throttle = "worker {bad} {way}"'
    text = rack(count, mbit) + rule(slow, 0, f'rate = "{mbit // 5} Mbit/s"')
    word = {"out": "outgoing", "in": "incoming"}[way]
    script = ("--megabytes", str(mbit / 100))
    return Case(text, ("slow-link",), f"{word} link of worker {bad}", script)


def slow_path(rnd):
    """What only two neighbours in the ring share, in one direction or in both."""
    count, mbit = rnd.choice((4, 6, 8)), rnd.choice((200, 400, 1000))
    one = rnd.randrange(count)
    other, rate = (one + 1) % count, f'rate = "{mbit // rnd.choice((4, 10))} Mbit/s"'
    text = rack(count, mbit) + rule(
        f'throttle = "worker {one} to worker {other}"', 0, rate
    )
    where = f"worker {one} to worker {other}"
    if rnd.random() < 0.5:
        text += rule(f'throttle = "worker {other} to worker {one}"', 0, rate)
        where = f"between worker {min(one, other)} and worker {max(one, other)}"
    script = ("--megabytes", str(mbit / 100))
    return Case(text, ("slow-path",), where, script)


def scarce_uplink(rnd):
    each, mbit = rnd.choice((3, 4)), rnd.choice((400, 1000))
    uplink = f'uplink = "{int(mbit * rnd.choice((0.25, 0.5)))} Mbit/s"'
    text = rack(each, mbit, uplink) * 2
    script = ("--megabytes", str(mbit / 80))
    where = f"between workers 0 to {each - 1} and workers {each} to {2 * each - 1}"
    return Case(text, ("scarce-uplink",), where, script)


def contention(rnd):
    """Somebody else takes three quarters of a link, now and then."""
    count, mbit = rnd.choice((4, 6)), rnd.choice((200, 400))
    bad, at, rules = rnd.randrange(count), 0.0, ""
    for _ in range(60):
        for rate in (mbit / 4, mbit):
            slow = f'throttle = "worker {bad}"'
            rules += rule(slow, at, f'rate = "{rate:g} Mbit/s"')
            at += rnd.uniform(0.3, 0.9)
    script = ("--megabytes", str(mbit / 100))
    where = f"worker {bad}"
    return Case(rack(count, mbit) + rules, ("contention",), where, script)


def slow_host(rnd):
    count = rnd.choice((4, 6, 8))
    bad, factor = rnd.randrange(count), rnd.choice((0.5, 0.7))
    speeds = [factor if i == bad else 1.0 for i in range(count)]
    return Case(rack(count, 1000, f"speed = {speeds}"), ("slow-host",), f"worker {bad}")


def slow_input(rnd):
    count = rnd.choice((2, 4, 8))
    bad, seconds = rnd.randrange(count), rnd.choice((0.05, 0.1, 0.3))
    script = ("--wait", str(bad), "--seconds", str(seconds))
    return Case(rack(count, 1000), ("slow-input",), f"worker {bad}", script)


def message_overhead(rnd):
    count = rnd.choice((4, 6))
    script = ("--layers", str(rnd.choice((32, 48))), "--megabytes", "2")
    text = rack(count, 1000, latency=f"{rnd.choice((2, 4))} ms")
    options = ("--method", "bsp:buckets=wfbp")
    return Case(text, ("message-overhead",), "every worker", script, options)


def slow_method(rnd):
    """All gradients go over the link of one server's host."""
    count, mbit = rnd.choice((4, 6)), rnd.choice((400, 1000))
    script = ("--megabytes", str(mbit / 100))
    options = ("--method", rnd.choice(("osp", "bsp:collective=parameter-server")))
    return Case(rack(count, mbit), ("slow-method",), "every worker", script, options)


def no_overlap(rnd):
    count, mbit = rnd.choice((4, 8)), rnd.choice((400, 1000))
    script = ("--at-end", "--megabytes", str(mbit / 100))
    return Case(rack(count, mbit), ("no-overlap",), "every worker", script)


def network_too_slow(rnd):
    count, mbit = rnd.choice((2, 4)), rnd.choice((20, 50))
    return Case(rack(count, mbit), ("network-too-slow",), "the whole network")


def cpu_oversubscription(rnd):
    """Two workers a host, each with a thread for each core. One alone cannot have too many by that
    variable: torch takes no more than there are cores."""
    text = rack(2 * rnd.choice((2, 3)), 200, "workers_per_host = 2")
    made = {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    return Case(
        text, ("cpu-oversubscription",), "every host", EMULATED, (), made, "emulated"
    )


def packet_loss(rnd):
    """A link that loses some packets, one way."""
    per_cent = rnd.choice((2, 3, 4))
    made = {"mbit": rnd.choice((100, 200)), "per_cent": per_cent}
    where = "worker 0 to worker 1"
    return Case("", ("packet-loss",), where, EMULATED, (), made, "namespaces")


def contention_emulated(rnd):
    case = contention(rnd)
    case.runtime, case.script = "emulated", EMULATED
    return case


def wrong_interface(rnd):
    """A bridge at a tenth of the cable's rate."""
    made = {"interface": "br0", "mbit": rnd.choice((300, 500))}
    where, script = "every host", EMULATED
    return Case("", ("wrong-interface",), where, script, (), made, "namespaces")


EMULATED = ("--megabytes", "4", "--steps", "16")


# ---- nothing wrong ----


def even(rnd):
    count, mbit = rnd.choice((2, 4, 8)), rnd.choice((400, 1000, 2500))
    return Case(rack(count, mbit))


def uneven(rnd):
    """Half of the hosts have half the link, and enough of it; speeds differ by a few percent."""
    count = rnd.choice((4, 6, 8))
    links = [1000 if i % 2 else 500 for i in range(count)]
    speeds = [round(rnd.uniform(0.95, 1.0), 3) for _ in range(count)]
    return Case(rack(count, rates(links), f"speed = {speeds}"))


def two_racks(rnd):
    each = rnd.choice((2, 3, 4))
    return Case(rack(each, 1000, f'uplink = "{each} Gbit/s"') * 2)


def even_emulated(rnd):
    text = rack(rnd.choice((2, 3, 4)), rnd.choice((200, 400)))
    return Case(text, script=EMULATED, runtime="emulated")


VIRTUAL = {
    "slow-link": slow_link,
    "one direction": one_direction,
    "slow-path": slow_path,
    "scarce-uplink": scarce_uplink,
    "contention": contention,
    "slow-host": slow_host,
    "slow-input": slow_input,
    "message-overhead": message_overhead,
    "slow-method": slow_method,
    "no-overlap": no_overlap,
    "network-too-slow": network_too_slow,
    "healthy, even": even,
    "healthy, uneven": uneven,
    "healthy, two racks": two_racks,
}
REALTIME = {
    "cpu-oversubscription": cpu_oversubscription,
    "packet-loss": packet_loss,
    "contention, emulated": contention_emulated,
    "wrong-interface": wrong_interface,
    "healthy, emulated": even_emulated,
}


# ---- two machines, as a job knows them ----

# Two network namespaces, joined by a cable (eth1) and by bridges at a tenth of its rate (br0).
# Packets can be lost on the cable. Needs root, ip and tc; for losses clang and a kernel with BPF.
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


# ---- runs ----


def command(case, file):
    """What a user types."""
    words = [sys.executable, "-m", "paceline", "doctor", SCRIPT, "--json", "--no-html"]
    words += ["--runtime", case.runtime, "--cluster", file, *case.options]
    return [*words, "--", *case.script]


def run(case):
    """The diagnosis, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(case.cluster)
        if case.runtime == "namespaces":
            text = doctor_in_namespaces(SCRIPT, case.script, **case.made)
        else:
            done = subprocess.run(
                command(case, str(file)),
                env=os.environ | case.made,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode not in (0, 1):
                raise SystemExit(f"{' '.join(done.args)}\n{done.stderr}")
            text = done.stdout
    return json.loads(text)


def is_right(case, found):
    """Whether it names what was made, where, and nothing else."""
    faults = found["faults"]
    names = tuple(fault["name"] for fault in faults)
    return names == case.names and all(f["location"] == case.location for f in faults)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--only", choices=VIRTUAL | REALTIME)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--output", type=Path, default=Path("paceline-doctor.jsonl"))
    stored.add_option(parser)
    arguments = parser.parse_args()
    with stored.Store("doctor", arguments.store) as store:
        examine(arguments, store)


def examine(arguments, store):
    """Runs and prints all cases that were asked for, and adds them to a `stored.Store`."""
    both = arguments.virtual == arguments.emulated
    cases = (VIRTUAL if both or arguments.virtual else {}) | (
        REALTIME if both or arguments.emulated else {}
    )
    if arguments.only:
        cases = {arguments.only: (VIRTUAL | REALTIME)[arguments.only]}
    # Lines of the output may be of other commits.
    done = {} if arguments.store else read(arguments.output)
    for name, make in cases.items():
        usual = HEALTHY_RUNS if name.startswith("healthy") else RUNS
        for number in range(arguments.runs or usual):
            if (name, number) in done:
                continue
            case, start = make(random.Random(f"{name}/{number}")), time.monotonic()
            found = run(case)
            line = {
                "name": name,
                "run": number,
                "right": is_right(case, found),
                "seconds": round(time.monotonic() - start, 1),
                "faults": found["faults"],
                "step": found["step_seconds"],
                "predicted": found["predicted_seconds"],
            }
            with arguments.output.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
            done[name, number] = line
            said = "; ".join(f"{f['name']}, {f['location']}" for f in found["faults"])
            print(f"{name} {number}: {'right' if line['right'] else 'WRONG'}: {said}")
    show(cases, done)
    for name in cases:
        right, runs = count(name, done)
        store.add(f"{name}, right", right)
        store.add(f"{name}, runs", runs)


def count(name, done):
    """How many diagnoses of a case were right, and how many were made."""
    mine = [line for (which, _), line in done.items() if which == name]
    return sum(line["right"] for line in mine), len(mine)


def read(file):
    """What has been run."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {(line["name"], line["run"]): line for line in lines}


def show(cases, done):
    """How many were right."""
    print("\n| made | right |\n|---|---|")
    for name in cases:
        right, runs = count(name, done)
        print(f"| {name} | {right} of {runs} |")


# ---- the table of docs ----

BETWEEN_PROCESSES = {
    "contention, emulated": ("contention", "emulated"),
    "cpu-oversubscription": ("CPU oversubscription", "emulated"),
    "packet-loss": ("packet loss", "real job in two network namespaces"),
    "wrong-interface": ("wrong interface", "real job in two network namespaces"),
    "healthy, emulated": ("healthy", "emulated"),
}
"""Cases of `REALTIME`: their titles and runtimes."""
TITLES = {
    "slow-link": "slow link, both ways",
    "one direction": "slow link, one direction",
    "slow-path": "slow path between two hosts, in one direction or both",
}
"""Titles that say more than a case's name."""


def table():
    """Rows of the table of docs: fault, runtime, right diagnoses."""
    figures = stored.Figures("doctor")

    def right(name):
        parts = [figures.text(f"{name}, {what}", ".0f") for what in ("right", "runs")]
        return " of ".join(parts)

    for name in VIRTUAL:
        title = TITLES.get(name, name.replace("-", " "))
        yield [title, "simulated", right(name)]
    for name, (title, runtime) in BETWEEN_PROCESSES.items():
        yield [title, runtime, right(name)]


if __name__ == "__main__":
    main()
