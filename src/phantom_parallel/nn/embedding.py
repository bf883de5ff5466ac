"""The embedding and the head of a language model whose residual stream is sharded by features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from phantom_parallel.nn.init import init_columns, init_rows
from phantom_parallel.nn.sharded import broadcast_seed, check_features, check_settings, shard_parameter, to_local
from phantom_parallel.ops import vocabulary_rows
from phantom_parallel.ops.blocks import cast_for_autocast
from phantom_parallel.ops.collectives import block_group, flat_mesh, rank_group, require_flat, second_communicator
from phantom_parallel.ops.head import PrefetchedWeight, begin_rows, end_rows, row_logits, vocabulary_logits
from phantom_parallel.ops.linear import Begun
from phantom_parallel.utils.layout import BlockLayout, RowLayout
from phantom_parallel.utils.strategies import WireFormat, head_splits_rows


class FeatureEmbedding(nn.Module):
    """An embedding sharded by features: all tokens in, this rank's features out, without a collective.

    Args:
        vocab, dim: Number of tokens, and features of the full embedding, independent of the number of ranks.
        blocks: Number of blocks of features, each of which is initialized from its own generator.
        std: Standard deviation of the initial weights.
        mesh, device, dtype: As for `PhantomLinear`.
    """

    weight: nn.Parameter

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        blocks: int,
        std: float = 1.0,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocab, self.dim, self.blocks, self.std = vocab, dim, blocks, std
        self.mesh = mesh = flat_mesh(mesh)
        self.group = rank_group(mesh)
        check_settings(self, mesh, dtype, vocab=vocab, dim=dim, blocks=blocks, std=std)
        self.layout = BlockLayout(dim, dim, blocks, max(1, self.group.size // blocks), self.group.size)
        device = device or (None if mesh is None else mesh.device_type)
        weight = torch.empty(vocab, dim // self.group.size, device=device, dtype=dtype)
        if mesh is not None:
            weight = DTensor.from_local(weight, mesh, [Shard(1)], run_check=False)
        self.weight = nn.Parameter(weight)
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the weight, identically on any number of ranks."""
        seed = broadcast_seed(seed, self.mesh)
        init_columns(to_local(self.weight), layout=self.layout, rank=self.group.rank, seed=seed, std=self.std)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, to_local(self.weight))

    def extra_repr(self) -> str:
        return f"{self.vocab} tokens, {self.dim} features"


class VocabularyHead(nn.Module):
    """RMSNorm and the projection to logits, sharded by vocabulary: this rank's features in, this rank's logits out.

    Forward all-gathers the features together with the norm's squares; backward reduce-scatters their gradient. Where
    that moves fewer bytes, logits for a loss can be computed by rows instead: see `send_weight`. The loss of such
    logits is ``phantom_parallel.ops.vocabulary_cross_entropy``.

    Args:
        vocab, dim: Number of tokens, and features of the full residual stream, independent of the number of ranks.
        blocks: Number of blocks of the stream's features: on more ranks, features are gathered across blocks first.
        tie_embeddings: Whether the head has no weight of its own: ``forward`` takes rows that ``tied_rows`` makes from
            the embedding's weight.
        eps: Added to the mean square.
        mesh, wire, device, dtype: As for `PhantomLinear`; rows of a tied weight are never rounded.
    """

    norm: nn.Parameter

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        blocks: int | None = None,
        tie_embeddings: bool = False,
        eps: float = 1e-5,
        mesh: DeviceMesh | None = None,
        wire: WireFormat = "full",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocab, self.dim, self.eps = vocab, dim, eps
        settings = {"vocab": vocab, "dim": dim, "blocks": blocks, "eps": eps, "wire": wire}
        check_settings(self, mesh, dtype, **settings, tie_embeddings=tie_embeddings)
        self.group = rank_group(mesh, wire) if blocks is None else block_group(mesh, blocks, wire)
        self.mesh = mesh = flat_mesh(mesh)
        self._weight_group = self.group if mesh is None else second_communicator(mesh.get_group(), mesh.device_type)
        RowLayout(dim, vocab, self.group.size)
        device, size = device or (None if mesh is None else mesh.device_type), self.group.size
        self.norm = shard_parameter(torch.ones(dim // size, device=device, dtype=dtype), mesh)
        self.weight: nn.Parameter | None = None
        if not tie_embeddings:
            self.weight = shard_parameter(torch.empty(vocab // size, dim, device=device, dtype=dtype), mesh)
            if not self.weight.is_meta:
                self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the weight, identically on any number of ranks, and set the norm's weight to one."""
        nn.init.ones_(to_local(self.norm.detach()))
        if self.weight is not None:
            where = {"out_features": self.vocab, "rank": self.group.rank, "ranks": self.group.size}
            init_rows(to_local(self.weight), None, **where, seed=broadcast_seed(seed, self.mesh))

    def forward(self, x: Tensor, rows: Tensor | PrefetchedWeight | None = None) -> Tensor:
        """``rows`` (vocab / ranks, dim) is the weight of a head with ``tie_embeddings``. If it is what `send_weight`
        returned, the result is all logits of this rank's rows of x, (rows of x / ranks, vocab).
        """
        check_features(self, x, self.dim, self.group)
        norm = to_local(self.norm)
        if isinstance(rows, PrefetchedWeight):
            return row_logits(x, norm, rows.whole(), eps=self.eps, group=self.group)
        if rows is None:
            if self.weight is None:
                raise ValueError("a head with tie_embeddings=True needs rows: head.tied_rows(embedding.weight)")
            rows = to_local(self.weight)
        return vocabulary_logits(x, norm, rows, eps=self.eps, group=self.group)

    def begin(self, x: Tensor) -> Begun:
        """Start ``forward`` with a weight in flight: features are in flight until `end`."""
        check_features(self, x, self.dim, self.group)
        return begin_rows(x, to_local(self.norm), group=require_flat(self.group))

    def end(self, begun: Begun, whole: Tensor) -> Tensor:
        """All logits of this rank's rows of what `begin` has begun, with the whole weight."""
        return end_rows(begun, whole, eps=self.eps, group=self.group)

    def send_weight(self, rows: int, tied: Tensor | None = None, parts: int = 1) -> PrefetchedWeight | None:
        """Start to send the weight, or that of a ``tied`` embedding, to all ranks, for a loss of ``rows`` rows in equal
        ``parts``, if that then moves fewer bytes; otherwise None. ``forward`` takes it, and
        ``phantom_parallel.ops.row_cross_entropy`` is the loss of what that returns.
        """
        weight, dim = (self.weight, 0) if tied is None else (tied, 1)
        if weight is None or self.group.inter_block is not None:
            return None
        (word,) = cast_for_autocast(to_local(self.norm.detach()))
        sizes = rows, self.dim, self.vocab, self.group.size
        widths = {"word_bytes": word.element_size(), "weight_bytes": weight.element_size()}
        if not head_splits_rows(*sizes, wire=self.group.wire, **widths, parts=parts):
            return None
        return PrefetchedWeight(to_local(weight), dim, self._weight_group)

    def tied_rows(self, weight: Tensor) -> Tensor:
        """This rank's rows of an embedding that is sharded by features: one all-to-all forward and one backward."""
        return vocabulary_rows(to_local(weight), group=self.group)

    def extra_repr(self) -> str:
        return f"{self.dim} -> {self.vocab}, eps={self.eps}{', tie_embeddings' if self.weight is None else ''}"
