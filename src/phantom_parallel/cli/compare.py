"""``phantom compare``: train every strategy to the same loss, and show what it cost."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from phantom_parallel.cli.showing import folder_for, show
from phantom_parallel.families.gpt.config import GPTStrategy
from phantom_parallel.report import tables
from phantom_parallel.study.compare import compare
from phantom_parallel.study.settings import read_compare
from phantom_parallel.utils.strategies import StrategyName as Strategy

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_OURS = ("preset", "out", "resume", "json", "strategy")


@dataclass(frozen=True, kw_only=True)
class _Compare:
    """What is asked of any comparison. Options that are left out are the preset's."""

    family: ClassVar[str]

    preset: str
    """A preset of the package, or a TOML file of your own."""
    strategy: tuple[str, ...] | None = None
    """Strategies to compare."""
    out: Path | None = None
    """Folder for the report, figures, tables and results.json; by default compare-PRESET-DATE. New or empty unless
    --resume."""
    resume: Flag = False
    """Go on in --out: trainings that are finished there are not run again."""
    blocks: int | None = None
    """Blocks of the features, for phantom."""
    ghosts: int | None = None
    """Values that a block shows the others, for phantom."""
    ranks: int | None = None
    """Ranks that share a model."""
    dp: int | None = None
    """Data-parallel copies."""
    data: str | None = None
    """What is learnt, as for phantom train."""
    target_loss: float | None = None
    """Held-out loss to train to."""
    steps: int | None = None
    """At most so many for a training."""
    seeds: int | None = None
    """Trainings of every strategy."""
    learning_rates: tuple[float, ...] | None = None
    """To be tried for every strategy, in rising order."""
    profile: str | None = None
    """Hardware profile whose watts the modelled energy has; see phantom hardware."""
    json: Flag = False
    """Print the results as JSON."""

    def run(self) -> None:
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _OURS}
        changes = {name: value for name, value in given.items() if value is not None}
        if self.strategy is not None:
            changes["strategies"] = self.strategy
        settings = read_compare(self.preset, changes, task=self.family)
        out = folder_for(self.out, self.resume, "compare", settings.name)
        found = compare(settings, out.absolute(), resume=self.resume, show=True)
        if found is not None:  # under torchrun or srun only rank 0 prints
            show(found, out, tables.comparison(found), (), json=self.json)


@dataclass(frozen=True, kw_only=True)
class Options(_Compare):
    """Train phantom and tensor-parallel models to the same loss, and show time, bytes, FLOPs and joules.

    Every strategy gets the same search for a learning rate; then all are trained to the same target over several seeds,
    in turns. Presets: quick (the default, under 3 minutes on 2 cores), digits, standard, paper (for a cluster). Any
    option given here takes the place of the preset's. Runs on local ranks that it starts, or joins under torchrun or
    srun. Ctrl-C keeps what is done, and --resume goes on from there. Transformers: phantom compare gpt --help.
    """

    family: ClassVar[str] = "ffn"

    preset: str = "quick"
    """quick, digits, standard, paper, or a TOML file of your own."""
    strategy: tuple[Strategy, ...] | None = None
    """Strategies to compare."""
    width: int | None = None
    """Features of every layer."""
    depth: int | None = None
    """Layers."""
    batch: int | None = None
    """Rows of a step, over all copies."""
    samples: int | None = None
    """Rows that a teacher makes."""


@dataclass(frozen=True, kw_only=True)
class GPTOptions(_Compare):
    """Train transformers by phantom and by torch's own Megatron styles to the same validation loss, and show time,
    bytes, FLOPs and joules.

    The same comparison as phantom compare, of language models. The preset gpt takes about half an hour on 2 cores. Any
    option given here takes the place of the preset's. Ctrl-C keeps what is done, and --resume goes on from there.
    """

    family: ClassVar[str] = "gpt"

    preset: str = "gpt"
    """gpt, or a TOML file of your own."""
    strategy: tuple[GPTStrategy, ...] | None = None
    """Strategies to compare."""
    dim: int | None = None
    """Features of the residual stream."""
    layers: int | None = None
    """Layers, of attention and SwiGLU each."""
    heads: int | None = None
    """Heads of queries."""
    context: int | None = None
    """Tokens that the model sees."""
    batch: int | None = None
    """Windows of a step, over all copies."""


VARIANTS = {"gpt": GPTOptions}
