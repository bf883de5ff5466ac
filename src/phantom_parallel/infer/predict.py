"""``phantom infer``: predictions for the rows of a file, and what a sample costs against tensor parallelism.

`run` checks the options and launches ranks, or joins those of an external launcher; `predict` writes a .npy file that
appears whole or not at all; `measure` times the model and its baseline on random rows.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.checkpoint.model import CONFIG, family_of, load_model, read_config
from phantom_parallel.distributed.launch import check_memory, launch, launch_device_type
from phantom_parallel.distributed.objects import all_gather_objects, check_agreement
from phantom_parallel.distributed.signals import Interrupted, StopRequest
from phantom_parallel.energy.meter import synchronize
from phantom_parallel.energy.power import PowerProfile
from phantom_parallel.families.registry import get_family
from phantom_parallel.infer.measure import Call, Cost, RunConfig, default_power_profile, measure_calls
from phantom_parallel.nn.sharded import to_local
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.ops.features import gather_features
from phantom_parallel.train.run import MODEL
from phantom_parallel.utils.arrays import FORMATS, StoredArray, open_array, readable
from phantom_parallel.utils.files import atomic_file
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.progress import ProgressDisplay
from phantom_parallel.utils.strategies import get_strategy

# A model that maps rows of features to rows of features: its config has ``model_features``, the numbers of features in
# and out. Where ``shards_features``, its inputs and outputs are this rank's features.
RowModel = Any


@dataclass(frozen=True, kw_only=True)
class InferConfig(RunConfig):
    """What to run and measure by ``phantom infer``."""

    inputs: Path | None = None
    """Rows to predict from: a file .npy, or .npz or .safetensors with an array x, (rows, features). Without it,
    random rows are measured."""
    out: Path | None = None
    """Write the predictions to this .npy file, in the order of the rows. Without it they are discarded."""
    overwrite: bool = False
    """Replace --out if it exists."""
    batch: int = 64
    """Rows of a forward pass."""
    against: Literal["tensor", "none"] = "tensor"
    """Measure the tensor-parallel model that computes the same function as well, or nothing."""
    seed: int = 0
    """Seed of random rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(batch=self.batch)
        for name in ("inputs", "out"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(path).absolute())
        if self.out is not None and self.inputs is None:
            raise ValueError(f"out={self.out} needs inputs to predict from: give a file of them")
        if self.out is not None and (self.out.suffix != ".npy" or self.out == self.inputs):
            raise ValueError(f"out={self.out} is the file of inputs, or not a .npy file: choose another name")


def run(config: InferConfig, *, show: bool = False) -> dict[str, Any]:
    """Predict and measure, with progress on stderr if ``show`` is set. Returns plain data, with the cost of each model
    as ``measured``.
    """
    model = check_model(config.model, config.ranks)
    as_tensor = get_family(model.config.family).require("as_tensor")
    model.config.check_ranks(config.ranks)
    features = model.config.model_features
    if config.inputs is not None:
        open_inputs(config.inputs, features[0])
    power = default_power_profile(config.profile, config.ranks)
    if launch_device_type(config.ranks) == "cpu":  # accelerators have memories of their own
        models = [model, as_tensor(model)] if config.against == "tensor" else [model]
        words = sum(parameter.numel() for each in models for parameter in each.parameters())
        words += 2 * config.batch * sum(features)
        check_memory(config.ranks, words * next(model.parameters()).element_size())
    if config.out is not None:
        if config.out.exists() and not config.overwrite:
            raise FileExistsError(f"{config.out} exists: choose another name, or overwrite it")
        config.out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=config.out.parent).close()  # raises now rather than after all predictions
    result = launch(config.ranks, _work, config, power, show)
    out = None if config.out is None else str(config.out)
    return config.describe(power) | {"batch": config.batch, "out": out, **result}


def check_model(path: Path, ranks: int) -> Any:
    """Check all files of a model, and return it on the meta device, as ``ranks`` ranks load it."""
    return load_model(check_folder(path), device="meta", strategy=strategy_on(path, ranks))


def strategy_on(path: Path, ranks: int) -> str | None:
    """The strategy by which ranks run the model of a folder; None for its own. A dense one runs by the baseline."""
    config = read_config(path)
    return get_family(config.family).baseline if ranks > 1 and get_strategy(config.strategy).single_rank else None


def check_folder(path: Path) -> Path:
    """The folder itself. Raises ValueError if it holds no model, with the folder of a training's model as a hint."""
    hint = f"; did you mean {path / MODEL}?" if (path / MODEL / CONFIG).is_file() else ""
    if not (path / CONFIG).is_file():
        raise ValueError(f"{path} is not a model folder: there is no {CONFIG} in it{hint}")
    try:
        family_of(path)
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from None
    return path


def _work(device: torch.device, config: InferConfig, power: PowerProfile | None, show: bool) -> dict[str, Any]:
    """Run on one rank."""
    mesh = None if config.ranks == 1 else init_device_mesh(device.type, (config.ranks,), mesh_dim_names=("tp",))
    check_agreement("what to run", {name: str(value) for name, value in asdict(config).items()}, mesh)
    strategy = strategy_on(config.model, config.ranks)
    model: RowModel = load_model(config.model, mesh=mesh, device=device, strategy=strategy, wire=config.wire)
    inputs = None if config.inputs is None else open_inputs(config.inputs, model.config.model_features[0])
    models = {model.config.strategy: model}
    if config.against == "tensor" and "tensor" not in models:
        models["tensor"] = get_family(model.config.family).require("as_tensor")(model)
    result: dict[str, Any] = {"device": device.type, "rows_per_second": None}
    result |= dict.fromkeys(("rows", "non_finite_outputs", "non_finite_rows"), 0)
    with ProgressDisplay(show=show and rank_group(mesh).rank == 0) as display:
        if inputs is not None:
            rows = inputs.shape[0]
            display.stage("predicting: row", rows)
            started = time.perf_counter()
            result |= predict(model, inputs, config.batch, out=config.out, report=display.update)
            result |= {"rows": rows, "rows_per_second": rows / (time.perf_counter() - started)}
        if len(models) == 2:
            rows = config.batch if inputs is None else min(config.batch, inputs.shape[0])
            x = partial(random_rows, batch=rows, seed=config.seed)
            if inputs is not None:
                x = partial(read_rows, inputs=inputs, rows=slice(0, rows))
            difference, largest = largest_difference(model, models["tensor"], x)
            result |= {"compared_rows": rows, "largest_difference": difference, "largest_prediction": largest}
        display.stage("measuring: turn", config.turns)
        settings: dict[str, Any] = {"turns": config.turns, "profile": power, "seed": config.seed}
        costs = measure(models, config.batch, report=display.update, **settings)
    return result | {"measured": {name: cost.describe(models[name]) for name, cost in costs.items()}}


def measure(models: Mapping[str, RowModel], batch: int, *, seed: int = 0, **settings: Any) -> dict[str, Cost]:
    """Measure forward passes of models on random rows. Every rank of their mesh calls this. ``settings`` are those of
    `measure_calls`.
    """
    first = next(iter(models.values()))
    device = to_local(next(first.parameters())).device

    def forward(model: RowModel, x: Tensor) -> None:
        _wait_for(model(x))
        synchronize(device)

    inputs = {name: random_rows(model, batch, seed) for name, model in models.items()}
    calls = {name: Call(partial(forward, model, inputs[name]), batch) for name, model in models.items()}
    return measure_calls(calls, first.mesh, device, **settings)


def random_rows(model: RowModel, batch: int, seed: int) -> Tensor:
    """Draw random rows as inputs of this rank's model, the same on any number of ranks."""
    rows = torch.randn(batch, model.config.model_features[0], generator=torch.Generator().manual_seed(seed))
    return _own_features(model, lambda own: rows[:, own].contiguous())


def read_rows(model: RowModel, inputs: StoredArray, rows: slice) -> Tensor:
    """Read rows of the file as inputs of this rank's model."""
    return _own_features(model, lambda own: inputs.read(rows, own))


def _own_features(model: RowModel, read: Callable[[slice], Tensor]) -> Tensor:
    """This rank's features of rows, which ``read`` returns, on the model's device and in its dtype."""
    ranks, parameter = rank_group(model.mesh if model.shards_features else None), next(model.parameters())
    share = model.config.model_features[0] // ranks.size
    rows = read(slice(ranks.rank * share, (ranks.rank + 1) * share))
    return rows.to(to_local(parameter).device, parameter.dtype)


def _wait_for(out: Tensor) -> Tensor:
    return out.wait() if isinstance(out, AsyncCollectiveTensor) else out


def open_inputs(path: Path, width: int) -> StoredArray:
    """Open a file .npy, or an .npz or .safetensors with an array x, of shape (rows, ``width``)."""
    if not path.is_file() or path.suffix not in FORMATS:
        raise ValueError(f"there is no file of inputs {path}: give one of {', '.join(FORMATS)}")
    with readable(path, "inputs"):
        array = open_array(path, "x")
        if len(array.shape) != 2 or array.shape[1] != width or array.shape[0] == 0:
            raise ValueError(f"expected inputs of shape (rows, {width}), the model's width, got {array.shape}")
    return array


@torch.inference_mode()
def predict(
    model: RowModel,
    inputs: StoredArray,
    batch: int,
    *,
    out: Path | None = None,
    report: Callable[[int], None] | None = None,
) -> dict[str, int]:
    """Run all rows through the model. Every rank of its mesh calls this, and rank 0 writes the predictions to ``out``,
    in the model's dtype, or float32 for bfloat16, which NumPy lacks. ``report`` gets the number of finished rows.

    Returns how many values are NaN or infinite, and how many rows have some. After SIGINT or SIGTERM on any rank,
    `Interrupted` is raised at the end of a batch, and nothing is left at ``out``.
    """
    dtype = next(model.parameters()).dtype
    dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    count = inputs.shape[0]
    non_finite = torch.zeros(2, dtype=torch.int64)
    with ExitStack() as stack:
        stop, file = stack.enter_context(StopRequest()), None
        if out is not None and rank_group(model.mesh).rank == 0:
            file = stack.enter_context(atomic_file(out))
            descr = np.lib.format.dtype_to_descr(torch.empty(0, dtype=dtype).numpy().dtype)
            header = {"descr": descr, "fortran_order": False, "shape": (count, model.config.model_features[1])}
            np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, count, batch):
            rows = slice(first, min(first + batch, count))
            out_rows = _outputs(model, read_rows(model, inputs, rows))
            bad = ~out_rows.isfinite()
            non_finite += torch.stack([bad.sum(), bad.any(1).sum()]).cpu()
            if file is not None:
                file.write(np.ascontiguousarray(out_rows.to("cpu", dtype).numpy()).tobytes())
            if report is not None:
                report(rows.stop)
            if any(all_gather_objects(stop.requested, model.mesh)) and rows.stop < count:  # all ranks stop together
                raise Interrupted(f"stopped at row {rows.stop} of {count}")
    return dict(zip(("non_finite_outputs", "non_finite_rows"), non_finite.tolist(), strict=True))


def _outputs(model: RowModel, x: Tensor) -> Tensor:
    """The model's outputs with all features, on every rank."""
    out = _wait_for(model(x))
    return gather_features(out, model.mesh) if model.shards_features else out


@torch.inference_mode()
def largest_difference(first: RowModel, second: RowModel, x: Callable[[RowModel], Tensor]) -> tuple[float, float]:
    """The largest difference of two models' outputs for inputs ``x``, and the largest output. NaN in both is equal."""
    a, b = (_outputs(model, x(model)).double() for model in (first, second))
    difference = torch.where(a.isfinite() | b.isfinite(), (a - b).abs().nan_to_num(nan=torch.inf), 0.0)
    return float(difference.max()), float(a.nan_to_num(0.0, 0.0, 0.0).abs().max())
