"""Runs the tests against random mutants of the source: a measure of the suite.

    make mutants N=200 SEED=0 JOBS=2
    python -m tests.support.mutants --step own  # no run of the whole suite

1. A mutant meets the fast tests of the folder that mirrors its module, until one fails.
2. One run of the fast suite, kept in ``build/mutants``, finds which tests execute the
   survivors' lines: a probe before each notes pytest's current test, also in processes
   that a test starts.
3. A survivor meets these tests, and its row has their number.

A row of ``benchmarks/results/mutants.jsonl`` is one mutant; rows are not run again. After
reading a survivor, write its `verdict` there: ``equivalent: why``, ``message: why`` or
``gap: the test that kills it now``. `by` is ``reading`` if no test has met the mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import json
import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.mutant_operators import ROOT, SOURCE, draw
from tests.support.mutant_runs import SCRATCH, clone, run_tests

RESULTS = ROOT / "benchmarks" / "results" / "mutants.jsonl"
SURVIVOR_SECONDS = 300.0
"""Most seconds of tests that a survivor meets: its fastest tests."""
STEPS = ("own", "covering")
"""Tests that a mutant meets, one step after the other."""
FAST = ("-m", "not slow")
WHOLE = ("tests/conformance", "tests/golden")
"""Tests of whole trainings."""
PROBE = """
import json, os
seen = set()
def hit(key):
    one = key, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if one not in seen:
        seen.add(one)
        with open(f"{FOLDER}/{os.getpid()}", "a") as file:
            file.write(json.dumps(one) + "\\n")
"""


def own_tests(file: str) -> tuple[list[str], list[str]]:
    """Test files that are named as a module, and others of the folder that mirrors it."""
    module = Path(file).relative_to(SOURCE)
    folder = Path("tests") / module.parent
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    top = folder == Path("tests")
    files = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("test_*.py")]
    named = sorted(str(f) for f in files if f.stem.startswith(f"test_{module.stem}"))
    return named, sorted(str(f) for f in files if not top and str(f) not in named)


@contextlib.contextmanager
def mutation(one: dict, tree: Path) -> Iterator[None]:
    """The mutant is in the tree."""
    file = tree / one["file"]
    original = file.read_text()
    file.write_text(one["text"])
    try:
        yield
    finally:
        file.write_text(original)


def meet_own_tests(one: dict, tree: Path, seconds: float) -> dict:
    """The row of a mutant after its mirror folder's tests; without tests if it survives."""
    begin, status, first = time.monotonic(), 0, ""
    row = {name: value for name, value in one.items() if name != "text"}
    with mutation(one, tree):
        for tests in own_tests(one["file"]):
            left = seconds - (time.monotonic() - begin)
            words = ["-x", "-p", "no:cacheprovider", *FAST, *tests]
            if tests and left > 0 and status in (0, 5):
                status, first = run_tests(tree, words, left)
    dead = status not in (0, 5, None)
    row |= {"status": "killed", "test": first or f"exit {status}"} if dead else {}
    return {"status": "survived"} | row | {"seconds": round(time.monotonic() - begin)}


def meet_covering_tests(one: dict, row: dict, tree: Path, found: dict) -> dict:
    """The row of a mutant after all tests that execute its line."""
    begin, total, tests = time.monotonic(), 0.0, []
    seconds = found["seconds"]
    # None executes a line of import time.
    met = found["tests"][one["key"]] or [t for t in seconds if t.startswith(WHOLE)]
    for test in sorted(met, key=seconds.__getitem__):
        total += seconds[test] + 0.02
        if total < SURVIVOR_SECONDS:
            tests.append(test)
    if tests:
        (tree / "build/tests").write_text("\n".join(tests))
        words = ["-x", "-p", "no:cacheprovider", "@build/tests"]
        with mutation(one, tree):
            status, first = run_tests(tree, words, 120 + 4 * total)
        if status != 0:
            row["status"] = "timed out" if status is None else "killed"
            row["test"] = first or f"exit {status}"
    row["seconds"] = round(row["seconds"] + time.monotonic() - begin)
    return row | {"tests": len(tests)}


def find_tests(mutants: list[dict]) -> dict[str, dict]:
    """Tests by mutant, seconds by test: one run of the fast tests with probes."""
    kept, hits = SCRATCH / "tests.json", SCRATCH / "hits"
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["tests"].keys() >= {one["key"] for one in mutants}:
            return found
    tree = clone("probes")
    shutil.rmtree(hits, ignore_errors=True)
    hits.mkdir()
    (tree / SOURCE / "mutant_probe.py").write_text(f"FOLDER = {str(hits)!r}" + PROBE)
    for name in {one["file"] for one in mutants}:
        module = ast.parse((tree / name).read_text())
        for one in mutants:
            if one["file"] == name:
                insert_probe(module, one["line"], one["key"])
        (tree / name).write_text(ast.unparse(ast.fix_missing_locations(module)))
    run_tests(tree, [*FAST], 2 * 3600)
    seconds = json.loads((tree / ".pytest_cache/v/paceline/durations").read_text())
    failed = tree / ".pytest_cache/v/cache/lastfailed"  # they read the source, say
    if failed.exists():
        for test in json.loads(failed.read_text()):
            seconds.pop(test, None)
    tests: dict[str, set[str]] = {one["key"]: set() for one in mutants}
    for file in hits.iterdir():
        for key, test in map(json.loads, file.read_text().splitlines()):
            tests[key] |= {test} & seconds.keys()
    found = {"tests": {k: sorted(v) for k, v in tests.items()}, "seconds": seconds}
    kept.write_text(json.dumps(found))
    return found


def insert_probe(module: ast.Module, line: int, key: str) -> None:
    """Before the innermost statement of a function at the line; import time has none."""
    call = f"__import__('paceline.mutant_probe', fromlist=['hit']).hit({key!r})"
    inner: tuple[list[ast.stmt], ast.stmt] | None = None
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for function in [node for node in ast.walk(module) if isinstance(node, functions)]:
        for node in ast.walk(function):
            for _, body in ast.iter_fields(node):
                for one in body if isinstance(body, list) else ():
                    here = isinstance(one, ast.stmt) and (
                        one.lineno <= line <= one.end_lineno
                    )
                    if here and (inner is None or one.lineno >= inner[1].lineno):
                        inner = body, one
    if inner is not None:
        inner[0].insert(inner[0].index(inner[1]), ast.parse(call).body[0])


def table(rows: list[dict]) -> str:
    """How many of each package were killed, and the survivors."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    columns = ("killed", "timed out", "survived", "equivalent", "message", "gap")
    for row in rows:
        verdict = row.get("verdict", "").partition(":")[0] or row["status"]
        for package in (Path(row["file"]).relative_to(SOURCE).parts[0], "total"):
            counts[package][verdict] += 1
    text = [f"{'package':20}" + "".join(f"{column:>11}" for column in columns)]
    for package in sorted(counts, key=lambda name: (name == "total", name)):
        numbers = "".join(f"{counts[package][column]:11}" for column in columns)
        text.append(f"{package:20}{numbers}")
    for row in (row for row in rows if row["status"] == "survived"):
        text += [
            f"\n{row['file']}:{row['line']} {row['operator']}",
            f"- {row['before']}",
        ]
        text += [f"+ {row['after']}", row.get("verdict", "no verdict yet")]
    return "\n".join(text)


def known() -> dict[str, dict]:
    """The last row of each mutant."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def is_open(row: dict | None) -> bool:
    """Whether a mutant with this row has tests to meet."""
    if row is None:
        return True
    return row["status"] == "survived" and not {"tests", "verdict"} & row.keys()


def write(row: dict) -> None:
    """Add a row, which counts from now on."""
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row["status"], row["file"], row["line"], row.get("test", ""), flush=True)


def work(mutants: list[dict], number: int, seconds: float, found: dict | None) -> None:
    """In a process of its own: run mutants as far as they have not been run."""
    tree = clone(f"tree{number}")
    for one in mutants:
        row = known().get(one["key"])
        if row is None and found is None:
            write(meet_own_tests(one, tree, seconds))
        elif row and found and row["status"] == "survived" and "tests" not in row:
            write(meet_covering_tests(one, row, tree, found))


def main() -> None:
    """Draw, run what has no row yet, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants side by side")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of own tests, at most"
    )
    parser.add_argument("--step", choices=STEPS, help="only this one")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed.run  # noqa: F401 - once for all forks

    SCRATCH.mkdir(parents=True, exist_ok=True)
    mutants = list(draw(options.number, options.seed))
    gc.freeze()
    for step in [options.step] if options.step else STEPS:
        left = [one for one in mutants if is_open(known().get(one["key"]))]
        found = find_tests(left) if left and step == "covering" else None
        children = []
        for number in range(options.jobs):
            children.append(os.fork())
            if children[-1] == 0:
                work(left[number :: options.jobs], number, options.seconds, found)
                os._exit(0)
        for child in children:
            os.waitpid(child, 0)
    rows = known()
    print(table([rows[one["key"]] for one in mutants if one["key"] in rows]))


if __name__ == "__main__":
    main()
