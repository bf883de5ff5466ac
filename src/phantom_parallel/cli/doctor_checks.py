"""The checks of ``phantom doctor``: functions of the number of ranks, which launch them and return an `Outcome`.

What is exact is compared exactly: exchanged values are small integers, which every dtype and every order of sums keeps.
Losses are compared with those of the same training on one CPU rank, whose initial weights are the same.
"""

import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.checkpoint.model import load_model, save_model
from phantom_parallel.distributed.launch import launch, launch_device_type, launch_local
from phantom_parallel.distributed.launchers import is_rank_zero, launched_externally
from phantom_parallel.distributed.objects import all_gather_objects
from phantom_parallel.distributed.process_group import (
    ParallelContext,
    accelerators,
    describe_run,
    device_reason,
    run_line,
)
from phantom_parallel.distributed.signals import RankDied
from phantom_parallel.energy.results import Component
from phantom_parallel.energy.sensors import discover
from phantom_parallel.families.gpt.generation import generate
from phantom_parallel.families.registry import get_family
from phantom_parallel.ops import collectives
from phantom_parallel.ops.collectives import RankGroup, process_group
from phantom_parallel.study.units import digits
from phantom_parallel.train import train
from phantom_parallel.train.checkpoint import list_checkpoints
from phantom_parallel.utils.strategies import STRATEGIES

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRODUCT_ERRORS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}  # relative to the largest value
LOSS_ERRORS = {"fp32": 1e-4, "bf16": 3e-2}  # relative
SIZE = 256  # of the square matrices that are multiplied
SHORT, LONG = 1 << 10, 4 << 20  # bytes that a rank sends each other one, for the latency and for the rate
STOP_TIMEOUT = 5.0  # seconds that ranks wait for the stopped one
_VARIABLES = (
    *("NCCL_", "RCCL_", "TORCH_NCCL_", "FI_", "GLOO_", "OMP_", "MASTER_", "CUDA_", "HIP_", "ROCR_", "HSA_", "ZE_"),
    *("PYTORCH_", "MPICH_", "UCX_", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE"),
)


class Outcome(NamedTuple):
    """What a check saw: one figure to print, details for the file, and what is wrong."""

    figure: str
    details: dict[str, Any]
    problems: list[str]


class Skipped(Exception):
    """A check that cannot run here, with the reason."""


def facts(ranks: int) -> Outcome:
    return launch(ranks, _facts)


def _facts(device: torch.device) -> Outcome:
    own = {
        "host": platform.node(),
        "device": str(device),
        "visible": accelerators()[1],
        "threads": torch.get_num_threads(),
        "why": device_reason(int(os.environ.get("LOCAL_WORLD_SIZE", _size())), device),
    }
    if device.type != "cpu":
        own["memory"] = torch.accelerator.get_memory_info(device)[1]
    gathered = _gather(own)
    nccl = str(torch.cuda.nccl.version()) if device.type == "cuda" else None
    details = {
        **describe_run(device),
        "why": gathered[0]["why"],
        "ranks_on": gathered,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl,
        "fp32_products": torch.get_float32_matmul_precision(),  # highest: without tf32
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }
    kinds = {rank["device"].partition(":")[0] for rank in gathered}
    problems = [f"ranks use different types of devices: {', '.join(sorted(kinds))}"] if len(kinds) > 1 else []
    return Outcome(run_line(device), details, problems)


def products(ranks: int) -> Outcome:
    return launch(ranks, _products)


def _products(device: torch.device) -> Outcome:
    rates: dict[str, float] = {}
    errors: dict[str, float] = {}
    for name, dtype in DTYPES.items():
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
        expected = a.double() @ b.double()
        on_device = a.to(device), b.to(device)
        try:
            result = torch.mm(*on_device).cpu().double()
        except RuntimeError:  # not every device has every dtype
            continue
        errors[name] = float((result - expected).abs().max() / expected.abs().max())
        rates[name] = 2 * SIZE**3 / _seconds(lambda pair=on_device: torch.mm(*pair), device)  # type: ignore[misc]
    gathered = _gather(errors)
    problems = [
        f"rank {rank}, {name}: relative error {error:.1e} of a product, expected at most {PRODUCT_ERRORS[name]:.0e}"
        for rank, by_dtype in enumerate(gathered)
        for name, error in by_dtype.items()
        if not error <= PRODUCT_ERRORS[name]
    ]
    figure = ", ".join(f"{name} {digits(rates[name] / 1e9)}" for name in rates) + " GFLOP/s a rank"
    return Outcome(figure, {"flops": rates, "errors": gathered, "size": SIZE}, problems)


def exchanges(ranks: int) -> Outcome:
    _need_ranks(ranks)
    return launch(ranks, _exchanges)


def _exchanges(device: torch.device) -> Outcome:
    details, problems, groups = dict[str, Any](), list[str](), _groups(device)
    for place, group in groups.items():
        for name, dtype in DTYPES.items():
            for op, wrong in _inexact(group, dtype, device).items():
                if wrong:
                    problems.append(f"{op} of {name} among {group.size} ranks ({place}): {wrong} values are wrong")
        for op in ("all_gather", "reduce_scatter"):
            for name in ("fp32", "bf16"):
                word = DTYPES[name].itemsize
                short, long = (
                    _seconds(_exchange(op, group, length // word, DTYPES[name], device), device)
                    for length in (SHORT, LONG)
                )
                rate = (group.size - 1) * LONG / long
                details[f"{op} {name} {place}"] = {"seconds": short, "bytes_per_second": rate, "ranks": group.size}
    problems = sorted({problem for others in _gather(problems) for problem in others})
    figures = [details[f"all_gather fp32 {place}"] for place in groups]
    figure = ", ".join(f"{1e6 * f['seconds']:,.0f} us, {f['bytes_per_second'] / 1e9:.3g} GB/s" for f in figures[-2:])
    return Outcome(f"{figure}{' (inside, between nodes)' if len(figures) > 1 else ''}", details, problems)


def _groups(device: torch.device) -> dict[str, RankGroup]:
    """All ranks, and on several nodes those inside this one and those of this place on each."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", _size()))
    parallel = ParallelContext.create(_size(), 1, device)
    assert parallel.tp is not None
    groups = {"all": process_group(parallel.tp.get_group(), device.type)}
    if 1 < local < _size() and _size() % local == 0:
        mesh = init_device_mesh(device.type, (_size() // local, local), mesh_dim_names=("between", "inside"))
        groups |= {name: process_group(mesh[name].get_group(), device.type) for name in ("inside", "between")}
    return groups


def _inexact(group: RankGroup, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Number of wrong values of each exchange."""
    rows, columns, size = 3, 5, group.size

    def sent(rank: int) -> Tensor:  # (R, B, c) from -1 to 1
        values = torch.arange(size * rows * columns).view(size, rows, columns)
        return ((values * 7 + rank * 5) % 3 - 1).to(dtype)

    everything = torch.stack([sent(rank) for rank in range(size)])
    own = everything[group.rank].to(device)
    gathered = collectives.all_gather(own[0], group).values
    summed = collectives.reduce_scatter(own, group).values
    swapped = collectives.finish(collectives.start_all_to_all(own.flatten(0, 1), group)).values
    expected = {
        "all-gather": (gathered, everything[:, 0]),
        "reduce-scatter": (summed, everything[:, group.rank].sum(0)),
        "all-to-all": (swapped, everything[:, group.rank]),
    }
    return {name: int((result.cpu() != right).sum()) for name, (result, right) in expected.items()}


def _exchange(op: str, group: RankGroup, words: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    x = torch.ones(*(() if op == "all_gather" else (group.size,)), 16, words // 16, dtype=dtype, device=device)
    return lambda: getattr(collectives, op)(x, group)


def overlap(ranks: int) -> Outcome:
    _need_ranks(ranks)
    return launch(ranks, _overlap)


def _overlap(device: torch.device) -> Outcome:
    group = _groups(device)["all"]
    x, a = torch.ones(256, LONG // 1024, device=device), torch.ones(SIZE, SIZE, device=device)
    product = _seconds(lambda: a @ a, device)
    exchange = _seconds(lambda: collectives.all_gather(x, group), device)
    count = max(1, round(exchange / product))

    def both() -> None:
        pending = collectives.start_all_gather(x, group)
        for _ in range(count):
            a @ a
        collectives.finish(pending)

    together = _seconds(both, device)
    hidden = (count * product + exchange - together) / min(count * product, exchange)
    seconds = {"product": count * product, "exchange": exchange, "together": together}
    return Outcome(f"{min(max(hidden, 0.0), 1.0):.0%} hidden", {"hidden": hidden, "seconds": seconds}, [])


def ffn(ranks: int) -> Outcome:
    return launch(ranks, _steps, "ffn", _ffn_cases(ranks))


def _ffn_cases(ranks: int) -> dict[str, dict[str, Any]]:
    blocks = ranks * max(1, 4 // ranks)
    sizes = {"width": 64 * blocks, "depth": max(4, ranks + ranks % 2), "batch": 16 * ranks, "samples": 64 * ranks}
    # Smooth, so that no rounding decides which features are active.
    common = {**sizes, "activation": "tanh", "optimizer": "sgd", "lr": 0.5, "steps": 3}
    own: dict[str, dict[str, Any]] = {
        "phantom": {"blocks": blocks, "ghosts": 4},
        "lowrank": {"low_rank": 8, "lr": 0.01},
    }
    names = [name for name, strategy in STRATEGIES.items() if ranks == 1 or not strategy.single_rank]
    cases = {name: {**common, "strategy": name, **own.get(name, {})} for name in names}
    return cases | {"phantom bf16": cases["phantom"] | {"dtype": "bf16"}}


def gpt(ranks: int) -> Outcome:
    return launch(ranks, _steps, "gpt", _gpt_cases(ranks))


def _gpt_cases(ranks: int) -> dict[str, dict[str, Any]]:
    blocks = ranks * max(1, 4 // ranks)
    sizes = {"dim": 16 * blocks, "heads": blocks, "hidden": 32 * blocks, "layers": 2, "context": 32, "batch": 4}
    vocab = {} if 256 % blocks == 0 else {"vocab": -(-256 // blocks) * blocks}
    common = {**sizes, **vocab, "max_bytes": 100_000, "eval_windows": 4, "optimizer": "sgd", "lr": 0.5, "steps": 3}
    phantom = {**common, "strategy": "phantom", "blocks": blocks, "ghosts": 4}
    return {"phantom": phantom, "megatron": {**common, "strategy": "megatron"}}


def _steps(device: torch.device, family: str, cases: Mapping[str, dict[str, Any]]) -> Outcome:
    """Compare the losses of a few steps of each training with those of one CPU rank."""
    parallel, problems, worst = ParallelContext.create(_size(), 1, device), list[str](), 0.0
    losses: dict[str, list[float]] = {}
    for name, settings in cases.items():
        losses[name] = _losses(family, settings, parallel)
        if parallel.rank == 0:
            expected = _losses(family, settings, ParallelContext())
            pairs = zip(losses[name], expected, strict=True)
            error = max(abs(loss - right) / abs(right) for loss, right in pairs)
            worst = max(worst, error) if "dtype" not in settings else worst
            if not error <= LOSS_ERRORS[settings.get("dtype", "fp32")]:
                shown = (", ".join(f"{loss:.6g}" for loss in both) for both in (losses[name], expected))
                problems.append("{}: losses {} and on one CPU rank {}".format(name, *shown))
        _gather(None)  # the other ranks wait here and not in an exchange of the next training
    return Outcome(f"{len(cases)} trainings, losses differ by {worst:.1e}", {"losses": losses}, problems)


def _losses(family: str, settings: dict[str, Any], parallel: ParallelContext) -> list[float]:
    """The losses of all steps, on rank 0."""
    ranks = 1 if parallel.tp is None else parallel.tp.size()
    config = get_family(family).train_config.from_dict({**settings, "ranks": ranks, "log_every": 1})
    losses: list[float] = []
    train(config, parallel, report=lambda record: losses.append(record.loss))
    return losses


def blocking(ranks: int) -> Outcome:
    _need_own_ranks()
    if launch_device_type(ranks) == "cpu":
        raise Skipped("ranks use the CPU")
    cases = _ffn_cases(ranks)
    losses = []
    for value in ("0", "1"):
        os.environ.update(CUDA_LAUNCH_BLOCKING=value, HIP_LAUNCH_BLOCKING=value)
        losses.append(launch(ranks, _steps, "ffn", cases).details["losses"])
    problems = [
        f"{name}: losses {losses[0][name]}, with kernels launched one at a time {losses[1][name]}"
        for name, settings in cases.items()
        for pairs in [zip(losses[0][name], losses[1][name], strict=True)]
        if not all(abs(a - b) <= LOSS_ERRORS[settings.get("dtype", "fp32")] * abs(b) for a, b in pairs)
    ]
    return Outcome(f"{len(cases)} trainings, equal with CUDA_LAUNCH_BLOCKING=1", {"losses": losses}, problems)


def training(ranks: int) -> Outcome:
    with _shared_folder() as folder:
        return launch(ranks, _training, folder)


def _training(device: torch.device, folder: Path) -> Outcome:
    parallel = ParallelContext.create(_size(), 1, device)
    settings = _gpt_cases(_size())["phantom"] | {"ranks": _size(), "checkpoint_every": 3}
    whole, part = (get_family("gpt").train_config.from_dict(settings | {"steps": steps}) for steps in (6, 3))
    model, _ = train(whole, parallel)
    train(part, parallel, checkpoints=folder)
    resumed, _ = train(whole, parallel, checkpoints=folder, resume=list_checkpoints(folder)[-1])
    save_model(resumed, folder / "model")
    loaded = load_model(folder / "model", mesh=parallel.tp, device=device)
    pairs = [zip(model.parameters(), other.parameters(), strict=True) for other in (resumed, loaded)]
    differences = [max(float((a - b).detach().abs().max()) for a, b in pair) for pair in pairs]
    prompt = torch.arange(97, 105).unsqueeze(0)
    tokens = [generate(each, prompt, tokens=8).tokens.tolist() for each in (resumed, loaded)]
    gathered = _gather({"resumed": differences[0], "loaded": differences[1], "same": tokens[0] == tokens[1]})
    difference = max(rank["resumed"] for rank in gathered)
    problems = []
    if not difference <= (0.0 if device.type == "cpu" else 1e-3):  # some kernels of accelerators add in any order
        problems.append(f"weights after a resume differ by up to {difference:.1e} from those without one")
    if any(rank["loaded"] != rank["resumed"] or not rank["same"] for rank in gathered):
        problems.append("a model that was saved and loaded has other weights, or generates other tokens")
    figure = "resumed to the same bits" if difference == 0 else f"resumed, weights differ by {difference:.1e}"
    return Outcome(f"{figure}, 8 tokens generated", {"ranks": gathered, "tokens": tokens[0]}, problems)


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """A folder that all ranks see: a temporary one, or under another launcher one in the current folder."""
    if not launched_externally():
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
        return
    folder = Path.cwd() / "phantom-doctor"
    if is_rank_zero():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    try:
        yield folder
    finally:
        if is_rank_zero():
            shutil.rmtree(folder, ignore_errors=True)


def stopped(ranks: int) -> Outcome:
    _need_own_ranks()
    _need_ranks(ranks)
    begun: list[float] = []
    try:
        launch_local(
            ranks,
            _stop_last,
            timeout=timedelta(seconds=STOP_TIMEOUT),
            on_report=lambda _: begun.append(time.monotonic()),
        )
    except RankDied as error:
        message, seconds = str(error), time.monotonic() - begun[0]
    else:
        return Outcome("", {}, ["ranks did not notice that one of them was stopped"])
    named = f"no answer from rank {ranks - 1};" in message
    figure = f"named after {seconds:.1f} s, of which {STOP_TIMEOUT:g} s are the timeout"
    return Outcome(figure, {"seconds": seconds}, [] if named else [f"rank {ranks - 1} is not named: {message}"])


def _stop_last(device: torch.device, report: Callable[[Any], None]) -> None:
    exchange = _exchange("all_gather", _groups(device)["all"], 64, torch.float32, device)
    exchange()
    report(None)
    if dist.get_rank() == _size() - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    exchange()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    _gather(None)


def sensors(ranks: int) -> Outcome:
    return launch(ranks, _sensors)


def _sensors(device: torch.device) -> Outcome:
    discovery = discover(device)
    gpus = [spec.id for spec in discovery.specs if spec.component is Component.GPU]
    own = {"host": platform.node(), "device": str(device), "gpus": gpus, "all": [spec.id for spec in discovery.specs]}
    gathered, problems, counts = _gather(own), list[str](), []
    for host in sorted({rank["host"] for rank in gathered}):
        here = [rank for rank in gathered if rank["host"] == host]
        devices = len(here) if device.type != "cpu" else 0  # several ranks may see theirs as the first
        counted = {name for rank in here for name in rank["gpus"]}
        counts.append((len({name for rank in here for name in rank["all"]}), len(counted), devices))
        if len(counted) > devices:
            problems.append(f"{host}: sensors of {len(counted)} GPUs are counted, and {devices} are used")
    every, gpu, used = (sum(column) for column in zip(*counts, strict=True))
    figure = f"{every} sensors, {gpu} of GPUs for {used} that are used"
    details = {"ranks": gathered, "problems": list(discovery.problems), "hints": list(discovery.hints)}
    return Outcome(figure, details, problems)


def _need_ranks(ranks: int) -> None:
    if ranks == 1:
        raise Skipped("needs at least 2 ranks")


def _need_own_ranks() -> None:
    if launched_externally():
        raise Skipped("needs ranks that this command starts itself")


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(value: Any) -> list[Any]:
    return all_gather_objects(value, dist.group.WORLD if dist.is_initialized() else None)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Mean seconds of a call on the slowest rank, over at most 20 calls and about a fifth of a second."""

    def timed(count: int) -> float:
        _gather(None)
        started = time.perf_counter()
        for _ in range(count):
            work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return max(_gather(time.perf_counter() - started)) / count

    timed(1)
    return timed(min(max(int(0.2 / timed(1)), 1), 20))
