"""Finds out which worker this process is, from its launcher's variables.

================================  ===================================================
``RANK``                          torchrun, `paceline run`, PyTorchJob, Ray, by hand
``OMPI_COMM_WORLD_RANK``          mpirun of Open MPI
``PMI_RANK``                      mpiexec of MPICH and Intel MPI
``SLURM_PROCID`` in a step        srun
================================  ===================================================

The first one that is set counts. Slurm comes after MPI's launchers: these start their daemons by
srun, and workers inherit the variables of the daemons' step.

Variables also exist in shells, where they mean nothing. Slurm sets SLURM_NTASKS for an allocation,
and in a batch script even SLURM_PROCID. Only tasks of srun have a step's number.

Two launchers may both have variables: torchrun under srun, for example, or Ray, whose processes
have those of Ray's own step. Then the launcher that started this process itself counts. The
following cases are errors, since each process would train alone or all processes would have one
rank:

- A bare ``RANK`` differs from the launcher's, because a shell or a job script has set it. With
  ``WORLD_SIZE=1`` it is no error: these are jobs of their own.
- torchrun for one machine runs in each of several tasks.
- A launcher has started several processes that cannot find worker 0.
- torchrun's own variables (``PET_NNODES``) are set, as Kubeflow sets them, without torchrun.

No variable has the address of worker 0. Slurm has a list of nodes, and mpirun on one machine needs
none. In all other cases MASTER_ADDR must be set.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.errors import UsageError

_PORTS = 20000
"""The lowest guessed port: such ports are below those that the kernel assigns itself."""
_NO_STEP = 0xFFFFFFF0
"""Slurm's step numbers from here on are batch scripts, shells and the like, not steps."""
_START = "start it with torchrun or paceline run"


@dataclass(frozen=True)
class Place:
    """One worker's place in its job.

    Attributes:
        rank: Its rank.
        size: Number of workers.
        local_rank: Its rank on its machine.
        local_size: Workers on its machine; 0: unknown.
        node: Its machine's number; None: unknown.
        master: Address of worker 0; empty: unknown.
        port: Port of worker 0's store; 0: unknown.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 0
    node: int | None = None
    master: str = ""
    port: int = 0

    def to_environment(self) -> dict[str, str]:
        """Return the same place in torchrun's variables."""
        variables = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size or "",
            "GROUP_RANK": "" if self.node is None else self.node,
            "MASTER_ADDR": self.master,
            "MASTER_PORT": self.port or "",
        }
        return {name: str(value) for name, value in variables.items() if value != ""}


ALONE = Place(rank=0, size=1)


def find(environment: Mapping[str, str]) -> Place | None:
    """Return the place that *environment* gives this process; None: it is a job of one.

    Raises `UsageError` if this is one of several processes that cannot find each other, or a
    variable has an invalid value.
    """
    for look in (_by_rank, _by_open_mpi, _by_pmi, _by_slurm):
        place = look(environment)
        if place is not None:
            _check_rank(place)
            return None if replace(place, node=None) == ALONE else place
    _check_torchrun_is_there(environment)
    return None


def _check_rank(place: Place) -> None:
    """Raise `UsageError` for a rank out of range: the other workers would wait for a valid one."""
    if not 0 <= place.rank < place.size:
        raise UsageError(
            f"this process is to be rank {place.rank} of {place.size} workers, as the variables "
            f"of its launcher say: expected 0 to {place.size - 1}, and RANK never without "
            "WORLD_SIZE"
        )


def lone_rank(environment: Mapping[str, str]) -> int | None:
    """Return the rank of a process that knows only its rank; None: it knows more, or nothing.

    Its server knows the number of workers. Raises `UsageError` for a rank that is no number.
    """
    if not environment.get("RANK") or environment.get("WORLD_SIZE"):
        return None
    return _whole(environment, "RANK")


def check_lone_rank(environment: Mapping[str, str], rank: int) -> None:
    """Raise `UsageError` if the launcher of this process gives it another rank than *rank*.

    Then RANK was set for all tasks, and all of them would be one worker.
    """
    if _START_THEMSELVES.search("\n".join(environment)):
        return
    name, launched = _launched_by(environment)
    if launched is not None and launched.rank != rank:
        raise UsageError(
            f"RANK={rank}, but {name} started this process as task {launched.rank} of {launched.size}: unset "
            f"RANK, which some shell or job script has set for all tasks; or, if it is right, give "
            f"--rank {rank}"
        )


# ---- launchers ----


def _by_rank(environment: Mapping[str, str]) -> Place | None:
    if "RANK" not in environment:
        return None
    names = ("GROUP_RANK", "NODE_RANK")
    node = next((name for name in names if environment.get(name)), None)
    place = Place(
        rank=_whole(environment, "RANK"),
        size=_whole(environment, "WORLD_SIZE", 1),
        local_rank=_whole(environment, "LOCAL_RANK", 0),
        local_size=_whole(environment, "LOCAL_WORLD_SIZE", 0),
        node=None if node is None else _whole(environment, node),
        master=environment.get("MASTER_ADDR", ""),
        port=_whole(environment, "MASTER_PORT", 0),
    )
    _check_agreement(environment, place)
    _check_torchrun_is_there(environment)
    return place


def _check_agreement(environment: Mapping[str, str], place: Place) -> None:
    """Raise `UsageError` if the launcher of this process contradicts RANK."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in environment
    if not under_torchrun and _START_THEMSELVES.search("\n".join(environment)):
        return
    name, launched = _launched_by(environment)
    if launched is None:
        return
    if under_torchrun:
        if environment.get("GROUP_WORLD_SIZE") == "1":
            raise UsageError(
                f"{name} started {launched.size} tasks, and torchrun in each of them knows of no other: "
                f"each would train alone. Leave torchrun out ({name} python train.py), tell it of "
                f"all (--nnodes {launched.size} --rdzv-endpoint HOST:PORT), or, where these are "
                "trainings of their own, start each as one task"
            )
    elif place.size > 1 and (place.rank, place.size) != (launched.rank, launched.size):
        raise UsageError(
            f"RANK={place.rank} and WORLD_SIZE={place.size}, but {name} started this process as "
            f"task {launched.rank} of {launched.size}: unset RANK and WORLD_SIZE, which some shell or job "
            f"script has set for all tasks; or, if they are right, what {name} has set"
        )


def _launched_by(environment: Mapping[str, str]) -> tuple[str, Place | None]:
    """Return the launcher that started this process as one of several, and its place; or none."""
    # The address of worker 0 does not matter here.
    anywhere = {"MASTER_ADDR": "localhost", **environment}
    looks = {"mpirun": _by_open_mpi, "mpiexec": _by_pmi, "srun": _by_slurm}
    places = ((name, look(anywhere)) for name, look in looks.items())
    name, place = next((one for one in places if one[1] is not None), ("", None))
    return name, None if place == ALONE else place


def _check_torchrun_is_there(environment: Mapping[str, str]) -> None:
    """Raise `UsageError` if torchrun's variables name several processes, and torchrun is missing.

    In a pod of a PyTorchJob, RANK counts pods in this case, and WORLD_SIZE processes.
    """
    if "TORCHELASTIC_RUN_ID" in environment or "LOCAL_RANK" in environment:
        return
    nodes = environment.get("PET_NNODES") or "1"
    each = environment.get("PET_NPROC_PER_NODE") or "1"
    if "RANK" in environment:
        counts_pods = environment["RANK"] == environment.get("PET_NODE_RANK")
        lacks_torchrun = counts_pods and environment.get("WORLD_SIZE") != nodes
        lacks_torchrun = lacks_torchrun and each.isdecimal()
    else:
        lacks_torchrun = nodes != "1" or each.isdecimal()
    if lacks_torchrun and (nodes, each) != ("1", "1"):
        raise UsageError(
            f"PET_NNODES={nodes} and PET_NPROC_PER_NODE={each} are for torchrun, and this "
            f"script was started without it: each process would train alone; {_START}"
        )


_START_THEMSELVES = re.compile(r"^(RAY_|PACELINE_SURVIVE$)", re.MULTILINE)
"""Variables of programs other than torchrun that start processes inside another launcher's
tasks."""


def _by_open_mpi(environment: Mapping[str, str]) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    size = _whole(environment, "OMPI_COMM_WORLD_SIZE")
    if size == 1:
        return ALONE
    local_size = _whole(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", 0)
    rank = _whole(environment, "OMPI_COMM_WORLD_RANK")
    job = _first(environment, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return Place(
        rank=rank,
        size=size,
        local_rank=_whole(environment, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        local_size=local_size,
        node=_only_node(size, local_size),
        master=_master(
            environment, "mpirun", "mpirun -x MASTER_ADDR=HOST", size, local_size
        ),
        port=_port(environment, zlib.crc32(job.encode())),
    )


def _by_slurm(environment: Mapping[str, str]) -> Place | None:
    step = _step(environment)
    if step is None or "SLURM_PROCID" not in environment:
        return None
    of_step = "SLURM_STEP_NUM_TASKS" in environment
    size = _whole(environment, "SLURM_STEP_NUM_TASKS" if of_step else "SLURM_NTASKS", 1)
    if size == 1:
        return ALONE
    node = _whole(environment, "SLURM_NODEID", 0)
    tasks = _first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    job = _first(environment, "SLURM_JOB_ID", "SLURM_JOBID")
    # Steps of one job may run at the same time, and so may jobs with adjacent numbers.
    number = (int(job) if job.isdecimal() else 0) + 1009 * step
    local_size = tasks_on(node, tasks) if tasks else 0
    return Place(
        rank=_whole(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_whole(environment, "SLURM_LOCALID", 0),
        local_size=local_size,
        node=node,
        master=_master(
            environment, "srun", "export MASTER_ADDR=HOST", size, local_size
        ),
        port=_port(environment, number),
    )


def _step(environment: Mapping[str, str]) -> int | None:
    """Return the number of the step that this process is in."""
    text = _first(environment, "SLURM_STEP_ID", "SLURM_STEPID")
    return int(text) if text.isdecimal() and int(text) < _NO_STEP else None


def _by_pmi(environment: Mapping[str, str]) -> Place | None:
    if "PMI_RANK" not in environment or "PMI_SIZE" not in environment:
        return None
    if _step(environment) is not None and "MPI_LOCALNRANKS" not in environment:
        # srun has started it.
        return None
    size = _whole(environment, "PMI_SIZE")
    if size == 1:
        return ALONE
    local_size = _whole(environment, "MPI_LOCALNRANKS", 0)
    rank = _whole(environment, "PMI_RANK")
    job = _first(environment, "HYDRA_JOBID", "PMI_PORT", "SLURM_JOB_ID")
    return Place(
        rank=rank,
        size=size,
        local_rank=_whole(environment, "MPI_LOCALRANKID", 0),
        local_size=local_size,
        node=_only_node(size, local_size),
        master=_master(
            environment, "mpiexec", "mpiexec -genv MASTER_ADDR HOST", size, local_size
        ),
        port=_port(environment, zlib.crc32(job.encode())),
    )


# ---- values of launchers' variables ----


def _only_node(size: int, local_size: int) -> int | None:
    """Return the node's number under an MPI launcher: known only if there is a single node.

    Ranks need not be numbered node by node (``mpirun --map-by node``), and
    OMPI_COMM_WORLD_NODE_RANK numbers the processes of a node.
    """
    return 0 if local_size == size else None


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's list: ``gpu[07-09,12],head`` begins with gpu07.

    Raises `UsageError` for text that is no such list.
    """
    # Take the text up to the first comma outside brackets.
    match = re.match(r"(?:[^\[\],]|\[[^\[\]]*\])+(?=,|$)", nodelist)
    name = "" if match is None else match.group()
    first = re.sub(r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]", r"\1", name)
    if not re.fullmatch(r"[\w.:-]+", first):
        raise UsageError(
            f"expected a list of nodes such as node[01-03,07],head, got {nodelist!r}"
        )
    return first


def tasks_on(node: int, text: str) -> int:
    """Return the tasks on a node, from Slurm's list for all: ``2(x3),1`` is 2, 2, 2, 1.

    Raises `UsageError` for text that is no such list, or too short.
    """
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            break
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    raise UsageError(
        f"expected Slurm's tasks per node, such as 2(x3),1, for this node too, got {text!r}"
    )


def _master(
    environment: Mapping[str, str], launcher: str, how: str, size: int, local_size: int
) -> str:
    given = environment.get("MASTER_ADDR")
    if given:
        return given
    if local_size == size:
        return "127.0.0.1"
    lists = ["SLURM_JOB_NODELIST", "SLURM_NODELIST"]
    if launcher == "srun":
        # Under mpirun this lists its daemons' nodes, and may lack mpirun's own.
        lists.insert(0, "SLURM_STEP_NODELIST")
    for name in lists:
        if environment.get(name):
            return first_host(environment[name])
    raise UsageError(
        f"{launcher} started {size} workers, and no variable says on which machine worker 0 "
        f"is: {how}, the same for all, or {_START}"
    )


def _first(environment: Mapping[str, str], *names: str) -> str:
    """Return the first non-empty value of these variables."""
    return next(filter(None, map(environment.get, names)), None) or ""


def _port(environment: Mapping[str, str], number: int) -> int:
    """Return a port that all workers of a job compute alike, and other jobs rarely use."""
    if environment.get("MASTER_PORT"):
        return _whole(environment, "MASTER_PORT")
    return _PORTS + number % _PORTS


def _whole(
    environment: Mapping[str, str], variable: str, default: int | None = None
) -> int:
    text = environment.get(variable) or ("" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"environment variable {variable}: expected a whole number, got {text!r}"
        ) from None
