"""What importing paceline adds to importing torch, and how soon the command line answers.

    python -m benchmarks.measure.import_time
    python -m benchmarks.measure.import_time --rounds 21 --modules

Fresh interpreters take turns, so that the machine's moods hit all of them; a difference is of
neighbours in one round. Seconds are the processor's (user and system), which others on the
machine hardly change, and the wall's. ``--modules``: paceline's and others' that cost most.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time

from benchmarks.measure import stored

PUBLIC = (
    "paceline.distribute, paceline.save, paceline.load, paceline.log, paceline.Sampler"
)
CASES = {
    "python": ["-c", "pass"],
    "torch": ["-c", "import torch"],
    "torch, paceline": ["-c", "import torch, paceline"],
    "torch, paceline, used": ["-c", f"import torch, paceline; {PUBLIC}"],
    "paceline --version": ["-m", "paceline", "--version"],
    "paceline --help": ["-m", "paceline", "--help"],
    "paceline run --help": ["-m", "paceline", "run", "--help"],
}
AGAINST = {
    "torch, paceline": "torch",
    "torch, paceline, used": "torch",
    "paceline --version": "python",
    "paceline --help": "python",
    "paceline run --help": "python",
}


def timed(words):
    """Seconds of the processor and of the wall that ``python WORDS`` took."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    if status:
        sys.exit(f"python {' '.join(words)} ended with {status}")
    return used.ru_utime + used.ru_stime, wall


def dearest_modules(words, count):
    """(milliseconds, module), with all that each imports first."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = re.findall(r"\| +(\d+) \| +([\w.]+)", done.stderr)
    others = [
        (int(us) / 1e3, name) for us, name in rows if not name.startswith("torch")
    ]
    return sorted(others, reverse=True)[:count]


def table():
    """Rows of the table of docs: what, figure, command."""
    figures = stored.Figures("import_time")
    command = "`python -m benchmarks.measure.import_time`"
    rows = (
        "torch, processor",
        "torch, paceline, processor, added to torch",
        "torch, paceline, used, processor, added to torch",
    )
    yield [
        "processor seconds of `import torch`; added by `import paceline`; added once public names "
        "are used",
        "; ".join(map(figures.text, rows)),
        command,
    ]
    rows = ("paceline --version, processor", "paceline --help, processor")
    yield [
        "processor seconds of `paceline --version`; of `paceline --help`",
        "; ".join(map(figures.text, rows)),
        command,
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--modules", action="store_true")
    stored.add_option(parser)
    args = parser.parse_args()
    with stored.Store("import_time", args.store) as store:
        compare(args.rounds, store)
    if args.modules:
        for milliseconds, module in dearest_modules(CASES["torch, paceline, used"], 40):
            print(f"{milliseconds:8.1f} ms {module}")


def compare(count, store):
    """Measures and prints medians of *count* rounds, and adds them to a `stored.Store`."""
    for words in CASES.values():
        timed(words)  # compiles, and warms the file cache
    rounds = [
        {name: timed(words) for name, words in CASES.items()} for _ in range(count)
    ]
    print(f"medians of {count} rounds: processor, wall; what it adds, and to what")
    for name in CASES:
        cpu, wall = (statistics.median(r[name][i] for r in rounds) for i in (0, 1))
        line = f"{name:24} {cpu:6.2f} s {wall:6.2f} s"
        store.add(f"{name}, processor", cpu, "s")
        store.add(f"{name}, wall", wall, "s")
        if name in AGAINST:
            base = AGAINST[name]
            more = [
                statistics.median(r[name][i] - r[base][i] for r in rounds)
                for i in (0, 1)
            ]
            store.add(f"{name}, processor, added to {base}", more[0], "s")
            store.add(f"{name}, wall, added to {base}", more[1], "s")
            line += f"   + {more[0]:.2f} s, {more[1]:.2f} s to {base}"
        print(line)


if __name__ == "__main__":
    main()
