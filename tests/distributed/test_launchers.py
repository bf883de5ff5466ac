"""Variables of launchers for ranks, translated to torch's, and how such ranks meet."""

import pytest

from phantom_parallel.distributed.launchers import first_host, is_on_first_host, rank_variables, reports_error

# As srun sets them for the sixth task of --nodes 2 --ntasks 8.
STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "frontier[00017-00018]",
}


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-login-77@1",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = {"PALS_RANKID": "5", "PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
JSM = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
}
TORCHRUN = SAME_RANK = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize("environment", [TORCHRUN, STEP, OPEN_MPI, PMI, PALS, FLUX, JSM])
def test_every_launcher_describes_the_same_rank(environment):
    variables = rank_variables(environment | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert variables.items() >= SAME_RANK.items()
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert rank_variables(variables) == variables  # once they are in the environment


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_STEP_NUM_TASKS": "2", **STEP, **OPEN_MPI},  # mpirun starts a daemon on each node with srun
        STEP | PMI | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},  # so does MPICH's mpiexec
        STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"},  # srun --mpi=pmi2
        STEP | TORCHRUN,
    ],
)
def test_of_two_launchers_the_inner_one_counts(environment):
    assert rank_variables(environment).items() >= SAME_RANK.items()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script, before srun
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_elsewhere_there_are_no_ranks(environment):
    assert rank_variables(environment) == {}


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "x"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_a_variable_that_is_missing_or_not_a_number_is_named(environment, variable, monkeypatch):
    with pytest.raises(ValueError, match=f"^{variable}"):
        rank_variables(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_on_first_host()  # the error can be printed
    assert reports_error()


def test_ranks_of_one_host_meet_there_and_others_need_an_address(tmp_path):
    assert rank_variables(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"})["MASTER_ADDR"] == "localhost"
    assert rank_variables(OPEN_MPI)["MASTER_ADDR"] == ""
    (tmp_path / "nodes").write_text("x1000c0s0b0n0\nx1000c0s0b0n1\n")
    assert rank_variables(PALS | {"PBS_NODEFILE": str(tmp_path / "nodes")})["MASTER_ADDR"] == "x1000c0s0b0n0"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        *(("gpu7", "gpu7"), ("a,b", "a"), ("a1,b[2-3]", "a1")),
        *(("gpu[007-009,12],login", "gpu007"), ("nid[001,003]", "nid001"), ("rack[2-3]-ib0", "rack2-ib0")),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first
