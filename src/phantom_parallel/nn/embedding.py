"""The two ends of a language model whose features are cut over ranks: the embedding and the head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from phantom_parallel.nn.init import init_columns, init_rows
from phantom_parallel.nn.sharded import local_rows, shard_rows, shared_seed
from phantom_parallel.ops import gather_normed, vocabulary_rows
from phantom_parallel.ops.collectives import ranks_of
from phantom_parallel.utils.layout import RowLayout


class FeatureEmbedding(nn.Module):
    """An embedding cut by features: whole tokens in, this rank's features out, and nothing exchanged.

    Args:
        vocab: number of tokens of the whole embedding, whatever the number of ranks.
        dim: features of the whole embedding.
        blocks: features are drawn block by block, so that they are the same on any number of ranks that divides it.
        std: of the initial weights.
        mesh: as for `PhantomLinear`.
        device: as for `PhantomLinear`.
        dtype: as for `PhantomLinear`.
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
        self.mesh, self.ranks = mesh, ranks_of(mesh)
        device = device or (None if mesh is None else mesh.device_type)
        weight = torch.empty(vocab, dim // self.ranks.size, device=device, dtype=dtype)
        if mesh is not None:
            weight = DTensor.from_local(weight, mesh, [Shard(1)], run_check=False)
        self.weight = nn.Parameter(weight)
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the weight anew, the same one on any number of ranks."""
        held = self.blocks // self.ranks.size
        where = {"first": self.ranks.rank * held, "held": held}
        init_columns(local_rows(self.weight), **where, seed=shared_seed(seed, self.mesh), std=self.std)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, local_rows(self.weight))

    def extra_repr(self) -> str:
        return f"{self.vocab} tokens, {self.dim} features"


class VocabularyHead(nn.Module):
    """RMSNorm and the map to logits, cut by rows of the vocabulary: this rank's features in, this rank's logits out.

    Forward all-gathers the features, with the norm's squares among them; backward reduce-scatters their gradient.
    A tied head has no weight of its own and is given its rows, which ``tied_rows`` makes of the embedding's.

    Args:
        vocab: number of tokens of the whole head, whatever the number of ranks.
        dim: features of the whole head.
        tied: whether the rows come from elsewhere.
        eps: added to the mean square.
        mesh: as for `PhantomLinear`.
        device: as for `PhantomLinear`.
        dtype: as for `PhantomLinear`.
    """

    norm: nn.Parameter

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        tied: bool = False,
        eps: float = 1e-5,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocab, self.dim, self.eps = vocab, dim, eps
        self.mesh, self.ranks = mesh, ranks_of(mesh)
        RowLayout(dim, vocab, self.ranks.size)
        device, size = device or (None if mesh is None else mesh.device_type), self.ranks.size
        self.norm = shard_rows(torch.ones(dim // size, device=device, dtype=dtype), mesh)
        self.weight: nn.Parameter | None = None
        if not tied:
            self.weight = shard_rows(torch.empty(vocab // size, dim, device=device, dtype=dtype), mesh)
            if not self.weight.is_meta:
                self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the weight anew, the same one on any number of ranks, and set the norm's to one."""
        nn.init.ones_(local_rows(self.norm.detach()))
        if self.weight is not None:
            where = {"out_features": self.vocab, "rank": self.ranks.rank, "ranks": self.ranks.size}
            init_rows(local_rows(self.weight), None, **where, seed=shared_seed(seed, self.mesh))

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """``rows`` (vocab / ranks, dim) are those of a tied head."""
        if rows is None:
            assert self.weight is not None
            rows = local_rows(self.weight)
        return F.linear(gather_normed(x, local_rows(self.norm), eps=self.eps, ranks=self.ranks), rows)

    def tied_rows(self, weight: Tensor) -> Tensor:
        """This rank's rows of an embedding that is cut by features: one all-to-all each way."""
        return vocabulary_rows(local_rows(weight), ranks=self.ranks)

    def extra_repr(self) -> str:
        return f"{self.dim} -> {self.vocab}, eps={self.eps}{', tied' if self.weight is None else ''}"
