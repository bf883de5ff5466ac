"""``phantom doctor``: whether this machine and these ranks compute, exchange, train and fail as they should.

A check is an entry of `CHECKS`: a function that every rank calls with its device. What is exact is compared exactly:
exchanged values are small integers. Losses are compared with those of one CPU rank with the same initial weights.
"""

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phantom_parallel.checkpoint.model import load_model, save_model
from phantom_parallel.cli.exit_codes import FAILED
from phantom_parallel.cli.options import LaunchOptions
from phantom_parallel.cost.calibrate import DTYPES, time_calls
from phantom_parallel.distributed.launch import launch, launch_device_type, launch_local
from phantom_parallel.distributed.launchers import external_ranks, is_rank_zero, launched_externally
from phantom_parallel.distributed.objects import all_gather_objects, broadcast_from_rank_zero
from phantom_parallel.distributed.process_group import ParallelContext, accelerators, device_reason, run_line
from phantom_parallel.distributed.signals import RankDied
from phantom_parallel.energy.results import Component
from phantom_parallel.energy.sensors import discover
from phantom_parallel.families.gpt.generation import generate
from phantom_parallel.families.registry import get_family
from phantom_parallel.ops import collectives
from phantom_parallel.ops.collectives import RankGroup, process_group
from phantom_parallel.study.runner import environment
from phantom_parallel.study.units import digits
from phantom_parallel.train import train
from phantom_parallel.train.checkpoint import list_checkpoints
from phantom_parallel.utils.files import json_text, read_json, write_text
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.parsing import choose_from
from phantom_parallel.utils.strategies import STRATEGIES

SECONDS = 240.0  # after which a check is ended
PRODUCT_ERRORS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}  # relative to the largest value
LOSS_ERRORS = {"fp32": 1e-4, "bf16": 3e-2}  # relative
SIZE = 256  # of the square matrices that are multiplied
SHORT, LONG = 1 << 10, 4 << 20  # bytes that a rank sends each other one, for the latency and for the rate
STOP_TIMEOUT = 5.0  # seconds that ranks wait for the stopped one
_OUTPUT = 8_000  # characters of a failed check's output in the file
_VARIABLES = (
    *("NCCL_", "RCCL_", "TORCH_NCCL_", "FI_", "GLOO_", "OMP_", "MASTER_", "CUDA_", "HIP_", "ROCR_", "HSA_", "ZE_"),
    *("PYTORCH_", "MPICH_", "UCX_", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE"),
)


class Outcome(NamedTuple):
    """What a check saw: one figure to print, details for the file, and what is wrong."""

    figure: str
    details: dict[str, Any]
    problems: list[str]


@dataclass(frozen=True, kw_only=True)
class Options(LaunchOptions):
    """Check this machine: run about ten short checks, each in a process of its own, and print a line for each.

    Run it first on any new machine, and attach the file of --json to a bug report. Under torchrun, srun or mpirun the
    checks run on the ranks that were started, in the current folder, which all of them must see. Checks: facts,
    products, exchanges, overlap, ffn, gpt, blocking, training, stopped, sensors. Exit codes: 0 all passed or were
    skipped, 1 a check failed, 2 invalid option.
    """

    ranks: int | None = None
    """Ranks to check; by default one for each accelerator, 2 without any, or as many as the launcher started."""
    only: str | None = None
    """Run this check alone, with the output of its ranks and without a time limit."""
    json: Path | None = None
    """File for facts and results, as JSON."""

    def run(self) -> None:
        if self.only is not None and self.only not in CHECKS:
            raise ValueError(f"there is no check {self.only!r}: {choose_from(self.only, CHECKS)}")
        if self.hosts is not None and launched_externally():
            raise ValueError("emulated hosts are for ranks that this command starts itself: leave out --hosts, --link")
        ranks = self.ranks
        if ranks is None:
            ranks = external_ranks() if launched_externally() else accelerators()[1] or 2
        positive(ranks=ranks)
        records, lost = list[dict[str, Any]](), ""  # the check in which ranks of another launcher were lost
        for name in CHECKS if self.only is None else (self.only,):
            started = time.monotonic()
            if lost:
                outcome: dict[str, Any] = {"status": "skipped", "figure": f"the ranks were lost in {lost}"}
            elif launched_externally() or self.only is not None:
                outcome = self._check(name, ranks)
                lost = name if "output" in outcome else ""
            else:
                outcome = self._in_own_process(name, ranks)
            seconds = round(time.monotonic() - started, 2)
            by = " by the same launcher" * launched_externally()
            repeat = f"phantom {shlex.join(self._command(name, ranks)[3:])}{by}"
            records.append({"name": name, "seconds": seconds, "repeat": repeat} | outcome)
            if is_rank_zero():
                _show(records[-1])
                if self.json is not None:  # after every check: the next may end the process
                    facts = next((record.get("details") for record in records if record["name"] == "facts"), None)
                    command = ["phantom", *sys.argv[1:]]
                    report = {"ranks": ranks, "command": command, "facts": facts, "checks": records}
                    write_text(self.json, json_text(report))
        statuses = [record["status"] for record in records]
        if is_rank_zero() and self.only is None:
            counts = f"{statuses.count('FAILED')} of {len(records)} checks failed, {statuses.count('skipped')} skipped"
            print(counts if self.json else f"{counts}; --json FILE writes what to attach to a report")
        if "FAILED" in statuses:
            raise SystemExit(FAILED)

    def _command(self, name: str, ranks: int) -> list[str]:
        """The command that runs a check alone with the same options."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {field.name: values[field.name] for field in fields(self) if values[field.name] != field.default}
        given |= {"only": name, "ranks": ranks}
        words = [(f"--{key.replace('_', '-')}", str(value)) for key, value in given.items() if key != "json"]
        return [sys.executable, "-m", "phantom_parallel.cli.main", "doctor", *(word for pair in words for word in pair)]

    def _in_own_process(self, name: str, ranks: int) -> dict[str, Any]:
        """The outcome of a check by a command of its own, which ends with its ranks when its time is up."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "record.json")
            command = [*self._command(name, ranks), "--json", os.fspath(file)]
            joined: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "check": False}
            try:
                done = subprocess.run(command, timeout=SECONDS, **joined)
                output, reason = done.stdout, f"ended with exit code {done.returncode}"
            except subprocess.TimeoutExpired as error:  # it was killed, and its ranks end with it
                output, reason = error.stdout or b"", f"not done after {SECONDS:g} s"
            end = {"output": output.decode(errors="replace")[-_OUTPUT:]}
            with suppress(ValueError, OSError):
                record: dict[str, Any] = read_json(file)["checks"][0]
                return record | (end if record["status"] == "FAILED" else {})
            return {"status": "FAILED", "figure": reason} | end

    def _check(self, name: str, ranks: int) -> dict[str, Any]:
        """The outcome of a check in this process, whose ranks are launched here or are those of another launcher."""
        reasons = {
            "needs at least 2 ranks": name in NEED_OTHERS and ranks == 1,
            "needs ranks that this command starts itself": name in LAUNCHING and launched_externally(),
        }
        try:
            with self.launching(ranks, announces=False):
                reasons["ranks use the CPU"] = name == "blocking" and launch_device_type(ranks) == "cpu"
                if reason := next((reason for reason, applies in reasons.items() if applies), None):
                    return {"status": "skipped", "figure": reason}
                outcome = CHECKS[name](ranks) if name in LAUNCHING else launch(ranks, CHECKS[name])
        except Exception as error:
            summary = " ".join(str(error).split()) or type(error).__name__
            return {"status": "FAILED", "figure": summary, "output": traceback.format_exc()[-_OUTPUT:]}
        return {"status": "FAILED" if outcome.problems else "ok", **outcome._asdict()}


def _show(record: dict[str, Any]) -> None:
    """Print a record: a line, and for a failure what is wrong and how to repeat it."""
    figure, problems = record["figure"], record.get("problems", [])
    if record["status"] == "FAILED" and not problems:
        figure, problems = "", [figure]
    print(f"{record['status']:<8}{record['name']:<10}{record['seconds']:6.1f} s  {figure}".rstrip())
    why = record.get("details", {}).get("why")
    repeat = f"repeat it: {record['repeat']}" if problems else None
    for line in filter(None, [*problems, why, repeat]):
        print(f"        {line}")
    sys.stdout.flush()


def facts(device: torch.device) -> Outcome:
    own = {
        "host": platform.node(),
        "device": str(device),
        "visible": accelerators()[1],
        "threads": torch.get_num_threads(),
        "why": device_reason(_ranks_on_host(), device),
    }
    if device.type != "cpu":
        own["memory"] = torch.accelerator.get_memory_info(device)[1]
    gathered = _gather(own)
    details = {
        **environment(device),
        "why": gathered[0]["why"],
        "ranks_on": gathered,
        "platform": platform.platform(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": str(torch.cuda.nccl.version()) if device.type == "cuda" else None,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }
    kinds = {rank["device"].partition(":")[0] for rank in gathered}
    problems = [f"ranks use different types of devices: {', '.join(sorted(kinds))}"] if len(kinds) > 1 else []
    return Outcome(run_line(device), details, problems)


def products(device: torch.device) -> Outcome:
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


def exchanges(device: torch.device) -> Outcome:
    details, problems, groups = dict[str, Any](), list[str](), _groups(device)
    for place, group in groups.items():
        for name, dtype in DTYPES.items():
            for op, wrong in _inexact(group, dtype, device).items():
                if wrong:
                    problems.append(f"{op} of {name} among {group.size} ranks ({place}): {wrong} values are wrong")
        for op in ("all_gather", "reduce_scatter"):
            calls = [_exchange(op, group, length // 4, device) for length in (SHORT, LONG)]
            short, long = (_seconds(call, device) for call in calls)
            rate = (group.size - 1) * LONG / long
            details[f"{op} {place}"] = {"seconds": short, "bytes_per_second": rate, "ranks": group.size}
    problems = sorted({problem for others in _gather(problems) for problem in others})
    figures = [details[f"all_gather {place}"] for place in groups]
    figure = ", ".join(f"{1e6 * f['seconds']:,.0f} us, {f['bytes_per_second'] / 1e9:.3g} GB/s" for f in figures[-2:])
    return Outcome(f"{figure}{' (inside, between nodes)' if len(figures) > 1 else ''}", details, problems)


def _groups(device: torch.device) -> dict[str, RankGroup]:
    """All ranks, and on several nodes with as many each those inside this one and those of this place on each."""
    local, size = _gather(_ranks_on_host()), dist.get_world_size()
    meshes = {"all": ParallelContext.create(size, 1, device).tp}
    if 1 < local[0] < size and size % local[0] == 0 and len(set(local)) == 1:
        levels = ParallelContext.create(local[0], size // local[0], device)
        meshes |= {"inside": levels.tp, "between": levels.dp}
    return {name: process_group(mesh.get_group(), device.type) for name, mesh in meshes.items() if mesh is not None}


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


def _exchange(op: str, group: RankGroup, words: int, device: torch.device) -> Callable[[], Any]:
    x = torch.ones(*(() if op == "all_gather" else (group.size,)), 16, words // 16, device=device)
    return lambda: getattr(collectives, op)(x, group)


def overlap(device: torch.device) -> Outcome:
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


def _ffn_cases(ranks: int) -> dict[str, dict[str, Any]]:
    blocks = ranks * max(1, 4 // ranks)
    sizes = {"width": 64 * blocks, "depth": max(4, ranks + ranks % 2), "batch": 16 * ranks, "samples": 64 * ranks}
    # Smooth, so that no rounding decides which features are active.
    common = {**sizes, "activation": "tanh", "optimizer": "sgd", "lr": 0.5, "steps": 3}
    own: Any = {"phantom": {"blocks": blocks, "ghosts": 4}, "lowrank": {"low_rank": 8, "lr": 0.01}}
    names = [name for name, strategy in STRATEGIES.items() if ranks == 1 or not strategy.single_rank]
    cases = {name: {**common, "strategy": name, **own.get(name, {})} for name in names}
    return cases | {"phantom bf16": cases["phantom"] | {"dtype": "bf16"}}


def _gpt_cases(ranks: int) -> dict[str, dict[str, Any]]:
    blocks = ranks * max(1, 4 // ranks)
    sizes = {"dim": 16 * blocks, "heads": blocks, "hidden": 32 * blocks, "layers": 2, "context": 32, "batch": 4}
    vocab = {} if 256 % blocks == 0 else {"vocab": -(-256 // blocks) * blocks}
    common = {**sizes, **vocab, "max_bytes": 100_000, "eval_windows": 4, "optimizer": "sgd", "lr": 0.5, "steps": 3}
    phantom = {**common, "strategy": "phantom", "blocks": blocks, "ghosts": 4}
    return {"phantom": phantom, "megatron": {**common, "strategy": "megatron"}}


def steps(family: str, device: torch.device) -> Outcome:
    """Compare the losses of a few steps of each training with those of one CPU rank."""
    cases = _ffn_cases(_size()) if family == "ffn" else _gpt_cases(_size())
    parallel, problems, worst = ParallelContext.create(_size(), 1, device), list[str](), 0.0
    losses: dict[str, list[float]] = {}
    for name, settings in cases.items():
        losses[name] = _losses(family, settings, parallel)
        if parallel.rank == 0:
            expected = _losses(family, settings, ParallelContext())
            error = max(abs(loss - right) / abs(right) for loss, right in zip(losses[name], expected, strict=True))
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
    """The steps of ffn with kernels launched one at a time: if only these pass, kernels or copies race."""
    os.environ.update(CUDA_LAUNCH_BLOCKING="1", HIP_LAUNCH_BLOCKING="1")
    return launch(ranks, CHECKS["ffn"])


def training(device: torch.device) -> Outcome:
    """Train, resume, save and load in a folder that all ranks see: under another launcher in the current one."""
    where = Path.cwd() if launched_externally() else None
    folder = Path(broadcast_from_rank_zero(lambda: tempfile.mkdtemp(prefix="phantom-doctor-", dir=where)))
    parallel = ParallelContext.create(_size(), 1, device)
    settings = _gpt_cases(_size())["phantom"] | {"ranks": _size(), "checkpoint_every": 3}
    whole, part = (get_family("gpt").train_config.from_dict(settings | {"steps": count}) for count in (6, 3))
    try:
        model, _ = train(whole, parallel)
        train(part, parallel, checkpoints=folder)
        resumed, _ = train(whole, parallel, checkpoints=folder, resume=list_checkpoints(folder)[-1])
        save_model(resumed, folder / "model")
        loaded = load_model(folder / "model", mesh=parallel.tp, device=device)
    finally:
        if is_rank_zero():
            shutil.rmtree(folder, ignore_errors=True)
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


def stopped(ranks: int) -> Outcome:
    begun: list[float] = []
    timeout = timedelta(seconds=STOP_TIMEOUT)
    try:
        launch_local(ranks, _stop_last, timeout=timeout, on_report=lambda _: begun.append(time.monotonic()))
    except RankDied as error:
        message, seconds = str(error), time.monotonic() - begun[0]
    else:
        return Outcome("", {}, ["ranks did not notice that one of them was stopped"])
    named = f"no answer from rank {ranks - 1};" in message
    figure = f"named after {seconds:.1f} s, of which {STOP_TIMEOUT:g} s are the timeout"
    return Outcome(figure, {"seconds": seconds}, [] if named else [f"rank {ranks - 1} is not named: {message}"])


def _stop_last(device: torch.device, report: Callable[[Any], None]) -> None:
    exchange = _exchange("all_gather", _groups(device)["all"], 64, device)
    exchange()
    report(None)
    if dist.get_rank() == _size() - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    exchange()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    _gather(None)


def sensors(device: torch.device) -> Outcome:
    discovery = discover(device)
    gpus = [spec.id for spec in discovery.specs if spec.component is Component.GPU]
    own = {"host": platform.node(), "device": str(device), "gpus": gpus, "all": [spec.id for spec in discovery.specs]}
    gathered = _gather(own)
    every, gpu = (len({(rank["host"], name) for rank in gathered for name in rank[kind]}) for kind in ("all", "gpus"))
    used = len(gathered) if device.type != "cpu" else 0
    problems = [f"sensors of {gpu} GPUs are counted, and {used} are used"] if gpu > used else []
    details = {"ranks": gathered, "problems": list(discovery.problems), "hints": list(discovery.hints)}
    return Outcome(f"{every} sensors, {gpu} of GPUs for {used} that are used", details, problems)


CHECKS: dict[str, Callable[..., Outcome]] = {
    "facts": facts,  # versions, devices, and why these ranks get this device and backend
    "products": products,  # matrix products of each dtype on every rank's device against the CPU
    "exchanges": exchanges,  # all-gather, reduce-scatter, all-to-all: exactness, latency, rate
    "overlap": overlap,  # share of an exchange that a product hides
    "ffn": partial(steps, "ffn"),  # three steps of every strategy of an FFN against one CPU rank
    "gpt": partial(steps, "gpt"),  # three steps of a transformer by phantom and megatron against one CPU rank
    "blocking": blocking,  # the steps of ffn with kernels launched one at a time
    "training": training,  # train, checkpoint, resume to the same weights, and generate
    "stopped": stopped,  # a rank is stopped: whether and when it is named
    "sensors": sensors,  # energy sensors counted against devices used
}
LAUNCHING = ("blocking", "stopped")  # which are called once, with the number of ranks, and launch them themselves
NEED_OTHERS = ("exchanges", "overlap", "stopped")


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _ranks_on_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", _size()))


def _gather(value: Any) -> list[Any]:
    return all_gather_objects(value, dist.group.WORLD if dist.is_initialized() else None)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Mean seconds of a call over ranks and about a fifth of a second."""
    return time_calls({"": work}, 1, device, seconds=0.2)[""]
