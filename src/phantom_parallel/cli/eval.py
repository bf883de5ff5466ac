"""``phantom eval``: perplexity, accuracy or relative error of a model, beside the one that it was converted from."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from phantom_parallel.cli.options import JsonOption, LaunchOptions, RanksOption
from phantom_parallel.distributed.launchers import is_rank_zero
from phantom_parallel.infer.evaluate import EvalConfig, run
from phantom_parallel.train.run import MODEL
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.parsing import printable

# How a line shows each measure, in this order.
_SHOWN = {
    "perplexity": "perplexity {:.4g}",
    "nats": "{:.4f} nats a token",
    "bits_per_byte": "{:.4f} bits a byte",
    "tokens": "{:,} tokens",
    "accuracy": "accuracy {:.1%}",
    "relative_error": "relative error {:.2%}",
    "loss": "loss {:.4g}",
    "rows": "{:,} rows",
}


@dataclass(frozen=True, kw_only=True)
class Options(RanksOption, LaunchOptions, JsonOption, EvalConfig):
    """Evaluate a model: perplexity and nats a token of a language model on a text, by windows that slide over it with
    the model's tokenizer; the accuracy of classes or the relative error of a feed-forward network.

    Local workers are launched by the command itself; under torchrun or srun this process joins as one rank. Exit codes:
    0 done, 1 a rank died, 2 invalid option or input file, 130 stopped by SIGINT, 143 by SIGTERM.
    """

    def __post_init__(self) -> None:
        """`config` checks the options."""

    def config(self) -> EvalConfig:
        settings: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(EvalConfig)}
        return EvalConfig(**settings | {"ranks": self.rank_count()})

    def run(self) -> None:
        config = self.config()
        with self.launching(config.ranks):
            result = run(config, show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_text(result))
            return
        lines = [result[name] for name in ("model", "against") if name in result]
        names = [_name(Path(line["folder"])) for line in lines]
        for name, line in zip(names, lines, strict=True):
            shown = ", ".join(text.format(line[measure]) for measure, text in _SHOWN.items() if measure in line)
            print(printable(f"{name:<{max(map(len, names))}}  {shown}"))


def _name(folder: Path) -> str:
    """The last part of a path, or of a training's folder."""
    return folder.parent.name if folder.name == MODEL else folder.name
