"""Conversion of dense feed-forward networks to phantom ones."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from phantom_parallel.checkpoint.model import load_model, read_config
from phantom_parallel.families.base import Converter
from phantom_parallel.families.ffn.model import FFN, FFNConfig
from phantom_parallel.infer.predict import open_inputs

_AT_ONCE = 1024  # rows of a batch


class FFNConverter(Converter):
    """All layers get the same ghosts. Calibration data are rows of inputs; the loss is the mean squared difference from
    the dense model's outputs, relative to their mean square.
    """

    maps: ClassVar[tuple[str, ...]] = ("layers.*",)

    def load_dense(self, path: Path) -> FFN:
        if read_config(path).strategy == "phantom":
            raise ValueError(f"{path} is a phantom model already: give a dense one")
        model: FFN = load_model(path, strategy="dense")
        return model

    def check(self, config: FFNConfig, blocks: int, ghosts: int) -> None:
        replace(config, strategy="phantom", blocks=blocks, ghosts=ghosts)

    def batches(
        self, path: Path, config: FFNConfig, data: Path, rows: int, length: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        inputs = open_inputs(data, config.width)
        held_out = inputs.rows // 5
        used = min(rows, inputs.rows - held_out)
        if held_out < 1 or used < config.width:
            raise ValueError(
                f"{data} has {inputs.rows} rows, too few for a covariance of {config.width} features and a fifth held "
                "out: give more"
            )
        whole = inputs.read(slice(0, used), slice(0, config.width)).float()
        rest = inputs.read(slice(inputs.rows - held_out, inputs.rows), slice(0, config.width)).float()
        return list(whole.split(_AT_ONCE)), list(rest.split(_AT_ONCE))

    @torch.no_grad()
    def loss(self, model: nn.Module, dense: nn.Module | None, batch: Tensor) -> float:
        if dense is None:
            return 0.0
        expected = dense(batch)
        return float((model(batch) - expected).square().mean() / expected.square().mean().clamp_min(1e-30))

    def phantom(self, model: nn.Module, blocks: int, ghosts: Mapping[str, int]) -> FFN:
        dense = cast(FFN, model)
        config = replace(dense.config, strategy="phantom", blocks=blocks, ghosts=max(ghosts.values()))
        made = FFN(config, device="meta", dtype=next(dense.parameters()).dtype)
        made.load_state_dict({name: t.detach() for name, t in dense.state_dict().items()}, assign=True)
        return made
