"""The device of a rank, the backend that belongs to it, and the line that says so."""

import pytest
import torch

from phantom_parallel.distributed.launch import MACHINE_RANKS, launch, launch_defaults, launch_device_type
from phantom_parallel.distributed.process_group import backend_for, device_type_for
from phantom_parallel.utils.network import Network
from tests.distributed import workers


@pytest.fixture
def accelerators(monkeypatch):
    """Sets what torch is built for, what is available of it, and how many."""

    def have(built_for, available, count):
        device = None if built_for is None else torch.device(built_for)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available: device if available else None
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch._C, "_get_accelerator", lambda: device or torch.device("cpu"))

    return have


@pytest.mark.parametrize(
    ("built_for", "available", "count", "local_ranks", "device", "backend"),
    [
        (None, False, 0, 4, "cpu", "gloo"),
        ("cuda", False, 0, 2, "cpu", "gloo"),
        ("cuda", True, 2, 4, "cpu", "gloo"),
        ("cuda", True, 4, 4, "cuda", "cpu:gloo,cuda:nccl"),
        ("xpu", True, 2, 2, "xpu", "cpu:gloo,xpu:xccl"),
        ("mps", True, 1, 1, "cpu", "gloo"),
    ],
)
def test_the_backend_is_that_of_the_selected_device(
    accelerators, built_for, available, count, local_ranks, device, backend
):
    accelerators(built_for, available, count)
    assert device_type_for(local_ranks) == device
    assert backend_for(torch.device(device)) == backend


@pytest.mark.parametrize(
    ("variables", "device"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_ID": "0"}, "cuda"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "3"}, "cuda"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "cpu"),
        ({"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "CUDA_VISIBLE_DEVICES": "0"}, "cpu"),
        ({"RANK": "1", "WORLD_SIZE": "2", MACHINE_RANKS: "2", "CUDA_VISIBLE_DEVICES": "0"}, "cpu"),  # a local rank
        ({"SLURM_STEP_ID": "0"}, "cpu"),
    ],
)
def test_a_rank_that_its_launcher_has_bound_to_one_accelerator_uses_it(accelerators, monkeypatch, variables, device):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    accelerators("cuda", True, 1)
    assert device_type_for(2) == device


@pytest.mark.parametrize(("available", "count"), [(False, 0), (True, 2)])
def test_a_device_of_which_there_are_too_few_is_refused(accelerators, available, count):
    accelerators("cuda", available, count)
    with pytest.raises(ValueError, match="device=cuda"):
        device_type_for(4, "cuda")
    assert device_type_for(4, "cpu") == "cpu"
    with launch_defaults(device="cuda"), pytest.raises(ValueError, match="device=cuda"):
        launch_device_type(4)


def test_emulated_hosts_and_accelerators_exclude_each_other(accelerators):
    accelerators("cuda", True, 2)
    assert (launch_device_type(2), launch_device_type(4)) == ("cuda", "cpu")
    with launch_defaults(network=Network(2)):
        assert launch_device_type(2) == "cpu"
    with pytest.raises(ValueError, match="device=cuda"), launch_defaults(network=Network(2), device="cuda"):
        pass


def test_the_first_launch_of_a_command_announces_its_ranks(capfd):
    with launch_defaults(announces=True):
        launch(1, workers.return_nothing)
        launch(1, workers.return_nothing)
    version = ".".join(torch.__version__.split(".")[:2])
    assert capfd.readouterr().err == f"1 rank on 1 host, cpu, torch {version}\n"
