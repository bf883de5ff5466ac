"""The optimizer, on each rank's own part of every parameter as a plain tensor.

Updates are elementwise, so a part needs nothing of the others, and going through DTensor for them costs more than the
update itself where models are small. All strategies get the same treatment.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.nn.groups import parameter_groups
from phantom_parallel.train.config import TrainConfig


class PartsOptimizer:
    """SGD or AdamW over the parts. ``parts`` are the parameters' own storage, by the parameters' names.

    ``cut_over_copies`` says that parameters are cut over the data-parallel copies too, as FSDP2 does.
    """

    def __init__(
        self, model: nn.Module, config: TrainConfig, parallel: ParallelContext, *, cut_over_copies: bool = False
    ) -> None:
        self._config, self._parallel, self._cut_over_copies = config, parallel, cut_over_copies
        self.parameters = dict(model.named_parameters())
        self.parts = {name: _own(parameter) for name, parameter in self.parameters.items()}
        own = {id(parameter): self.parts[name] for name, parameter in self.parameters.items()}
        groups = parameter_groups(
            model, config.lr, local=config.lr_local, compress=config.lr_compress, decompress=config.lr_decompress
        )
        for group in groups:
            group["params"] = [own[id(parameter)] for parameter in group["params"]]
            group["initial_lr"] = group["lr"]
        # Fused updates take all tensors for contiguous, and do not look.
        self.fused = all(part.is_contiguous() for part in self.parts.values())
        self._optimizer = _make(groups, config, self.fused)

    @property
    def keys(self) -> tuple[str, ...]:
        """What is kept of each parameter, by torch's names."""
        return state_keys(self._config)

    def state(self, name: str) -> dict[str, Tensor]:
        """What is kept of the part ``name``; filled in place when a checkpoint is read."""
        return self._optimizer.state[self.parts[name]]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update from the parameters' gradients, at ``factor`` times the learning rates, and drop the gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        for name, parameter in self.parameters.items():
            self.parts[name].grad = _own_gradient(parameter)
        if self._config.max_grad_norm is not None:
            self._clip(self._config.max_grad_norm)
        self._optimizer.step()
        for name, parameter in self.parameters.items():
            parameter.grad = self.parts[name].grad = None

    def _clip(self, largest: float) -> None:
        """Scale the gradient so that its norm over the whole model is at most ``largest``."""
        parallel = self._parallel
        total = torch.zeros((), device=parallel.device)
        for name, part in self.parts.items():
            if part.grad is not None and _counts(self.parameters[name], parallel):
                total += part.grad.square().sum()
        if self._cut_over_copies:
            dist.all_reduce(total, group=parallel.group)
        elif parallel.tp is not None:
            dist.all_reduce(total, group=parallel.tp.get_group())
        scale = (largest / (total.sqrt() + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for part in self.parts.values():
            if part.grad is not None:
                part.grad.mul_(scale)


def state_keys(config: TrainConfig) -> tuple[str, ...]:
    """What the optimizer keeps of each parameter, by torch's names."""
    if config.optimizer == "adamw":
        return ("step", "exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum else ()


def _make(groups: list[dict[str, object]], config: TrainConfig, fused: bool) -> Optimizer:
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr, weight_decay=config.weight_decay, fused=fused)
    return SGD(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused)


def _own(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    part = detached.to_local() if isinstance(detached, DTensor) else detached
    return part.requires_grad_()


def _own_gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return None if gradient is None else gradient.contiguous()
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local().contiguous()


def _counts(parameter: Tensor, parallel: ParallelContext) -> bool:
    """Whether this rank's part belongs into a sum over ranks: one that several ranks hold counts on the first."""
    if not isinstance(parameter, DTensor):
        return parallel.tp_rank == 0
    where = parameter.device_mesh.get_coordinate()
    assert where is not None
    placed = zip(where, parameter.placements, strict=True)
    return all(index == 0 or not placement.is_replicate() for index, placement in placed)
