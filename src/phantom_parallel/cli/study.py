"""``phantom study``: the paper's experiments and their neighbours'."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from phantom_parallel.cli.showing import folder_for, show
from phantom_parallel.report import tables
from phantom_parallel.study.settings import read_study
from phantom_parallel.study.sweep import study

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class Options:
    """Run a study: cells that differ in a few settings, each trained or timed on ranks that are started here.

    ghosts: loss and cost against the number of ghosts. scaling: a fixed width on 1 to 8 ranks, and on 16 to 256 as
    modelled. smaller: phantom models on fewer ranks that reach the loss of a tensor-parallel model on more. batch:
    energy a sample against batch size and ranks. width: from which width on it pays. wider: transformers, and a wider
    one at equal energy. Under torchrun or srun it joins.
    Ctrl-C keeps the cells that are done, and --resume goes on from there.
    """

    name: Annotated[str, tyro.conf.Positional]
    """ghosts, scaling, smaller, batch, width, wider, or a TOML file of your own."""
    out: Path | None = None
    """Folder for the report, figures, tables and results.json; by default study-NAME-DATE. New or empty unless
    --resume."""
    resume: Flag = False
    """Go on in --out: cells that are finished there are not run again."""
    width: int | None = None
    """Features of every layer, of cells that do not vary it."""
    depth: int | None = None
    """Layers."""
    blocks: int | None = None
    """Blocks of the features, for phantom, of cells that do not vary it."""
    ghosts: int | None = None
    """Values that a block shows the others, for phantom, of cells that do not vary it."""
    ranks: int | None = None
    """Ranks that share a model, of cells that do not vary it."""
    batch: int | None = None
    """Rows of a step, of cells that do not vary it."""
    data: str | None = None
    """As for phantom train."""
    seeds: int | None = None
    """Trainings of every cell, in studies of the loss."""
    steps: int | None = None
    """Steps of a cell."""
    profile: str | None = None
    """Hardware profile whose watts the modelled energy has; see phantom hardware."""
    json: Flag = False
    """Print the results as JSON."""

    def run(self) -> None:
        names = ("width", "depth", "blocks", "ghosts", "ranks", "batch", "data", "seeds", "steps", "profile")
        changes = {name: value for name in names if (value := getattr(self, name)) is not None}
        settings = read_study(self.name, changes)
        out = folder_for(self.out, self.resume, "study", settings.name)
        found = study(settings, out.absolute(), resume=self.resume, show=True)
        if found is not None:  # under torchrun or srun only rank 0 prints
            show(found, out, tables.study(found), found.findings, json=self.json)
