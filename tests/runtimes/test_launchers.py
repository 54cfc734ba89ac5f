"""Which worker a process is, by the variables that launchers set, and those lying around."""

import pytest

from paceline.errors import UsageError
from paceline.runtimes.launchers import Place, find, first_host, lone_rank, tasks_on

# What Slurm sets for the shell of an allocation, for a batch script, and for a step's task.
ALLOCATION = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOBID": "12345",
    "SLURM_NTASKS": "3",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_TASKS_PER_NODE": "2,1",
}
BATCH = ALLOCATION | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
TASK = BATCH | {
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}


def mpirun(rank=1, size=2, local_rank=1, local_size=2):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),  # among the node's processes
    }


def mpiexec(rank=1, size=2, local_rank=1, local_size=2):
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(local_size),
    }


MPIRUN, MPIEXEC = mpirun(), mpiexec()
APART = [mpirun(local_size=1), mpiexec(local_size=1)]
"""Of one task on each of two machines."""
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0",
    "PET_MASTER_PORT": "29400",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
BY_TORCHRUN = Place(3, 4, 1, 2, 1, "node0", 29500)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="nothing"),
        pytest.param(ALLOCATION, id="a shell of salloc"),
        pytest.param(BATCH, id="a batch script"),
        pytest.param(BATCH | {"SLURM_STEP_ID": "4294967291"}, id="an older one's"),
        pytest.param(BATCH | {"SLURM_STEP_ID": "batch"}, id="a name"),
        pytest.param(TASK | {"SLURM_STEP_NUM_TASKS": "1"}, id="srun -n1 in it"),
        pytest.param(mpirun(size=1), id="mpirun -n1"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, id="srun --mpi=pmi2 -n1"),
        pytest.param({"MASTER_ADDR": "node0", "MASTER_PORT": "1"}, id="a master alone"),
        pytest.param({"PET_NNODES": "1"}, id="one node of one"),
        pytest.param({"PET_NPROC_PER_NODE": "auto"}, id="torchrun's own default"),
    ],
)
def test_a_job_of_one(environment):
    assert find(environment) is None


AGENT = {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "around", [{}, ALLOCATION, TASK, MPIRUN, MPIEXEC, KUBEFLOW | {"PET_NNODES": "9"}]
)
@pytest.mark.parametrize(
    "started_by", [AGENT, {"RAY_JOB_ID": "01000000"}, {"PACELINE_SURVIVE": "1"}]
)
def test_who_starts_processes_wins_over_what_lies_around(around, started_by):
    assert find(around | TORCHRUN | started_by) == BY_TORCHRUN
    assert BY_TORCHRUN.to_environment() == TORCHRUN


@pytest.mark.parametrize("around", [{}, ALLOCATION, BATCH, KUBEFLOW])
def test_a_bare_rank_wins_over_what_started_something_else(around):
    assert find(around | TORCHRUN) == BY_TORCHRUN


@pytest.mark.parametrize(
    ("launcher", "name", "task"),
    [
        (TASK, "srun", "task 2 of 3"),
        (MPIRUN, "mpirun", "task 1 of 2"),
        (APART[0], "mpirun", "task 1 of 2"),
        (TASK | MPIRUN, "mpirun", "task 1 of 2"),
        (MPIEXEC, "mpiexec", "task 1 of 2"),
    ],
)
def test_a_bare_rank_that_its_launcher_contradicts(launcher, name, task):
    with pytest.raises(UsageError, match=f"RANK=3 and .*{name} started .* as {task}"):
        find(launcher | TORCHRUN)


@pytest.mark.parametrize("launcher", [TASK, MPIRUN, MPIEXEC, TASK | MPIRUN])
def test_a_rank_that_a_script_has_taken_from_its_launcher(launcher):
    place = find(launcher | {"MASTER_ADDR": "node0"})
    taken = {"RANK": str(place.rank), "WORLD_SIZE": str(place.size)}
    assert find(launcher | taken).rank == place.rank


@pytest.mark.parametrize("launcher", [TASK, MPIRUN, MPIEXEC])
def test_jobs_of_their_own_in_one_step(launcher):
    assert find(launcher | {"RANK": "0", "WORLD_SIZE": "1"}) is None


def test_torchrun_alone_in_each_of_several_tasks():
    alone = TORCHRUN | AGENT | {"GROUP_WORLD_SIZE": "1"}
    assert find(ALLOCATION | alone) == BY_TORCHRUN
    assert find(TASK | {"SLURM_STEP_NUM_TASKS": "1"} | alone) == BY_TORCHRUN
    with pytest.raises(UsageError, match=r"srun started 3 tasks.*would train alone"):
        find(TASK | alone)


def test_what_torchruns_variables_leave_open_stays_open():
    place = find({"RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "1"})
    assert place == Place(rank=1, size=2, node=1)
    assert not {"LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(
        place.to_environment()
    )


def test_a_task_of_srun():
    assert find(TASK) == Place(
        rank=2,
        size=3,
        local_rank=0,
        local_size=1,
        node=1,
        master="node07",
        port=32345,
    )


def test_a_step_may_be_smaller_than_its_allocation():
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "node08",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_ID": "4",
    }
    place = find(TASK | step | {"SLURM_PROCID": "1", "SLURM_NODEID": "0"})
    assert (place.rank, place.size, place.local_size) == (1, 2, 2)
    assert place.master == "127.0.0.1"  # all are here
    assert place.port != 32345  # another step may run beside it


def test_a_master_that_is_given_wins():
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    for environment in (TASK, MPIRUN, MPIEXEC):
        place = find(environment | given)
        assert (place.master, place.port) == ("10.0.0.1", 1234)


@pytest.mark.parametrize("environment", [MPIRUN, MPIEXEC])
def test_mpi_on_one_machine(environment):
    place = find(environment)
    assert place == Place(1, 2, 1, 2, 0, "127.0.0.1", place.port)
    assert 20000 <= place.port < 40000
    assert find(environment | {"PMIX_NAMESPACE": "a", "HYDRA_JOBID": "a"}) != place


def srun(rank, local_rank, node):
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
    }


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("mapping", ["by slot", "by node"])
def test_a_nodes_number_is_what_its_launcher_says_or_nobody_does(mapping, rank):
    """Two nodes with two workers each: rank divided by workers of a node is right for one mapping alone."""
    slot = divmod(rank, 2)
    node, local_rank = slot if mapping == "by slot" else slot[::-1]
    for environment, told in (
        (mpirun(rank, 4, local_rank), None),
        (mpiexec(rank, 4, local_rank), None),
        (srun(rank, local_rank, node), node),
    ):
        place = find(environment | {"MASTER_ADDR": "node0"})
        assert place == Place(rank, 4, local_rank, 2, told, "node0", place.port)
        assert ("GROUP_RANK" in place.to_environment()) == (told is not None)


@pytest.mark.parametrize("environment", [*APART, {"PMI_RANK": "0", "PMI_SIZE": "2"}])
def test_mpi_on_several_machines_needs_a_master(environment):
    with pytest.raises(UsageError, match=r"started 2 workers.*MASTER_ADDR.*torchrun"):
        find(environment)
    assert find(environment | {"MASTER_ADDR": "node0"}).master == "node0"


@pytest.mark.parametrize("launched", APART, ids=["mpirun", "mpiexec"])
def test_daemons_of_mpi_are_tasks_of_a_step_too(launched):
    place = find(TASK | launched)
    assert (place.rank, place.size, place.master) == (1, 2, "node07")


def test_what_srun_says_for_mpi_is_less_than_it_says_for_itself():
    assert find(TASK | {"PMI_RANK": "2", "PMI_SIZE": "3"}) == find(TASK)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"PET_NPROC_PER_NODE": "2"},
        {"PET_NPROC_PER_NODE": "auto"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"},
        {"PET_NNODES": "1:4"},
    ],
)
def test_torchruns_options_do_not_suffice_without_torchrun(change):
    with pytest.raises(UsageError, match="torchrun or paceline run"):
        find(KUBEFLOW | change)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("head", "head"),
        ("head,node1", "head"),
        ("node[1-4]", "node1"),
        ("node[01-03,07],gpu1", "node01"),
        ("node[007]", "node007"),
        ("rack[2-3]n[5,7-9]-ib,x", "rack2n5-ib"),
        ("a-b.cluster.org", "a-b.cluster.org"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "node[1-", "node[]", "[", ",", "a b", "n[x]"])
def test_what_is_no_list_of_nodes(nodelist):
    with pytest.raises(UsageError, match="list of nodes"):
        first_host(nodelist)


def test_tasks_per_node():
    assert [tasks_on(node, "2(x3),1") for node in range(4)] == [2, 2, 2, 1]
    for text in ("2(x3),1", "", "2(x", "a"):
        with pytest.raises(UsageError, match="tasks per node"):
            tasks_on(4, text)


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_what_is_no_number_is_named(variable):
    with pytest.raises(
        UsageError, match=f"{variable}: expected a whole number, got 'x'"
    ):
        find(TORCHRUN | {variable: "x"})


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "2"},
        TORCHRUN | {"RANK": "4"},
        TORCHRUN | {"RANK": "-1"},
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "0"},
        TASK | {"SLURM_PROCID": "3"},
        mpirun(rank=2),
    ],
)
def test_a_rank_that_there_is_not_is_refused_before_anybody_waits_for_it(environment):
    with pytest.raises(UsageError, match=r"rank .* expected 0"):
        find(environment)


def test_a_rank_may_be_all_that_a_worker_is_told():
    assert lone_rank({"RANK": "2"}) == 2
    assert lone_rank({"RANK": "2", "WORLD_SIZE": ""}) == 2
    assert lone_rank({}) is lone_rank(TORCHRUN) is lone_rank(TASK) is None


POD = {
    "RANK": "1",
    "WORLD_SIZE": "16",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
} | (KUBEFLOW | {"PET_NPROC_PER_NODE": "8"})
"""Of a PyTorchJob: RANK is the pod's number, WORLD_SIZE counts processes."""


def test_a_pod_of_several_processes_whose_script_was_started_once():
    with pytest.raises(UsageError, match="PET_NNODES=2 and PET_NPROC_PER_NODE=8"):
        find(POD)
    assert find(POD | {"TORCHELASTIC_RUN_ID": "none"}).size == 16
    assert find(POD | {"LOCAL_RANK": "1"}).size == 16, "something has started all"
    assert find(POD | {"WORLD_SIZE": "2"}).size == 2, "one process a pod"
