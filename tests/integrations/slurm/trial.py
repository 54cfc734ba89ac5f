"""Trials on a real Slurm: prints what each came to, and fails where one is not as it should be.

sudo tests/integrations/slurm/cluster.sh 4 .venv/bin/python tests/integrations/slurm/trial.py

Not run by CI: it needs root, and Debian's slurm-wlm and munge. Tasks of one step meet as plain
``python`` under ``srun``, without torchrun.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent
DIGITS = [sys.executable, str(ROOT / "examples" / "digits.py"), "--epochs"]
PACELINE = [sys.executable, "-m", "paceline"]
LIMIT = 200
PROMPT_SECONDS = 30


class Step:
    """A step of srun, its output in a file."""

    def __init__(self, folder, options, command, **environment):
        self.path = Path(tempfile.mkstemp(dir=folder)[1])
        words = ["srun", "--overcommit", "--label", *options, *command]
        own = {"OMP_NUM_THREADS": "1", "PACELINE_JSON": "1"}
        with self.path.open("wb") as output:
            self.process = subprocess.Popen(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own, **environment},
            )

    @property
    def output(self):
        return self.path.read_text(errors="replace")

    def wait(self, seconds=LIMIT):
        self.process.wait(seconds)
        return self

    def wait_for(self, words, seconds=LIMIT):
        deadline = time.monotonic() + seconds
        while words not in self.output:
            assert time.monotonic() < deadline, f"no {words!r}\n{self.output}"
            assert self.process.poll() is None, self.output
            time.sleep(0.05)

    def task(self, rank):
        """The process of a task."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = (entry / "environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            is_script = any(word.endswith("digits.py") for word in words)
            if (
                is_script
                and "srun" not in words[0]
                and f"SLURM_PROCID={rank}" in variables
            ):
                return int(entry.name)
        raise AssertionError(f"task {rank} does not run\n{self.output}")


def say(what, step, seconds=None):
    took = "" if seconds is None else f", {seconds:.1f} s after the kill"
    print(f"{what}: exit status {step.process.returncode}{took}", flush=True)
    for line in step.output.splitlines():
        if re.search(r"paceline:|Error|error:|accuracy|\"runtime\"", line):
            print(f"    {line[:220]}", flush=True)


def trains(folder, tasks, nodes):
    step = Step(folder, ["-n", str(tasks), "-N", str(nodes)], [*DIGITS, "2"]).wait()
    say(f"{tasks} tasks on {nodes} nodes", step)
    assert step.process.returncode == 0, step.output
    assert f'"workers":{tasks}' in step.output, step.output


def ends_when_one_is_killed(folder, tasks, rank):
    step = Step(folder, ["-n", str(tasks), "-N", "2"], [*DIGITS, "1000"])
    step.wait_for("epoch 1")
    os.kill(step.task(rank), signal.SIGKILL)
    began = time.monotonic()
    step.wait(PROMPT_SECONDS)
    say(f"{tasks} tasks, {rank} killed", step, time.monotonic() - began)
    assert step.process.returncode != 0
    others = set(range(tasks)) - {rank}
    for other in others:
        assert re.search(
            rf"^{other}: paceline: rank {rank} .*rank {other} ends too",
            step.output,
            re.MULTILINE,
        ), step.output


def refuses_another_launchers_variables(folder):
    options = ["-n", "2", "-N", "2"]
    step = Step(folder, options, [*DIGITS, "1"], RANK="0", WORLD_SIZE="2").wait()
    say("RANK=0 exported", step)
    assert step.process.returncode != 0
    assert "RANK=0 and WORLD_SIZE=2, but srun started this process as" in step.output
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    words = [DIGITS[0], *torchrun, *DIGITS[1:], "1"]
    step = Step(folder, options, words).wait()
    say("torchrun of one machine in two tasks", step)
    assert "each would train alone" in step.output


def survives(folder):
    """The server is a step of its own, and a task's shell starts its worker again."""
    port = "29655"
    common = {"PACELINE_SERVERS_TOKEN": "a token of this trial"}
    serve = [*PACELINE, "serve", "--survive", "--once", "--workers=2", f"--port={port}"]
    serve += [f"--snapshot={folder}/snapshot"]
    server = Step(folder, ["-n1", "-N1", "--overlap"], serve, **common)
    run = " ".join(
        [*PACELINE, "run", "--survive", f"--server=127.0.0.1:{port}", "--method=asp"]
    )
    script = f"{DIGITS[1]} --epochs 6"
    loop = f"for life in 1 2 3; do {run} {script} && exit 0; done; exit 1"
    options = ["-n", "2", "-N", "2", "--overlap"]
    step = Step(folder, options, ["bash", "-c", loop], **common)
    step.wait_for("epoch 1")
    os.kill(step.task(1), signal.SIGKILL)
    step.wait()
    server.wait(PROMPT_SECONDS)
    say("survives: the server", server)
    say("survives: the workers", step)
    assert step.process.returncode == server.process.returncode == 0
    assert "Killed" in step.output, step.output


def runs_the_job_script(folder):
    job = ROOT / "examples" / "slurm.sbatch"
    subprocess.run(["sbatch", "--test-only", str(job)], check=True)
    output = Path(folder) / "output"
    words = ["sbatch", "--wait", f"--output={output}", f"--chdir={ROOT}", str(job)]
    own = {"PACELINE_SERVERS_TOKEN": "a token of this trial", "OMP_NUM_THREADS": "1"}
    own["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    status = subprocess.run(words, env={**os.environ, **own}, timeout=LIMIT).returncode
    print(f"the job script: exit status {status}\n{output.read_text()}", flush=True)
    assert status == 0
    assert "paceline: the training is over" in output.read_text()


def main():
    trials = {
        "train": lambda folder: [trains(folder, 2, 2), trains(folder, 4, 2)],
        "kill": lambda folder: [
            ends_when_one_is_killed(folder, 2, 1),
            ends_when_one_is_killed(folder, 4, 0),
            ends_when_one_is_killed(folder, 4, 2),
        ],
        "refuse": refuses_another_launchers_variables,
        "survive": survives,
        "job": runs_the_job_script,
    }
    for name in sys.argv[1:] or trials:
        with tempfile.TemporaryDirectory() as folder:
            trials[name](folder)


if __name__ == "__main__":
    main()
