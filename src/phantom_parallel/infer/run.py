"""``phantom infer``: predictions and their cost, on local ranks that are launched here or on ranks of an external
launcher.
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

from phantom_parallel.checkpoint.model import CONFIG, family_of, load_model, read_config
from phantom_parallel.cost.calibrate import profile_name
from phantom_parallel.cost.hardware import load_profile, user_directory
from phantom_parallel.distributed.launch import launch, launch_device_type
from phantom_parallel.distributed.launchers import launched_externally
from phantom_parallel.distributed.objects import broadcast_from_rank_zero, check_agreement
from phantom_parallel.energy.power import PowerProfile, load_power_profile
from phantom_parallel.families.registry import get_family
from phantom_parallel.infer.inputs import Inputs, open_inputs
from phantom_parallel.infer.measure import Inference, measure, random_rows
from phantom_parallel.infer.predict import NonFinite, largest_difference, predict, read_rows
from phantom_parallel.infer.predictor import RowModel, predictor_of, shape_of
from phantom_parallel.train.run_dir import MODEL
from phantom_parallel.utils import resources
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.progress import ProgressDisplay
from phantom_parallel.utils.strategies import get_strategy
from phantom_parallel.utils.wire import WireFormat, check_wire

Against = Literal["tensor", "none"]


@dataclass(frozen=True)
class InferConfig:
    """What to run and measure.

    Args:
        model: Folder of the model.
        ranks: Number of ranks that share the model.
        batch: Rows of a forward pass.
        inputs: File of rows to predict from; without it, only random rows are measured.
        out: The .npy file of predictions.
        overwrite: Whether to replace ``out`` if it exists.
        against: The baseline to measure as well.
        wire: Format in which features travel between ranks, of both models.
        profile: Hardware profile whose watts the energy is modelled with; by default this machine's as calibrated,
            otherwise watts that are assumed of a CPU core.
        turns: How often each model is timed.
        seed: Seed of random rows.
    """

    model: Path
    ranks: int = 1
    batch: int = 64
    inputs: Path | None = None
    out: Path | None = None
    overwrite: bool = False
    against: Against = "tensor"
    wire: WireFormat = "full"
    profile: str | None = None
    turns: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        positive(ranks=self.ranks, batch=self.batch, turns=self.turns)
        check_wire(self.wire)
        for name in ("model", "inputs", "out"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(path).absolute())
        if self.against not in ("tensor", "none"):
            raise ValueError(f"against must be tensor or none, got {self.against!r}")
        if self.out is not None and self.inputs is None:
            raise ValueError(f"out={self.out} needs inputs to predict from: give a file of them")


@dataclass(frozen=True)
class InferReport:
    """Results of ``phantom infer``.

    Args:
        model: Folder of the model.
        ranks: Number of ranks.
        device: Type of their devices.
        wire: Format in which features travelled between them.
        batch: Rows of a forward pass.
        rows: Number of rows that were predicted.
        rows_per_second: Rate of predicting them, including reading and writing.
        out: The file of predictions.
        non_finite_outputs: Number of predicted values that are NaN or infinite.
        non_finite_rows: Number of rows with such values.
        compared_rows: Number of rows on which the two models were compared.
        largest_difference: The largest difference between their predictions.
        largest_prediction: The largest prediction on these rows, as the scale of the difference.
        profile: Hardware profile of modelled energy.
        profile_source: Where its watts come from.
        measured: The cost of each model.
    """

    model: str
    ranks: int
    device: str
    wire: WireFormat
    batch: int
    rows: int
    rows_per_second: float | None
    out: str | None
    non_finite_outputs: int
    non_finite_rows: int
    compared_rows: int
    largest_difference: float | None
    largest_prediction: float | None
    profile: str | None
    profile_source: str | None
    measured: dict[str, Inference]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(config: InferConfig, *, show: bool = False) -> InferReport:
    """Predict and measure.

    Args:
        config: What to run.
        show: Whether to show progress on stderr.

    Raises:
        ValueError, OSError: If options or files are wrong, mostly before any rank starts.
        Interrupted: After SIGINT or SIGTERM.
        RankDied: If a rank died.
    """
    joined = launched_externally()
    power = None if joined else prepare(config)
    return launch(config.ranks, _work, config, power, joined, show)


def prepare(config: InferConfig) -> PowerProfile | None:
    """Check the options and files, in one process. Returns the watts of modelled energy."""
    model = check_model(config.model, config.ranks)
    width, _ = predictor_of(model.config).features(model.config)
    model.config.check_ranks(config.ranks)
    if config.inputs is not None:
        open_inputs(config.inputs, width)
    power = power_profile(config.profile, config.ranks)
    if launch_device_type(config.ranks) == "cpu":  # accelerators have memories of their own
        _check_memory(model, config)
    if config.out is not None:
        _check_out(config.out, config)
    return power


def power_profile(name: str | None, ranks: int) -> PowerProfile | None:
    """Return the watts of a profile; by default those of this machine as calibrated for ``ranks`` ranks, otherwise
    watts that are assumed of a CPU core. None for accelerators, of which nothing is assumed.
    """
    calibrated = user_directory() / f"{profile_name(ranks)}.toml"
    if name is None and launch_device_type(ranks) != "cpu":
        return None
    if name is None and calibrated.is_file() and (profile := load_profile(calibrated)).has_power:
        return PowerProfile.from_hardware(profile)
    return load_power_profile(name, ranks)


def check_model(path: Path, ranks: int) -> Any:
    """Check all files of a model, and return it on the meta device, as ``ranks`` ranks load it."""
    return load_model(check_folder(path), device="meta", strategy=strategy_on(path, ranks))


def strategy_on(path: Path, ranks: int) -> str | None:
    """The strategy by which ``ranks`` ranks run the model of a folder; None for its own. A dense model runs on several
    ranks by its family's baseline, whose weights and function are the same.
    """
    config = read_config(check_folder(path))
    return get_family(config.family).baseline if ranks > 1 and get_strategy(config.strategy).single_rank else None


def check_folder(path: Path) -> Path:
    """Return the folder if it holds a model.

    Raises:
        ValueError: If it does not; for the folder of a training the error names that of its model.
    """
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
    needed, free = config.ranks * resources.PROCESS_BYTES + words * shape.word_bytes, resources.available_bytes()
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
            pass  # raises now rather than after all predictions
    except OSError as error:
        reason = "it is not a folder" if out.parent.is_file() else error.strerror
        raise OSError(f"predictions cannot be written to {out.parent}: {reason}") from None


def _work(
    device: torch.device, config: InferConfig, power: PowerProfile | None, joined: bool, show: bool
) -> InferReport:
    """Run on one rank."""
    if joined:
        power = broadcast_from_rank_zero(lambda: prepare(config), device)
    mesh = None if config.ranks == 1 else init_device_mesh(device.type, (config.ranks,), mesh_dim_names=("tp",))
    check_agreement("what to run", {name: str(value) for name, value in asdict(config).items()}, mesh)
    strategy = strategy_on(config.model, config.ranks)
    model = load_model(config.model, mesh=mesh, device=device, strategy=strategy, wire=config.wire)
    predictor = predictor_of(model.config)
    inputs = None if config.inputs is None else open_inputs(config.inputs, predictor.features(model.config)[0])
    models: dict[str, RowModel] = {model.config.strategy: model}
    if config.against == "tensor" and "tensor" not in models:
        models["tensor"] = predictor.baseline(model)
    with ExitStack() as stack:
        rank_zero = mesh is None or mesh.get_local_rank() == 0
        display = stack.enter_context(ProgressDisplay(show=show and rank_zero))
        seconds, non_finite = 0.0, NonFinite(0, 0)
        if inputs is not None:
            display.stage("predicting: row", inputs.rows)
            started = time.perf_counter()
            non_finite = predict(model, inputs, config.batch, out=config.out, report=display.update)
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
    return InferReport(
        model=os.fspath(config.model),
        ranks=config.ranks,
        device=device.type,
        wire=config.wire,
        batch=config.batch,
        rows=0 if inputs is None else inputs.rows,
        rows_per_second=None if inputs is None else inputs.rows / seconds,
        out=None if config.out is None else os.fspath(config.out),
        non_finite_outputs=non_finite.values,
        non_finite_rows=non_finite.rows,
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
    """Compare the two models' predictions on the first batch of inputs, or on random rows.

    Returns:
        The number of rows, and the results of `largest_difference`.
    """
    if len(models) < 2:
        return 0, None, None
    rows = config.batch if inputs is None else min(config.batch, inputs.rows)

    def x(model: RowModel) -> Tensor:
        if inputs is None:
            return random_rows(model, rows, config.seed)
        return read_rows(model, inputs, slice(0, rows))

    model, baseline = models.values()
    return rows, *largest_difference(model, baseline, x)
