"""``phantom model export``: a model as a folder that ``transformers`` loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phantom_parallel.checkpoint.model import family_of
from phantom_parallel.cli.options import Flag
from phantom_parallel.families.registry import get_family
from phantom_parallel.infer.predict import check_folder
from phantom_parallel.utils.parsing import printable


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a model as a folder that AutoModelForCausalLM.from_pretrained of transformers loads and that computes the
    same. Phantom layers become the dense weights that they equal, so that what they save is not in the folder.

    Tensors are written one at a time, so that the model need not fit into memory. Exit codes: 0 done, 2 a mistake in
    the options or files.
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
