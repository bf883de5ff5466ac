"""The optimizer, on each rank's own part of every parameter as a plain tensor.

Updates are elementwise, so a part needs nothing of the others, and going through DTensor for them costs more than the
update itself where models are small. All strategies get the same treatment.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from phantom_parallel.nn.groups import parameter_groups
from phantom_parallel.train.config import TrainConfig


class PartsOptimizer:
    """SGD or AdamW over the parts. ``parts`` are the parameters' own storage, by the parameters' names."""

    def __init__(self, model: nn.Module, config: TrainConfig, mesh: DeviceMesh | None) -> None:
        self._config, self._mesh = config, mesh
        self.parameters = dict(model.named_parameters())
        self.parts = {name: _own(parameter) for name, parameter in self.parameters.items()}
        own = {id(parameter): self.parts[name] for name, parameter in self.parameters.items()}
        groups = parameter_groups(
            model, config.lr, local=config.lr_local, compress=config.lr_compress, decompress=config.lr_decompress
        )
        for group in groups:
            group["params"] = [own[id(parameter)] for parameter in group["params"]]
            group["initial_lr"] = group["lr"]
        self._optimizer = _make(groups, config)

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
        if self._config.clip is not None:
            self._clip(self._config.clip)
        self._optimizer.step()
        for name, parameter in self.parameters.items():
            parameter.grad = self.parts[name].grad = None

    def _clip(self, largest: float) -> None:
        """Scale the gradient so that its norm over the whole model is at most ``largest``."""
        first = self._mesh is None or self._mesh.get_local_rank() == 0
        squares = [  # a parameter that every rank holds whole counts once
            part.grad.square().sum()
            for name, part in self.parts.items()
            if part.grad is not None and (first or _is_cut(self.parameters[name]))
        ]
        total = torch.stack(squares).sum()
        if self._mesh is not None:
            dist.all_reduce(total, group=self._mesh.get_group())
        scale = (largest / (total.sqrt() + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for part in self.parts.values():
            if part.grad is not None:
                part.grad.mul_(scale)


def state_keys(config: TrainConfig) -> tuple[str, ...]:
    """What the optimizer keeps of each parameter, by torch's names."""
    if config.optimizer == "adamw":
        return ("step", "exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum else ()


def _make(groups: list[dict[str, object]], config: TrainConfig) -> Optimizer:
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr, weight_decay=config.weight_decay)
    return SGD(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def _own(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    part = detached.to_local() if isinstance(detached, DTensor) else detached
    return part.requires_grad_()


def _own_gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    return gradient.redistribute(placements=parameter.placements).to_local()  # nothing where it is so already


def _is_cut(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)
