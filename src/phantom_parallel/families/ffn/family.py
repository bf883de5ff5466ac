"""The family ``ffn``: feed-forward networks, the models of the paper, with their training, inference and conversion."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phantom_parallel.distributed.pipeline import Pipeline
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.energy import PowerProfile
from phantom_parallel.families.base import Batches, Converter, Family
from phantom_parallel.families.ffn.config import PIXELS, TEACHERS, FFNConfig, FFNTrainConfig
from phantom_parallel.families.ffn.cost import FFNShape, build_step, step_shapes
from phantom_parallel.families.ffn.data import check_data, fields_of, open_data, read_data, rows_of_step, scores
from phantom_parallel.families.ffn.fields import FIELDS
from phantom_parallel.families.ffn.model import FFN, as_tensor
from phantom_parallel.infer.evaluate import EvalConfig, Report
from phantom_parallel.infer.predict import measure, open_inputs
from phantom_parallel.nn.sharded import to_local
from phantom_parallel.ops.features import gather_features, shard_features
from phantom_parallel.train.run import MODEL, read_config
from phantom_parallel.train.task import Task
from phantom_parallel.utils.strategies import get_strategy

DRAWN_FIELDS = 2  # held-out rows that reports show
_WORD = 4  # bytes


class FFNTask(Task[FFNTrainConfig]):
    """The loss is the mean squared error over all features. With sharded features each rank computes the share of its
    own features, and nothing is gathered.
    """

    model: FFN

    def __init__(self, config: FFNTrainConfig, parallel: ParallelContext) -> None:
        self.config, self.parallel = config, parallel
        strategy, reshard = get_strategy(config.strategy), config.reshard_after_forward
        where: dict[str, Any] = {"mesh": parallel.tp, "device": parallel.device, "wire": config.wire}
        self.model = FFN(config.model, **where, reshard_after_forward=reshard)
        self._forward = self.model
        sharded = self.model.shards_features
        self.counts = sharded or strategy.shards_rows or parallel.tp_rank == 0
        if strategy.splits_depth and parallel.tp is not None:
            settings: dict[str, Any] = {"micro_batches": config.stage_micro_batches, "device": parallel.device}
            settings["dtype"] = torch.bfloat16 if config.dtype == "bf16" else None  # of what layers return
            settings |= {"stream": (config.model.width,), "wire": config.wire}
            self.pipeline = Pipeline(self.model, self._run_stage, parallel.tp, **settings)
            self.counts = self.pipeline.is_last
        group = None if parallel.single_process else parallel.group or dist.group.WORLD
        self._data = open_data(config, *((parallel.tp_rank, config.ranks) if sharded else (0, 1)), group)
        self.held_out = torch.arange(self._data.training_rows, self._data.rows)

    @staticmethod
    def check(config: FFNTrainConfig) -> None:
        check_data(config)

    @staticmethod
    def outline(config: FFNTrainConfig) -> nn.Module:
        return FFN(config.model, device="meta")

    @staticmethod
    def data_bytes(config: FFNTrainConfig) -> int:
        copies = 1 if get_strategy(config.strategy).shards_features else config.ranks  # which hold all features
        made = config.data in (*TEACHERS, *FIELDS)
        return copies * config.samples * sum(config.model.model_features) * _WORD if made else 0

    @property
    def classifies(self) -> bool:  # type: ignore[override]
        return self.config.data in PIXELS

    def rows_of(self, step: int) -> Tensor:
        return rows_of_step(step, rows=self._data.training_rows, batch=self.config.batch, seed=self.config.seed)

    def check_rows(self, rows: Tensor) -> None:
        self._data.check_finite(rows)

    def loss(self, rows: Tensor) -> Tensor:
        out, y = self._predict(self._forward, rows)
        return (out - y).square().sum() / (len(rows) * self.config.model.model_features[1])

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._data.take(rows)

    def measure(self, rows: Tensor) -> Tensor:
        if self.pipeline is not None:
            x, y = self.load(rows)
            out = self.pipeline.forward(x)
            if out is None:
                return torch.zeros(2, device=self.parallel.device)
        else:
            out, y = self._predict(self.model, rows)
        squares = (out - y).square().sum() / self.config.model.model_features[1]
        return torch.stack([squares, self._hits(out, y) if self.classifies else torch.zeros_like(squares)])

    @torch.no_grad()
    def predict(self, rows: Tensor) -> Tensor:
        """Return the model's outputs for these rows, all features of them on every rank."""
        if self.pipeline is None:
            out, _ = self._predict(self.model, rows)
            return gather_features(out, self.model.mesh) if self.model.shards_features else out
        assert self.parallel.tp is not None
        x, y = self.load(rows)
        result = self.pipeline.forward(x)
        out = torch.empty_like(y) if result is None else result
        dist.broadcast(out, group=self.parallel.tp.get_group(), group_src=self.config.ranks - 1)
        return out

    def _predict(self, forward: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model's outputs and the targets of these rows, with this rank's features."""
        x, y = self.load(rows)
        with self.autocast():
            out = forward(x)
        return out.float(), y

    def _run_stage(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run this rank's stage of a pipeline; with targets, return the mean loss."""
        with self.autocast():
            out = self._forward(x)
        if targets is None:
            return out.float() if self.counts else out
        return (out.float() - targets).square().sum() / targets.numel()

    def _hits(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the number of rows that are classified correctly; 0 on all but one of the ranks that share rows."""
        features, all_features = self._data.features[1], self.config.model.model_features[1]
        both = torch.stack([scores(values, features, all_features) for values in (out, y)])
        if self.model.shards_features:
            assert self.parallel.tp is not None
            dist.all_reduce(both, group=self.parallel.tp.get_group())
        predicted, expected = both.argmax(-1)
        first = self.parallel.tp_rank == 0
        return (predicted == expected).sum().to(out) * (first if self.model.shards_features else self.counts)


_BATCH_ROWS = 1024  # rows of a batch of calibration data


class FFNConverter(Converter):
    """All layers get the same ghosts. Calibration data are rows of inputs; the loss is the mean squared difference from
    the dense model's outputs, relative to their mean square.
    """

    linear_layers: ClassVar[tuple[str, ...]] = ("layers.*",)

    def batches(self, path: Path, config: FFNConfig, data: Path, rows: int, length: int) -> Batches:
        width = config.model_features[0]
        inputs = open_inputs(data, width)
        count = inputs.shape[0]
        held_out = count // 5
        used = min(rows, count - held_out)
        if held_out < 1 or used < width:
            raise ValueError(f"{data} has {count} rows, too few for {width} features and a fifth held out: give more")
        parts = slice(0, used), slice(count - held_out, count)
        training, rest = (inputs.read(part, slice(0, width)).float().split(_BATCH_ROWS) for part in parts)
        return list(training), list(rest)

    @torch.no_grad()
    def loss(self, model: nn.Module, dense: nn.Module, batch: Tensor) -> float:
        expected = dense(batch)
        return float((model(batch) - expected).square().mean() / expected.square().mean().clamp_min(1e-30))

    def phantom(self, model: nn.Module, blocks: int, ghosts: Mapping[str, int]) -> FFN:
        dense = cast(FFN, model)
        config = replace(dense.config, strategy="phantom", blocks=blocks, ghosts=max(ghosts.values()))
        made = FFN(config, device="meta", dtype=next(dense.parameters()).dtype)
        made.load_state_dict({name: t.detach() for name, t in dense.state_dict().items()}, assign=True)
        return made


def measure_inference(
    configs: Mapping[str, FFNTrainConfig], context: ParallelContext, batch: int, *, turns: int, power: PowerProfile
) -> dict[str, dict[str, Any]]:
    """Forward passes of a batch of rows, by each strategy."""
    where: dict[str, Any] = {"mesh": context.tp, "device": context.device}
    models = {name: FFN(config.model, **where, wire=config.wire) for name, config in configs.items()}
    costs = measure(models, batch, turns=turns, profile=power)
    return {
        name: cost.inference_result(models[name]) | {"batch": batch, "ranks": configs[name].ranks, "turns": turns}
        for name, cost in costs.items()
    }


def smaller_models(config: FFNTrainConfig) -> list[dict[str, Any]]:
    """Narrower hidden layers; inputs and outputs stay. ValueError for teachers, which have the width of the model."""
    if config.data in TEACHERS:
        raise ValueError(f"a narrower model would have other data: {config.data} comes from a teacher of its width")
    n_in, n_out = config.model.model_features
    widths = [config.model.width * eighths // 8 for eighths in (1, 2, 3, 4, 6)]
    return [{"width": width, "in_features": n_in, "out_features": n_out} for width in widths]


def evaluate(model: FFN, folder: Path, config: EvalConfig, report: Report) -> dict[str, float]:
    """Mean squared error and the mean over rows of the relative error, and the accuracy of classes."""
    training: FFNTrainConfig | None = None
    for model_folder in reversed(config.folders):
        family, settings = read_config(model_folder.parent) if model_folder.name == MODEL else (None, None)
        if settings and family == "ffn":
            training = FFNTrainConfig.from_dict(settings)
    features = model.config.model_features
    whole = slice(0, features[0]), slice(0, features[1])
    if config.data is not None:
        data = read_data(config.data, features, whole)
        rows = torch.arange(data.rows)
    elif training is not None:
        data = open_data(training)
        rows = torch.arange(data.training_rows, data.rows)
    else:
        raise ValueError(f"{folder} is not in the folder of a training: give --data, with arrays x and y")
    classifies = training is not None and config.data is None and training.data in PIXELS
    device, sums = to_local(next(model.parameters())).device, torch.zeros(3, dtype=torch.float64)
    for part in rows.split(config.batch):
        x, y = (values.to(device) for values in data.take(part))
        out = model(shard_features(x, model.mesh) if model.shards_features else x)
        out = gather_features(out, model.mesh) if model.shards_features else out
        error = (out - y).double()
        relative = error.norm(dim=1) / y.double().norm(dim=1).clamp_min(1e-30)
        hits = torch.stack([scores(values, whole[1], features[1]) for values in (out, y)]).argmax(-1)
        sums += torch.stack([error.square().mean(1).sum(), relative.sum(), (hits[0] == hits[1]).sum()]).cpu()
        report(int(part[-1] - rows[0]) + 1, len(rows))
    loss, relative_error, accuracy = (sums / len(rows)).tolist()
    measured = {"loss": loss, "relative_error": relative_error, "rows": len(rows)}
    return measured | ({"accuracy": accuracy} if classifies else {})


def held_out_fields(task: FFNTask) -> dict[str, Any]:
    """The first held-out fields of an equation and what the model predicts, in the units of the solution."""
    if task.config.data not in FIELDS:
        return {}
    fields, rows = fields_of(task.config), task.held_out[:DRAWN_FIELDS]
    x, y, out = fields.x[rows.numpy()], fields.y[rows.numpy()], task.predict(rows).cpu().numpy()
    true, predicted = (fields.mean + fields.scale * values for values in (y, out))
    named = {FIELDS[task.config.data]: x, "solution": true, "prediction": predicted}
    return {"points": fields.points} | {name: values.astype("float32") for name, values in named.items()}


def describe_loss(config: FFNTrainConfig) -> tuple[str, float | None, str]:
    """The name of the loss, the loss by chance, and what has that loss."""
    if config.data in FIELDS:
        return "squared error relative to the variance", 1.0, "the mean field"
    if config.data in PIXELS:
        return "squared error of class scores", 0.09, "the frequencies of the classes"
    planted = " to a teacher of phantom's own structure (--data random has none)" if config.data == "planted" else ""
    return f"mean squared error{planted}", None, ""


FAMILY = Family(
    name="ffn",
    title="feed-forward networks",
    baseline="tensor",
    config=FFNConfig,
    model=FFN,
    train_config=FFNTrainConfig,
    task=FFNTask,
    shape=FFNShape,
    build_step=build_step,
    step_shapes=step_shapes,
    default_preset="quick",
    as_tensor=as_tensor,
    converter=FFNConverter,
    measure_inference=measure_inference,
    smaller_models=smaller_models,
    evaluate=evaluate,
    held_out_fields=held_out_fields,
    describe_loss=describe_loss,
)
