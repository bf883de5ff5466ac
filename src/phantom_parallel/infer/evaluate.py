"""``phantom eval``: how good a model is on data, beside the model that it was converted from."""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from phantom_parallel.checkpoint.model import CONFIG, family_of, load_model
from phantom_parallel.distributed.launch import launch
from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.families.registry import get_family
from phantom_parallel.infer.predict import check_folder, check_model, strategy_on
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.utils.files import read_json
from phantom_parallel.utils.progress import ProgressDisplay
from phantom_parallel.utils.settings import PositiveInt, validate

_LENGTH = 1024  # tokens of a window, at most, unless asked for
Report = Callable[[int, int], None]  # units that are done, of how many


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What to evaluate. The texts under the fields are the help of ``phantom eval``."""

    model: Path
    """Folder of a model: OUT/model of phantom train, that of phantom model import, convert or heal, or a language model
    of transformers."""
    against: Path | None = None
    """Folder of a model that is evaluated beside it, such as the dense one that it was converted from."""
    data: Path | None = None
    """Text for a language model, a file or a folder of files. For a feed-forward network, arrays x and y as phantom
    train takes them; by default the held-out rows of the training that made the model, or the one of --against."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm_eval to evaluate a language model on instead of a text; for it, a model of ours is exported first."""
    task_folder: Path | None = None
    """Folder with further tasks, YAML files as lm_eval has them."""
    limit: PositiveInt | None = None
    """Examples of each task, at most."""
    length: PositiveInt | None = None
    """Tokens of a window; by default the model's context, at most 1024."""
    stride: PositiveInt | None = None
    """Tokens from a window to the next, which the others of the window precede; by default half a window."""
    batch: PositiveInt = 8
    """Windows or rows of a forward pass."""
    ranks: PositiveInt = 1
    """Ranks that share the model."""

    def __post_init__(self) -> None:
        for name in ("model", "against", "data", "task_folder"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(path).absolute())
        validate(self)

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.model,) if self.against is None else (self.model, self.against)


def run(config: EvalConfig, *, show: bool = False) -> dict[str, Any]:
    """Evaluate the models, with progress on stderr if ``show`` is set. Returns plain data: the ``folder`` of ``model``
    and ``against``, and what their family measures.
    """
    folders = list(config.folders)
    with TemporaryDirectory() as exported:
        for index, folder in enumerate(config.folders):
            if not is_transformers(folder):
                family = get_family(family_of(check_folder(folder)))
                family.require("evaluate")
                check_model(folder, config.ranks).config.check_ranks(config.ranks)
                if config.tasks:
                    folders[index] = Path(exported) / str(index)
                    family.require("export_model")(folder, folders[index])
        return launch(config.ranks, _work, config, folders, show)


def is_transformers(folder: Path) -> bool:
    """Whether a folder holds a model of ``transformers``."""
    return (folder / CONFIG).is_file() and "model_type" in read_json(folder / CONFIG)


def _work(device: torch.device, config: EvalConfig, folders: list[Path], show: bool) -> dict[str, Any]:
    """Run on one rank."""
    mesh = None if config.ranks == 1 else init_device_mesh(device.type, (config.ranks,), mesh_dim_names=("tp",))
    check_agreement("what to evaluate", {name: str(value) for name, value in asdict(config).items()}, mesh)
    result = {}
    with ProgressDisplay(show=show and rank_group(mesh).rank == 0) as display, torch.inference_mode():
        for name, given, folder in zip(("model", "against"), config.folders, folders, strict=False):
            display.stage(f"evaluating {name}", 0)

            def report(done: int, total: int) -> None:
                display.set_total(total)
                display.update(done)

            if is_transformers(folder):
                from phantom_parallel.hf import evaluate

                measured = evaluate(folder, config, report)
            else:
                model = load_model(folder, mesh=mesh, device=device, strategy=strategy_on(folder, config.ranks)).eval()
                measured = get_family(family_of(folder)).require("evaluate")(model, folder, config, report)
            result[name] = {"folder": os.fspath(given)} | measured
    return result | {"ranks": config.ranks, "device": device.type}


def read_texts(data: Path | None) -> bytes:
    """A text file, or the files of a folder in the order of their names."""
    if data is None or not data.exists():
        which = "the model needs a text" if data is None else f"there is no text {data}"
        raise ValueError(f"{which}: give a file, or a folder of files, as --data")
    files = sorted(path for path in data.rglob("*") if path.is_file()) if data.is_dir() else [data]
    return b"\n".join(path.read_bytes() for path in files)


def evaluate_text(
    logits: Callable[[Tensor], Tensor], tokens: Tensor, text: bytes, context: int, config: EvalConfig, report: Report
) -> dict[str, float]:
    """Evaluate a language model, (batch, t) tokens to (batch, t, vocab) logits, on a text by sliding windows:
    each token but the first is predicted once, from at least ``length - stride`` tokens before it where the text has
    them. ``report`` is called with the number of windows that are done, and of all.
    """
    predicted = len(tokens) - 1
    if predicted < 1:
        raise ValueError(f"{config.data} has {len(tokens)} tokens: give more text")
    length = min(config.length or min(_LENGTH, context), predicted)
    if length > context:
        raise ValueError(f"length={length} is more than the model's context of {context} tokens")
    stride = min(config.stride or max(1, length // 2), length)
    ends = [*range(length, predicted, stride), predicted]  # of the windows, the last of which may overlap more
    new = torch.tensor([end - before for before, end in zip([0, *ends], ends, strict=False)], device=tokens.device)
    nats = 0.0
    for first in range(0, len(ends), config.batch):
        batch = torch.stack([tokens[end - length : end + 1] for end in ends[first : first + config.batch]])
        losses = F.cross_entropy(logits(batch[:, :-1]).float().transpose(1, 2), batch[:, 1:], reduction="none")
        counted = torch.arange(length, device=tokens.device) >= length - new[first : first + len(batch), None]
        nats += float(losses.double()[counted].sum())
        report(first + len(batch), len(ends))
    mean = nats / predicted
    bits = nats / math.log(2) / len(text)
    return {"perplexity": math.exp(min(mean, 700.0)), "nats": mean, "bits_per_byte": bits, "tokens": predicted}
