"""``phantom model import``: a pretrained model of Hugging Face as a model of a family."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from phantom_parallel.cli.options import Flag, JsonOption
from phantom_parallel.families.registry import family_names, get_family
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.parsing import printable


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    """Write a pretrained transformer (Llama, SmolLM2, Mistral, Qwen2) as a dense model that computes the same, with its
    tokenizer and chat template. phantom generate runs it on any number of ranks that divides its heads, and phantom
    convert makes a phantom model of it.

    Tensors are read from safetensors files one at a time, so that the model need not fit into memory; a GGUF file is
    decoded by transformers as a whole. No pickle is read and no code of the model runs. Exit codes: 0 done, 2 a mistake
    in the options, or a model that is not supported.
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
        family = next(get_family(name) for name in family_names() if get_family(name).imports)
        config = family.require("import_model")(
            self.source, self.out, dtype=self.dtype, context=self.context, overwrite=self.overwrite
        )
        if self.json:
            print(json_text({"model": str(self.out), "family": family.name, "config": asdict(config)}))
        else:
            print(printable(f"{self.out}: {config}"))
