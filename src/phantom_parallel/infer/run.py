"""Inference from its options to predictions and figures, on ranks that are started here or that somebody else
started.
"""

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.checkpoint.model import CONFIG, family_of, load_model
from phantom_parallel.cost.calibrate import profile_name
from phantom_parallel.cost.hardware import load_profile, user_directory
from phantom_parallel.distributed.external import launched_externally
from phantom_parallel.distributed.launch import launch
from phantom_parallel.distributed.objects import broadcast_from_rank_zero, check_agreement
from phantom_parallel.energy.power_profile import PowerProfile, load_power_profile
from phantom_parallel.infer.inputs import Inputs, open_inputs
from phantom_parallel.infer.measure import Inference, measure, random_rows
from phantom_parallel.infer.predict import largest_difference, predict, read_rows
from phantom_parallel.infer.predictor import RowModel, predictor_of, shape_of
from phantom_parallel.train import memory
from phantom_parallel.train.run_dir import MODEL
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.progress import ProgressDisplay

Against = Literal["tensor", "none"]
PROCESS = 100 << 20  # bytes that a process with torch has for itself, at least


@dataclass(frozen=True)
class InferConfig:
    """What to run and measure. ``profile`` names watts for modelled energy; by default those of this machine's
    calibrated profile, or what is assumed of a CPU's core.
    """

    model: Path
    ranks: int = 1
    batch: int = 64
    inputs: Path | None = None
    out: Path | None = None
    overwrite: bool = False
    against: Against = "tensor"
    profile: str | None = None
    turns: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        positive(ranks=self.ranks, batch=self.batch, turns=self.turns)
        for name in ("model", "inputs", "out"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(path).absolute())
        if self.against not in ("tensor", "none"):
            raise ValueError(f"against must be tensor or none, got {self.against!r}")
        if self.out is not None and self.inputs is None:
            raise ValueError(f"out={self.out} needs inputs to predict from: give a file of them")


@dataclass(frozen=True)
class Report:
    """What came out, and what it cost. ``largest_difference`` is between the predictions of the two models, over
    ``compared_rows`` rows, and ``largest_prediction`` is what to hold it against.
    """

    model: str
    ranks: int
    device: str
    batch: int
    rows: int  # predicted
    rows_per_second: float | None  # from the file to the file
    out: str | None
    compared_rows: int
    largest_difference: float | None
    largest_prediction: float | None
    profile: str | None  # whose watts modelled energy takes
    profile_source: str | None
    measured: dict[str, Inference]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(config: InferConfig, *, show: bool = False) -> Report:
    """Predict and measure. ``show`` shows progress on stderr.

    ValueError and OSError are for what a user got wrong, and come before any rank starts. `Interrupted` and `RankDied`
    come later.
    """
    joined = launched_externally()
    power = None if joined else prepare(config)
    return launch(config.ranks, _work, config, power, joined, show)


def prepare(config: InferConfig) -> PowerProfile | None:
    """Look for everything that a user may have got wrong; the watts of modelled energy. One process does this."""
    model = check_model(config.model)
    width, _ = predictor_of(model.config).features(model.config)
    model.config.check_ranks(config.ranks)
    if config.inputs is not None:
        open_inputs(config.inputs, width)
    power = power_profile(config.profile, config.ranks)
    if not torch.accelerator.is_available():  # accelerators have memories of their own
        _check_memory(model, config)
    if config.out is not None:
        _check_out(config.out, config)
    return power


def power_profile(name: str | None, ranks: int) -> PowerProfile | None:
    """The watts of a profile. By default those of this machine as calibrated for so many ranks, else what is assumed of
    a CPU's core; of an accelerator nothing is.
    """
    calibrated = user_directory() / f"{profile_name(ranks)}.toml"
    if name is None and torch.accelerator.is_available():
        return None
    if name is None and calibrated.is_file() and (found := load_profile(calibrated)).has_power:
        return PowerProfile.from_hardware(found)
    return load_power_profile(name, ranks)


def check_model(path: Path) -> Any:
    """The model without its weights, after all of its files were checked."""
    return load_model(check_folder(path), device="meta")


def check_folder(path: Path) -> Path:
    """Raise ValueError unless the folder holds a model; a training's folder is answered with a hint."""
    hint = f"; did you mean {path / MODEL}?" if (path / MODEL / CONFIG).is_file() else ""
    if not (path / CONFIG).is_file():
        raise ValueError(f"{path} is not a model folder: there is no {CONFIG} in it{hint}")
    try:
        family_of(path)
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from None
    return path


def _check_memory(model: RowModel, config: InferConfig) -> None:
    """Raise ValueError if local ranks cannot fit: weights of both models, what the baseline needs, and batches."""
    shape, predictor = shape_of(model, config.batch), predictor_of(model.config)
    words = shape.model_parameters + 2 * config.ranks * config.batch * max(predictor.features(model.config))
    if config.against == "tensor" and model.config.strategy != "tensor":
        words += predictor.baseline_words(model.config, config.ranks)
    needed, free = config.ranks * PROCESS + words * shape.word_bytes, memory.available_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"ranks={config.ranks} need at least {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free: "
            "use fewer ranks, a smaller batch, or no model to compare with"
        )


def _check_out(out: Path, config: InferConfig) -> None:
    if out.suffix != ".npy":
        raise ValueError(f"predictions are written as .npy, got out={out}")
    if out.is_dir() or out == config.inputs:
        raise ValueError(f"out={out} is {'a folder' if out.is_dir() else 'the file of inputs'}: choose another name")
    if out.exists() and not config.overwrite:
        raise FileExistsError(f"{out} exists: choose another name, or overwrite it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass  # an error now and not after all predictions are made
    except OSError as error:
        reason = "it is not a folder" if out.parent.is_file() else error.strerror
        raise OSError(f"predictions cannot be written to {out.parent}: {reason}") from None


def _work(device: torch.device, config: InferConfig, power: PowerProfile | None, joined: bool, show: bool) -> Report:
    """One rank's part."""
    if joined:
        power = broadcast_from_rank_zero(lambda: prepare(config), device)
    mesh = None if config.ranks == 1 else init_device_mesh(device.type, (config.ranks,), mesh_dim_names=("tp",))
    check_agreement("what to run", {name: str(value) for name, value in asdict(config).items()}, mesh)
    model = load_model(config.model, mesh=mesh, device=device)
    predictor = predictor_of(model.config)
    inputs = None if config.inputs is None else open_inputs(config.inputs, predictor.features(model.config)[0])
    models: dict[str, RowModel] = {model.config.strategy: model}
    if config.against == "tensor" and "tensor" not in models:
        models["tensor"] = predictor.baseline(model)
    with ExitStack() as stack:
        first = mesh is None or mesh.get_local_rank() == 0
        display = stack.enter_context(ProgressDisplay(show=show and first))
        seconds = 0.0
        if inputs is not None:
            display.stage("predicting: row", inputs.rows)
            started = time.perf_counter()
            predict(model, inputs, config.batch, out=config.out, report=display.update)
            seconds = time.perf_counter() - started
        compared, difference, largest = _compare(models, inputs, config)
        display.stage("measuring: turn", config.turns)
        measured = measure(
            models,
            config.batch,
            turns=config.turns,
            profile=power,
            seed=config.seed,
            report=display.update,
        )
    return Report(
        model=os.fspath(config.model),
        ranks=config.ranks,
        device=device.type,
        batch=config.batch,
        rows=0 if inputs is None else inputs.rows,
        rows_per_second=None if inputs is None else inputs.rows / seconds,
        out=None if config.out is None else os.fspath(config.out),
        compared_rows=compared,
        largest_difference=difference,
        largest_prediction=largest,
        profile=None if power is None else power.name,
        profile_source=None if power is None else power.source,
        measured=measured,
    )


def _compare(
    models: dict[str, RowModel], inputs: Inputs | None, config: InferConfig
) -> tuple[int, float | None, float | None]:
    """How far the two models' predictions are apart, over how many rows: the first batch of inputs, or random ones."""
    if len(models) < 2:
        return 0, None, None
    rows = config.batch if inputs is None else min(config.batch, inputs.rows)

    def x(model: RowModel) -> Tensor:
        if inputs is None:
            return random_rows(model, rows, config.seed)
        return read_rows(model, inputs, slice(0, rows))

    one, other = models.values()
    return rows, *largest_difference(one, other, x)
