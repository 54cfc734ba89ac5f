"""What starts the processes of a job that survives on many machines: it knows each one's words,
and starts who ended badly again with the same ones. Nothing else."""

from dataclasses import dataclass, field
from pathlib import Path

from tests.support.hanging import free_port
from tests.support.lives import START_SECONDS
from tests.support.processes import BAD_END_SECONDS, PACELINE, SCRIPTS, Job, wait_until

TOKEN = "a token of many machines"


@dataclass
class Engine:
    """A server and *workers* workers that run ``survive.py`` with *what* in *folder*."""

    folder: Path
    workers: int
    method: str
    what: str
    serve: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    """All that were ever started, in order."""

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.port = free_port()
        self.lives: dict[str, int] = {}
        self.now: dict[str, Job] = {}
        """By name: the one that runs, or has ended well."""
        self.ends: list[tuple[str, int | None]] = []
        """Who has ended badly, and how."""
        for name in ("server", *map(str, range(self.workers))):
            self.start(name)

    def start(self, name: str) -> None:
        life = self.lives[name] = self.lives.get(name, -1) + 1
        words = ["run", "--survive", "--server", f"127.0.0.1:{self.port}"]
        words += ["--rank", name, "--workers", str(self.workers)]
        words += [f"--method={self.method}", str(SCRIPTS / "survive.py")]
        words += [str(self.folder), self.what]
        if name == "server":
            words = ["serve", "--survive", "--once", f"--workers={self.workers}"]
            words += [f"--port={self.port}", *self.serve]
        # Which life it is is for the script's notes alone.
        self.now[name] = self.start_other(f"{name}-{life}", words, {"LIFE": str(life)})

    def start_other(
        self, name: str, words: list[str], environment: dict[str, str]
    ) -> Job:
        """Something that is not started again."""
        everything = {
            "PACELINE_SERVERS_TOKEN": TOKEN,
            **self.environment,
            **environment,
        }
        job = Job([*PACELINE, *words], self.folder / name, everything, forked="all")
        self.jobs.append(job)
        return job

    def look(self) -> None:
        """Start again who has ended badly."""
        for name, job in list(self.now.items()):
            if job.process.poll():
                self.ends.append((name, job.status))
                job.stop()
                self.start(name)

    def wait_for(self, condition, what: str) -> None:
        def holds() -> bool:
            self.look()
            return bool(condition())

        try:
            wait_until(holds, START_SECONDS, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def wait(self) -> None:
        """Until all have ended well."""
        self.wait_for(
            lambda: all(job.process.poll() == 0 for job in self.now.values()), "the end"
        )
        for job in self.now.values():
            job.wait(BAD_END_SECONDS).check_nothing_left()

    def stop(self) -> None:
        for job in self.jobs:
            job.stop()

    @property
    def output(self) -> str:
        return "\n".join(f"=== {job.folder.name}\n{job.output}" for job in self.jobs)

    def said(self, name: str) -> str:
        """What all lives of one have said."""
        mine = [job for job in self.jobs if job.folder.name.startswith(f"{name}-")]
        return "\n".join(job.stderr for job in mine)
