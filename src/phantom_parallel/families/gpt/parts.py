"""The parts of a GPT for each strategy: linear maps, with or without a norm before them, the embedding and the head."""

from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from phantom_parallel.families.gpt.config import GPTConfig
from phantom_parallel.nn.embedding import FeatureEmbedding, VocabularyHead
from phantom_parallel.nn.init import init_rows
from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.nn.megatron import column_style, row_style
from phantom_parallel.nn.normed import NormedLinear, NormedPhantomLinear, rms_norm
from phantom_parallel.nn.sharded import broadcast_seed, to_local
from phantom_parallel.ops.collectives import RankGroup, flat_mesh, rank_group
from phantom_parallel.ops.megatron import column_linear
from phantom_parallel.utils.wire import WireFormat

M = TypeVar("M", nn.Linear, nn.Embedding)


class ReplicatedStreamHead(NormedLinear):
    """The head of a replicated residual stream. A tied head takes the embedding's weight, which torch's styles have
    sharded by rows as they would shard the head's own.
    """

    def __init__(self, norm: nn.Parameter, linear: nn.Module, eps: float, group: RankGroup) -> None:
        super().__init__(norm, linear, eps)
        self.group = group

    def tied_rows(self, weight: Tensor) -> Tensor:
        return weight

    def send_weight(self, rows: int, tied: Tensor | None = None, parts: int = 1) -> None:
        """Nothing: ranks that have the whole stream compute the logits of their part of the vocabulary without it."""

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        if rows is None:
            return super().forward(x)
        x = rms_norm(x, self.norm, self.eps)
        if not isinstance(rows, DTensor):
            return F.linear(x, rows)
        if self.group.wire != "full":
            return column_linear(x, to_local(rows), group=self.group)
        replicated = DTensor.from_local(x, rows.device_mesh, [Replicate()], run_check=False)
        logits = F.linear(replicated, rows)
        assert isinstance(logits, DTensor)
        return logits.to_local(grad_placements=[Shard(x.dim() - 1)])


class Parts(Protocol):
    """Factory of a model's parts. The calls must follow the order of the model, since each draws a seed.

    Attributes:
        held: Whether this rank holds the next parts. If not, they are made on the meta device, after the same draws.
    """

    held: bool

    def embedding(self) -> FeatureEmbedding | nn.Embedding:
        """From tokens to the residual stream, sharded as the strategy does; a head may share its ``weight``."""

    def normed(self, in_features: int, out_features: int, ghosts: int | None, *, bias: bool = False) -> nn.Module:
        """From the stream through a norm to features that are sharded between heads or pieces."""

    def linear(self, in_features: int, out_features: int, ghosts: int | None, gain: float) -> nn.Module:
        """From such features to the stream."""

    def head(self) -> VocabularyHead | ReplicatedStreamHead:
        """From the stream through a norm to this rank's logits. A tied head takes rows, which ``tied_rows`` makes from
        the embedding's weight.
        """


def make_parts(
    config: GPTConfig,
    mesh: DeviceMesh | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    wire: WireFormat,
) -> Parts:
    """The parts for the strategy of a configuration."""
    parts = _PhantomParts if config.strategy == "phantom" else _ReplicatedStreamParts
    return parts(config, mesh, device, dtype, wire)


def _embedding_std(config: GPTConfig) -> float:
    """One, as the stream has; but a weight that the head shares must not lead to large logits."""
    return config.dim**-0.5 if config.tie_embeddings else 1.0


class _PhantomParts:
    def __init__(
        self, config: GPTConfig, mesh: DeviceMesh | None, device: Any, dtype: torch.dtype | None, wire: WireFormat
    ) -> None:
        self.config, self.held = config, True
        self.kwargs: dict[str, Any] = {"mesh": mesh, "device": device, "dtype": dtype}
        self.wired = self.kwargs | {"wire": wire}

    def embedding(self) -> FeatureEmbedding:
        config = self.config
        assert config.blocks is not None
        std = _embedding_std(config)
        return FeatureEmbedding(config.vocab, config.dim, blocks=config.blocks, std=std, **self.kwargs)

    def normed(self, in_features: int, out_features: int, ghosts: int | None, *, bias: bool = False) -> nn.Module:
        cut = self._cut(ghosts)
        return NormedPhantomLinear(in_features, out_features, bias, eps=self.config.norm_eps, **cut, **self.wired)

    def linear(self, in_features: int, out_features: int, ghosts: int | None, gain: float) -> nn.Module:
        return PhantomLinear(in_features, out_features, False, gain=gain, **self._cut(ghosts), **self.wired)

    def _cut(self, ghosts: int | None) -> dict[str, Any]:
        return {"blocks": self.config.blocks, "ghosts": ghosts}

    def head(self) -> VocabularyHead:
        config = self.config
        tied, eps = config.tie_embeddings, config.norm_eps
        return VocabularyHead(
            config.vocab, config.dim, blocks=config.blocks, tie_embeddings=tied, eps=eps, **self.wired
        )


class _ReplicatedStreamParts:
    """For strategies that have the whole stream; ``megatron`` applies torch's styles to the same modules."""

    def __init__(
        self, config: GPTConfig, mesh: DeviceMesh | None, device: Any, dtype: torch.dtype | None, wire: WireFormat
    ) -> None:
        mesh = flat_mesh(mesh)
        self.config, self.held, self.ranks, self.wire = config, True, mesh, wire
        self.mesh = mesh if config.strategy == "megatron" else None
        self.device = torch.device(device or (torch.get_default_device() if mesh is None else mesh.device_type))
        self.dtype = dtype

    def embedding(self) -> nn.Embedding:
        vocab, dim = self.config.vocab, self.config.dim
        made = nn.Embedding(vocab, dim, device="meta", dtype=self.dtype)
        style = row_style(self.wire, embedding=True)
        return self._parallelize(made, style, gain=_embedding_std(self.config) * dim**0.5)

    def normed(self, in_features: int, out_features: int, ghosts: int | None, *, bias: bool = False) -> nn.Module:
        linear = self._linear(in_features, out_features, column_style(self.wire), bias=bias)
        return NormedLinear(self._norm(), linear, self._eps)

    def linear(self, in_features: int, out_features: int, ghosts: int | None, gain: float) -> nn.Module:
        return self._linear(in_features, out_features, row_style(self.wire), gain=gain)

    def head(self) -> ReplicatedStreamHead:
        config = self.config
        style = column_style(self.wire)
        linear = nn.Identity() if config.tie_embeddings else self._linear(config.dim, config.vocab, style)
        return ReplicatedStreamHead(self._norm(), linear, self._eps, rank_group(self.mesh, self.wire))

    @property
    def _eps(self) -> float:
        return self.config.norm_eps

    def _norm(self) -> nn.Parameter:
        weight = torch.ones(self.config.dim, device=self.device if self.held else "meta", dtype=self.dtype)
        if self.mesh is None:
            return nn.Parameter(weight)
        return nn.Parameter(DTensor.from_local(weight, self.mesh, [Replicate()], run_check=False))

    def _linear(
        self, in_features: int, out_features: int, style: ParallelStyle, *, gain: float = 1.0, bias: bool = False
    ) -> nn.Module:
        made = nn.Linear(in_features, out_features, bias=bias, device="meta", dtype=self.dtype)
        return self._parallelize(made, style, gain)

    def _parallelize(self, module: M, style: ParallelStyle, gain: float) -> M:
        """Initialize the full weight, the same on every rank, and apply the style to the module."""
        if self.device.type != "meta":
            seed = broadcast_seed(None, self.ranks)
            if self.held:
                weight, bias = module.to_empty(device=self.device).weight, getattr(module, "bias", None)
                init_rows(weight, bias, out_features=weight.shape[0], rank=0, ranks=1, seed=seed, gain=gain)
        if self.mesh is not None:
            parallelize_module(module, self.mesh, style, src_data_rank=None)
        return module
