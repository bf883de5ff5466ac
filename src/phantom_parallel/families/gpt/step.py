"""A GPT built as a shape describes it, for dry runs and timed steps."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from phantom_parallel.cost.steps import DTYPES, FAKE, InferencePass, TrainingStep, on_device
from phantom_parallel.cost.terms import Shape
from phantom_parallel.distributed.pipeline import Pipeline, ends
from phantom_parallel.families.gpt.config import GPTConfig
from phantom_parallel.families.gpt.cost import GPTShape
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.nn.attention import Cache


def build_step(shape: GPTShape, mesh: DeviceMesh | None, *, device: str = "cpu") -> TrainingStep | InferencePass:
    """The model on this rank, and the pass of the shape's mode on random tokens."""
    where, made_on = ("cpu", "meta") if device == FAKE else (device, device)
    dtype = DTYPES[shape.word_bytes]
    model = GPT(
        shape.model,
        mesh=mesh,
        device=made_on,
        dtype=dtype,
        wire=shape.wire,
        activation_checkpointing=shape.activation_checkpointing,
        reshard_after_forward=shape.reshard_after_forward,
        interleave=shape.interleave,
    )
    if device == FAKE:
        on_device(model, where)
    rows = shape.batch // shape.ranks if shape.strategy == "fsdp" else shape.batch
    tokens = torch.randint(shape.model.vocab, (rows, shape.sequence), device=where)
    if shape.mode != "train":
        return _inference(model, tokens, shape.past)
    targets = tokens.clone()
    recomputed = tuple(model.layers[index] for index in model.stage) if shape.activation_checkpointing else ()
    if shape.stage is None or mesh is None:
        return TrainingStep(model, lambda: model.loss(tokens, targets), model._rotary(), recomputed)
    pipeline = Pipeline(
        model,
        model,
        mesh,
        stream=lambda rows: torch.empty(
            rows, shape.sequence, shape.model.dim, device="meta", dtype=DTYPES[shape.word_bytes]
        ),
        micro_batches=shape.stage.micro_batches,
        device=torch.device(where),
    )
    shared = ends(mesh) if shape.model.tie_embeddings else None

    def finish() -> None:
        if shared is not None:
            dist.all_reduce(model.embedding.weight.grad, group=shared)

    run = lambda: pipeline.forward_backward(tokens, targets)  # noqa: E731
    return TrainingStep(model, run, model._rotary(), recomputed, pipeline, finish)


def _inference(model: GPT, tokens: Tensor, past: int) -> InferencePass:
    """A cache made and filled by a prompt; or one that holds ``past`` positions already, filled by what follows."""

    @torch.no_grad()
    def new_cache() -> Cache:
        return model.new_cache(tokens.shape[0], past + tokens.shape[1])

    ready = new_cache() if past else None

    def forward() -> Iterable[Tensor]:
        cache = ready or new_cache()
        cache.position = past
        model.logits(tokens, cache, last=True)
        held = [cache.keys, cache.values]
        if cache.head is not None and _memory(cache.head) != _memory(model.embedding.weight):
            held.append(cache.head)
        return held

    return InferencePass(model, forward)


def _memory(tensor: Tensor) -> int:
    """Which memory a tensor lies in."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata


def step_shapes(ranks: int, *, held_out: bool) -> list[dict[str, Shape]]:
    """Held-out steps that are timed on local ranks; calibration measures none of transformers."""
    shapes: list[dict[str, Shape]] = []
    sizes = ((128, 3, 128, 4, 8), (256, 2, 64, 4, 8), (512, 2, 64, 2, 16)) if held_out else ()
    for dim, layers, context, batch, ghosts in sizes:
        for blocks in (ranks, 2 * ranks):
            model = GPTConfig(1024, dim, layers, heads=8, context=context, blocks=blocks, ghosts=ghosts)
            phantom = GPTShape(model, ranks=ranks, batch=batch, optimizer="sgd")
            shapes.append({"phantom": phantom, "megatron": phantom.with_strategy("megatron")})
    return shapes
