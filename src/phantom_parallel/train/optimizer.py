"""The optimizer, on each rank's own part of every parameter as a plain tensor.

Updates are elementwise, so that parts are independent, and the overhead of DTensor would exceed the update itself for
small models. All strategies are treated alike.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from phantom_parallel.distributed.data_parallel import local_part
from phantom_parallel.distributed.objects import process_group_of
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.nn.linear import parameter_groups
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.strategies import get_strategy


class PartsOptimizer:
    """SGD or AdamW over this rank's ``parts`` of the ``parameters`` that are trained, both by name; parts share the
    storage of the parameters.

    A stage of a pipeline names what an earlier stage holds as well in ``model.repeated_parameters``. With
    ``sharded_over_copies``, parameters are sharded over the data-parallel copies as well, as FSDP2 does.
    """

    def __init__(
        self, model: nn.Module, config: TrainConfig, parallel: ParallelContext, *, sharded_over_copies: bool = False
    ) -> None:
        self._config, self._parallel, self._sharded_over_copies = config, parallel, sharded_over_copies
        self._staged = get_strategy(config.strategy).splits_depth
        self._repeated: frozenset[str] = getattr(model, "repeated_parameters", frozenset())
        self.parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.parts = {name: local_part(value.detach()).requires_grad_() for name, value in self.parameters.items()}
        own = {id(parameter): self.parts[name] for name, parameter in self.parameters.items()}
        rates = {name: getattr(config, f"lr_{name}") for name in ("local", "compress", "decompress")}
        groups = parameter_groups(model, config.lr, **rates)
        for group in groups:
            group["params"] = [own[id(parameter)] for parameter in group["params"]]
            group["initial_lr"] = group["lr"]
        # Fused updates assume contiguous tensors without checking.
        self.fused = all(part.is_contiguous() for part in self.parts.values())
        self.keys = state_keys(config)
        common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": self.fused}
        self._optimizer: Optimizer = (
            AdamW(groups, **common) if config.optimizer == "adamw" else SGD(groups, momentum=config.momentum, **common)
        )

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the states of the part ``name``; loading a checkpoint fills them in place."""
        return self._optimizer.state[self.parts[name]]

    def forget(self) -> None:
        """Forget all earlier gradients, as a new optimizer."""
        self._optimizer.state.clear()

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update the parameters at ``factor`` times the learning rates, and clear their gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                gradient = gradient.redistribute(placements=parameter.placements)  # nothing where they are the same
            self.parts[name].grad = None if gradient is None else local_part(gradient).contiguous()
        if self._config.max_grad_norm is not None:
            self._clip(self._config.max_grad_norm)
        self._optimizer.step()
        for name, parameter in self.parameters.items():
            parameter.grad = self.parts[name].grad = None

    def _clip(self, max_norm: float) -> None:
        """Scale the gradient so that its norm over the whole model is at most ``max_norm``."""
        parallel = self._parallel
        total = torch.zeros((), device=parallel.device, dtype=torch.float64)
        for name, part in self.parts.items():
            if part.grad is not None and self._counts(name):
                total += part.grad.square().sum()
        if self._sharded_over_copies:
            dist.all_reduce(total, group=parallel.group)
        elif parallel.shared is not None:
            dist.all_reduce(total, group=process_group_of(parallel.shared))
        torch.nn.utils.clip_grads_with_norm_(self.parts.values(), max_norm, total.sqrt())

    def _counts(self, name: str) -> bool:
        """Return whether this rank's part counts in a sum over ranks: of replicated parts, only the first one does."""
        parameter = self.parameters[name]
        if self._staged or name in self._repeated:
            return name not in self._repeated
        if not isinstance(parameter, DTensor):
            return self._parallel.tp_rank == 0
        coordinate = parameter.device_mesh.get_coordinate()
        assert coordinate is not None
        placed = zip(coordinate, parameter.placements, strict=True)
        return all(index == 0 or not placement.is_replicate() for index, placement in placed)


def state_keys(config: TrainConfig) -> tuple[str, ...]:
    """Names of the states of each parameter, as in torch.optim."""
    if config.optimizer == "adamw":
        return ("step", "exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum else ()
