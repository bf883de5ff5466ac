"""A GPT built as a shape describes it, for dry runs and timed steps."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from phantom_parallel.cost.steps import DTYPES, InferencePass, TrainingStep
from phantom_parallel.families.gpt.cost import GPTShape
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.nn.attention import Cache


def build_step(shape: GPTShape, mesh: DeviceMesh | None, *, device: str) -> TrainingStep | InferencePass:
    """The model on this rank, and the pass of the shape's mode on random tokens."""
    model = GPT(
        shape.config,
        mesh=mesh,
        device=device,
        dtype=DTYPES[shape.word_bytes],
        wire=shape.wire,
        activation_checkpointing=shape.recompute,
    )
    tokens = torch.randint(shape.vocab, (shape.batch, shape.sequence), device=device)
    if shape.mode != "train":
        return _inference(model, tokens, shape.past)
    targets = tokens.clone()
    recomputed = tuple(model.layers) if shape.recompute else ()
    return TrainingStep(model, lambda: model.loss(tokens, targets), model._rotary(), recomputed)


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
