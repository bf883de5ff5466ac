"""What a GPT is made of, by strategy: linear maps, with a norm before them or without, the embedding and the head."""

from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from phantom_parallel.families.gpt.config import GPTConfig
from phantom_parallel.nn.embedding import FeatureEmbedding, VocabularyHead
from phantom_parallel.nn.init import init_rows
from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.nn.normed import NormedLinear, NormedPhantomLinear, rms_norm
from phantom_parallel.nn.sharded import shared_seed

Cut = TypeVar("Cut", nn.Linear, nn.Embedding)


class WholeHead(NormedLinear):
    """The head of a stream that every rank holds whole. A tied one is given the embedding's weight, which the styles
    have cut by rows as they would cut its own.
    """

    def tied_rows(self, weight: Tensor) -> Tensor:
        return weight

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        if rows is None:
            return super().forward(x)
        x = rms_norm(x, self.norm, self.eps)
        if not isinstance(rows, DTensor):
            return F.linear(x, rows)
        whole = DTensor.from_local(x, rows.device_mesh, [Replicate()], run_check=False)
        logits = F.linear(whole, rows)
        assert isinstance(logits, DTensor)
        return logits.to_local(grad_placements=[Shard(x.dim() - 1)])


class Parts(Protocol):
    """Makers of a model's parts, each called in the order of the model, as each draws a seed."""

    def embedding(self) -> FeatureEmbedding | nn.Embedding:
        """Whole tokens in, the residual stream as the strategy cuts it out; its ``weight`` is what a head may share."""

    def normed(self, in_features: int, out_features: int) -> nn.Module:
        """From the stream through a norm to features that are cut between heads or pieces."""

    def linear(self, in_features: int, out_features: int, gain: float) -> nn.Module:
        """From such features back to the stream."""

    def head(self) -> VocabularyHead | WholeHead:
        """From the stream through a norm to this rank's logits. A tied one takes rows, which ``tied_rows`` makes of the
        embedding's weight.
        """


def parts_of(
    config: GPTConfig, mesh: DeviceMesh | None, device: torch.device | str | None, dtype: torch.dtype | None
) -> Parts:
    """The parts of the config's strategy."""
    kind = _PhantomParts if config.strategy == "phantom" else _WholeParts
    return kind(config, mesh, device, dtype)


def _embedding_std(config: GPTConfig) -> float:
    """One, as the stream has; but a weight that is the head's too must not make large logits."""
    return config.dim**-0.5 if config.tie_embeddings else 1.0


class _PhantomParts:
    def __init__(self, config: GPTConfig, mesh: DeviceMesh | None, device: Any, dtype: torch.dtype | None) -> None:
        self.config = config
        self.kwargs: dict[str, Any] = {"mesh": mesh, "device": device, "dtype": dtype}
        self.blocks: dict[str, Any] = {"blocks": config.blocks, "ghosts": config.ghosts}

    def embedding(self) -> FeatureEmbedding:
        config = self.config
        assert config.blocks is not None
        std = _embedding_std(config)
        return FeatureEmbedding(config.vocab, config.dim, blocks=config.blocks, std=std, **self.kwargs)

    def normed(self, in_features: int, out_features: int) -> nn.Module:
        return NormedPhantomLinear(in_features, out_features, eps=self.config.norm_eps, **self.blocks, **self.kwargs)

    def linear(self, in_features: int, out_features: int, gain: float) -> nn.Module:
        return PhantomLinear(in_features, out_features, False, gain=gain, **self.blocks, **self.kwargs)

    def head(self) -> VocabularyHead:
        config = self.config
        return VocabularyHead(config.vocab, config.dim, tied=config.tie_embeddings, eps=config.norm_eps, **self.kwargs)


class _WholeParts:
    """For ``dense``, and for ``megatron``: torch's own styles on the same modules."""

    def __init__(self, config: GPTConfig, mesh: DeviceMesh | None, device: Any, dtype: torch.dtype | None) -> None:
        self.config = config
        self.mesh = mesh if config.strategy == "megatron" else None
        self.device = torch.device(device or (torch.get_default_device() if mesh is None else mesh.device_type))
        self.dtype = dtype

    def embedding(self) -> nn.Embedding:
        vocab, dim = self.config.vocab, self.config.dim
        made = nn.Embedding(vocab, dim, device="meta", dtype=self.dtype)
        style = RowwiseParallel(input_layouts=Replicate())
        return self._cut(made, style, gain=_embedding_std(self.config) * dim**0.5)

    def normed(self, in_features: int, out_features: int) -> nn.Module:
        return NormedLinear(self._norm(), self._linear(in_features, out_features, ColwiseParallel()), self._eps)

    def linear(self, in_features: int, out_features: int, gain: float) -> nn.Module:
        return self._linear(in_features, out_features, RowwiseParallel(), gain)

    def head(self) -> WholeHead:
        config = self.config
        linear = nn.Identity() if config.tie_embeddings else self._linear(config.dim, config.vocab, ColwiseParallel())
        return WholeHead(self._norm(), linear, self._eps)

    @property
    def _eps(self) -> float:
        return self.config.norm_eps

    def _norm(self) -> nn.Parameter:
        weight = torch.ones(self.config.dim, device=self.device, dtype=self.dtype)
        if self.mesh is None:
            return nn.Parameter(weight)
        return nn.Parameter(DTensor.from_local(weight, self.mesh, [Replicate()], run_check=False))

    def _linear(self, in_features: int, out_features: int, style: ParallelStyle, gain: float = 1.0) -> nn.Module:
        made = nn.Linear(in_features, out_features, bias=False, device="meta", dtype=self.dtype)
        return self._cut(made, style, gain)

    def _cut(self, module: Cut, style: ParallelStyle, gain: float) -> Cut:
        """Draw the whole weight, the same on every rank, and let the style cut it."""
        if self.device.type != "meta":
            module.to_empty(device=self.device)
            weight, seed = module.weight, shared_seed(None, self.mesh)
            init_rows(weight, None, out_features=weight.shape[0], rank=0, ranks=1, seed=seed, gain=gain)
        if self.mesh is not None:
            parallelize_module(module, self.mesh, style, src_data_rank=None)
        return module
