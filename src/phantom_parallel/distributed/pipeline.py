"""Pipelines: stages hold consecutive layers of a model, on one rank each or shared by several, and micro-batches pass
through the stages in turn.

The schedule is torch's ``Schedule1F1B``. A stage runs as many forward passes ahead as there are stages from it to the
last, then one backward and one forward pass in turn, so that it keeps the activations of that many micro-batches and no
more. Each rank sends what it holds of the last layer's outputs to the rank of its place in the next stage, and their
gradients to that in the stage before, once for each micro-batch: its features of a stream that is sharded, all of one
that ranks replicate. With M micro-batches and P stages of equal time, a rank is idle for (P-1) / (M+P-1) of a step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor

from phantom_parallel.ops.collectives import subgroup
from phantom_parallel.utils.layout import check_micro_batches
from phantom_parallel.utils.strategies import WireFormat

Run = Callable[[Tensor, Tensor | None], Tensor]


class Pipeline:
    """The stages of a model, one on each rank of a one-dimensional mesh, in the order of the stages. Where several
    ranks share a stage, each has such a mesh with those of its place in the other stages.

    ``run(x, targets)`` computes this rank's stage ``model`` of the model's input or what the stage before returned; on
    the last stage there are targets, and it returns the mean loss over the rows. ``stream`` is the shape of a row that
    a rank computes and sends on, of this dtype, or rounded to bf16 by that ``wire``.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        mesh: DeviceMesh,
        *,
        stream: tuple[int, ...],
        dtype: torch.dtype | None = None,
        wire: WireFormat = "full",
        micro_batches: int,
        device: torch.device,
    ) -> None:
        self.model, self.device, self._run, self._computed = model, device, run, dtype
        self.mesh, self.stage, self.stages, self.group = mesh, mesh.get_local_rank(), mesh.size(), mesh.get_group()
        self.micro_batches = micro_batches
        self._row, self._dtype, self._scale = stream, torch.bfloat16 if wire == "bf16" else dtype, 1.0
        self._schedules: dict[int, _Schedule] = {}

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def run(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """This rank's stage of what it is given or received; all but the last return what they send."""
        given = x if self.is_first else x.to(self._computed or torch.get_default_dtype())
        out = self._run(given, targets)
        return out if self.is_last or self._dtype is None else out.to(self._dtype)

    def forward_backward(self, x: Tensor, targets: Tensor, weight: float = 1.0) -> Tensor:
        """Accumulate the gradients of ``weight`` times the mean loss of some rows, and return that on the last stage, 0
        on the others. Every stage calls this with the same rows; the first uses x, and the last the targets.
        """
        schedule = self._schedule(len(x))
        self._scale = weight / self.micro_batches
        losses: list[Tensor] = []
        arguments = [x] if self.is_first else []
        more: dict[str, Any] = {"targets": targets} if self.is_last else {}
        schedule.step(*arguments, target=more.get("targets"), losses=losses, return_outputs=False, **more)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)

    @torch.no_grad()
    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """What ``run`` returns of some rows on the last stage, None on the others; every stage calls this."""
        if not self.is_first:
            x = torch.empty_like(self._stream(len(x)), device=self.device)
        out = relay(lambda x: self.run(x, targets if self.is_last else None), x, self.mesh)
        return out if self.is_last else None

    def _stream(self, rows: int) -> Tensor:
        return torch.empty(rows, *self._row, device="meta", dtype=self._dtype)

    def _schedule(self, rows: int) -> "_Schedule":
        if rows not in self._schedules:
            check_micro_batches(self.micro_batches, rows, self.stages)
            between = self._stream(rows // self.micro_batches).requires_grad_()
            shapes: dict[str, Any] = {"input_args": between, "output_args": between}
            stage = _Stage(self.model, self.stage, self.stages, self.device, **shapes, group=self.group)
            stage.pipeline = self
            self._schedules[rows] = _Schedule(stage, self.micro_batches, lambda loss, _: loss * self._scale)
        return self._schedules[rows]


class _Stage(PipelineStage):
    """A stage that runs by a function."""

    pipeline: Pipeline

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Any) -> Tensor:
        out = self.pipeline.run(args[0], kwargs.get("targets"))
        if self.is_last:
            return out
        return out.view_as(out)  # so that backward enters the model through its output, where hooks on modules are


class _Schedule(Schedule1F1B):
    """1F1B whose gradients are the sum over micro-batches, since the loss is scaled before. Every stage knows the
    shapes, so that stages have nothing to agree on before the first step.
    """

    def __init__(self, stage: _Stage, micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(stage, micro_batches, loss_fn=loss, scale_grads=False)
        stage.has_backward = True
        stage._inference_mode = InferenceMode.STATIC
        stage._prepare_forward_infra(micro_batches, (), has_backward=True)
        stage._prepare_backward_infra(micro_batches)

    def _initialize_stage(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do."""


def relay(run: Callable[[Tensor], Tensor], x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Run the stage of this rank of ``mesh``: of x on the first one, on the others of what the stage before
    sends into x. All but the last send the result on.
    """
    group, stage = mesh.get_group(), mesh.get_local_rank()
    if stage > 0:
        dist.recv(x, group=group, group_src=stage - 1)
    out = run(x)
    if stage < mesh.size() - 1:
        dist.send(out.contiguous(), group=group, group_dst=stage + 1)
    return out


def ends(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of the first and the last rank of ``mesh``, on these two ranks; None on the others."""
    ranks = dist.get_process_group_ranks(mesh.get_group())
    if mesh.get_local_rank() not in (0, mesh.size() - 1):
        return None
    return mesh.get_group() if len(ranks) == 2 else subgroup([ranks[0], ranks[-1]], mesh.get_group())


@torch.no_grad()
def sum_over_ends(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> None:
    """Sum the gradient of a parameter that both `ends` of a pipeline hold; nothing where ``group`` is None."""
    gradient = parameter.grad
    if group is None or gradient is None:
        return
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):  # an embedding's may be whole on every rank
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=group)
