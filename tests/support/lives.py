"""Workers of a job that survives: which life each is in, and how many steps it has done there,
as scripts such as ``survive.py`` note it in a folder."""

from tests.support.hanging import SECONDS
from tests.support.processes import wait_until

START_SECONDS = 2 * SECONDS


def life_of(folder, rank):
    """A worker's process, and which life it is."""
    path = folder / f"process-{rank}"
    return tuple(map(int, path.read_text().split())) if path.exists() else (0, -1)


def done_in(folder, rank, life):
    """How many steps a worker has done in one life."""
    path = folder / f"steps-{rank}-{life}"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def done_by_all(folder):
    """How many steps all have done in all of their lives."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("steps-*"))


def wait_in(job, condition, what):
    def holds():
        assert job.process.poll() is None, f"{what}: the job has ended\n{job.output}"
        return condition()

    try:
        wait_until(holds, START_SECONDS, what)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.output}") from None


def wait_for_steps(job, folder, rank, life, steps):
    wait_in(
        job,
        lambda: life_of(folder, rank)[1] > life or done_in(folder, rank, life) >= steps,
        f"step {steps} in life {life} of worker {rank}",
    )


def servers_of(job):
    """Its server processes, in order of their numbers."""
    found = {}
    for process in job.processes():
        words = job.words_of(process)
        if "paceline.parameter_server.process" in words:
            found[words[words.index("--name") + 1]] = process
    return [process for _, process in sorted(found.items())]


def counts_in(lines):
    """What the last server that ended has counted."""
    words = [line for line in lines.splitlines() if " counted: " in line][-1]
    counts = [
        count.split(" ", 1) for count in words.partition(" counted: ")[2].split(", ")
    ]
    return {what: int(number) for number, what in counts}
