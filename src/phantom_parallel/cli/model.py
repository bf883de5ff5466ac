"""``phantom model import | convert | heal | export``: models from other libraries and to them."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from phantom_parallel.checkpoint.model import CONFIG, family_of
from phantom_parallel.cli.options import Flag, JsonOption, config_of, value_of
from phantom_parallel.cli.train import resumed_settings, train_options
from phantom_parallel.conversion.run import ConvertConfig, convert_folder, heal_config
from phantom_parallel.families.registry import family_names, get_family
from phantom_parallel.infer.predict import check_folder
from phantom_parallel.train.run import format_loss
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.parsing import printable


@dataclass(frozen=True, kw_only=True)
class ImportOptions(JsonOption):
    """Write a pretrained transformer (Llama, SmolLM2, Mistral, Qwen2) as a dense model that computes the same, with its
    tokenizer and chat template. phantom generate runs it on any number of ranks that divides its heads, and phantom
    model convert makes a phantom model of it.

    Tensors are read from safetensors files one at a time, so that the model need not fit into memory; a GGUF file is
    decoded by transformers as a whole. No pickle is read and no code of the model runs. Exit codes: 0 done, 2 invalid
    option, or a model that is not supported.
    """

    source: Annotated[Path, tyro.conf.arg(name="from")]
    """Folder with config.json, safetensors files and tokenizer.json, or with one GGUF file; or a GGUF file."""
    out: Path
    """New folder of the model."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the weights that are written."""
    context: int | None = None
    """Maximum number of positions, which caches and position tables are made for; by default the pretrained model's."""
    overwrite: Flag = False
    """Replace --out if it exists."""

    def run(self) -> None:
        family = next(get_family(name) for name in family_names() if get_family(name).import_model)
        settings = {"dtype": self.dtype, "context": self.context, "overwrite": self.overwrite}
        config = family.require("import_model")(self.source, self.out, **settings)
        if self.json:
            print(json_text({"model": str(self.out), "family": family.name, "config": asdict(config)}))
        else:
            print(printable(f"{self.out}: {config}"))


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a model as a folder that AutoModelForCausalLM.from_pretrained of transformers loads and that computes the
    same. Phantom layers become the dense weights that they equal, so that what they save is not in the folder.

    Tensors are written one at a time, so that the model need not fit into memory. Exit codes: 0 done, 2 invalid option
    or input file.
    """

    model: Path
    """Folder of a model, such as that of phantom model import or OUT/model of phantom train gpt."""
    out: Path
    """New folder."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of the weights that are written; by default the model's."""
    overwrite: Flag = False
    """Replace --out if it exists."""

    def run(self) -> None:
        family = get_family(family_of(check_folder(self.model)))
        written = family.require("export_model")(self.model, self.out, dtype=self.dtype, overwrite=self.overwrite)
        print(printable(f"{self.out}: {written}"))


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(ConvertConfig, JsonOption):
    """Convert a trained dense model to a phantom model, in closed form: no training. Each linear layer is fitted to the
    dense model's outputs on calibration data, one after the other.

    The data are text for a transformer and a file of rows (.npy) for a feed-forward network; a fifth of them is held
    out, and the losses of both models on it are shown. The report, with the error of every layer, is conversion.json in
    --out. An interrupted conversion continues after its last finished layer if the same command is run again. Runs in
    one process. Exit codes: 0 done, 2 invalid option or input file, 130 stopped by SIGINT, 143 by SIGTERM.
    """

    overwrite: Flag = False
    """Replace --out if it exists."""

    def run(self) -> None:
        config = config_of(self, ConvertConfig, model=self.model.absolute(), out=self.out.absolute())
        result = convert_folder(config, show=True)
        print(json_text(result) if self.json else _summary(result))


def _summary(result: dict[str, Any]) -> str:
    out, groups = result["out"], result["groups"]
    worst = max(groups, key=lambda group: group["relative_error"])
    ghosts = sorted(group["ghosts"] for group in groups)
    loss, dense_loss = (format_loss(result[name], family=family_of(out)) for name in ("loss", "dense_loss"))
    return (
        f"{out}: {result['kept']:.1%} of the multiply-adds of {len(groups)} groups of layers, "
        f"{result['blocks']} blocks, {ghosts[0]} to {ghosts[-1]} ghosts.\n"
        f"Held-out loss {loss}, of the dense model {dense_loss}. Largest relative error "
        f"{worst['relative_error']:.1%}, of {worst['layers'][0]}."
    )


_HEAL_FAMILY = "gpt"  # whose options the help shows
# Settings that the model determines, or that healing does not support.
_HIDDEN = ("micro_batches", "reshard_after_forward", "compile", "momentum", "optimizer")
_HEAL_HELP = """Heal a converted model: train it with the dense model that it was made from as its teacher.

At first each layer is trained separately: its input is the converted model's stream, and its target the teacher's
stream after the same layer. Then all layers are trained together on the teacher's predictions, by the Kullback-Leibler
divergence. The teacher runs on the same ranks. Held-out losses, of the model and of its teacher, are the cross-entropy
in nats a token. The healed model is written to the folder model in --out. Ranks, signals, --resume and exit codes are
as for phantom train.
"""


def heal_options(family: str | None, arguments: list[str]) -> tuple[type[Any], dict[str, Any]]:
    """The options for the model's family. With ``--resume``, defaults are those of the folder."""
    family, defaults = resumed_settings(family, arguments, heals=True)
    model = value_of("--model", arguments)
    if family is None and model is not None and (Path(model) / CONFIG).is_file():
        config_class = heal_config(Path(model))
    else:
        config_class = get_family(family or _HEAL_FAMILY).require("heal_config")
    return train_options(config_class, _HEAL_HELP, hidden=_HIDDEN), defaults
