"""Layouts of sharded features: the sizes that follow from a layer's arguments, which are validated."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, isqrt

BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel


def nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of ``number`` on either side of ``wanted``, for an error message."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    near = [d for d in divisors if d < wanted][-1:] + [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, near))


def positive(**sizes: object) -> None:
    """Raise ValueError unless every size is a positive whole number."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive whole number, got {value!r}")


def buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Indices of tensors of these sizes in bytes, in buckets of at most `BUCKET_BYTES` or of one tensor. The largest
    come first, so that the sizes of buckets do not depend on the order of tensors.
    """
    groups, room = list[list[int]](), 0
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if sizes[index] > room:
            groups, room = [*groups, []], BUCKET_BYTES
        groups[-1].append(index)
        room -= sizes[index]
    return groups


def stage_layers(layers: int, stages: int, stage: int = 0) -> range:
    """The layers of one stage of a pipeline. Stages have equally many, the first ones one more if need be."""
    if layers < stages:
        raise ValueError(f"a pipeline of {stages} stages needs a layer for each, got {layers}: use fewer stages")
    each, more = divmod(layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def check_micro_batches(micro_batches: int, rows: int, stages: int) -> None:
    """Raise ValueError if a pipeline cannot pass ``rows`` rows on in so many micro-batches."""
    positive(micro_batches=micro_batches)
    if micro_batches < stages:
        raise ValueError(f"micro_batches={micro_batches} is below the {stages} stages of the pipeline: use {stages}")
    if rows % micro_batches:
        near = nearest_divisors(rows, micro_batches)
        raise ValueError(f"micro_batches={micro_batches} does not divide the {rows} rows of a copy: use {near}")


@dataclass(frozen=True)
class BlockLayout:
    """A phantom layer's features: p blocks with k ghosts each, over R ranks.

    A rank holds p / R blocks; or, where there are more ranks than blocks, ``inside`` = R / p ranks share each block,
    and hold equal parts of its features and ghosts.
    """

    in_features: int
    out_features: int
    blocks: int
    ghosts: int
    ranks: int = 1

    def __post_init__(self) -> None:
        positive(in_features=self.in_features, out_features=self.out_features, blocks=self.blocks, ghosts=self.ghosts)
        positive(ranks=self.ranks)
        if self.blocks < 2:
            raise ValueError(f"blocks must be at least 2, got {self.blocks} (use nn.Linear)")
        for name, features in (("in_features", self.in_features), ("out_features", self.out_features)):
            if features % self.blocks:
                near = nearest_divisors(gcd(self.in_features, self.out_features), self.blocks)
                raise ValueError(f"blocks={self.blocks} does not divide {name}={features}: use {near}")
        if self.ranks < self.blocks and self.blocks % self.ranks:
            near = nearest_divisors(self.blocks, self.ranks)
            raise ValueError(f"{self.ranks} ranks do not divide blocks={self.blocks}: run on {near} ranks")
        if self.ranks > self.blocks and self.ranks % self.blocks:
            below = self.ranks // self.blocks * self.blocks
            near = f"{below} or {below + self.blocks}"
            raise ValueError(f"{self.ranks} ranks are not a multiple of blocks={self.blocks}: run on {near} ranks")
        if self.ghosts > self.block_in:
            limits = f"at most {self.block_in}, and below {self.break_even:.0f} for a layer smaller than a dense one"
            raise ValueError(f"ghosts={self.ghosts} is larger than a block of {self.block_in} input features: {limits}")
        sizes = {"input features": self.block_in, "output features": self.block_out, "ghosts": self.ghosts}
        for name, size in sizes.items():
            if size % self.inside:
                divisors = nearest_divisors(size, self.inside).split(" or ")
                near = " or ".join(str(self.blocks * int(divisor)) for divisor in divisors)
                raise ValueError(f"{self.inside} ranks a block do not divide its {size} {name}: run on {near} ranks")

    @property
    def inside(self) -> int:
        """t: ranks that share a block; 1 where a rank holds whole blocks."""
        return max(1, self.ranks // self.blocks)

    def blocks_of(self, rank: int) -> range:
        """Blocks of which a rank holds all features; of a shared block, its part."""
        first = rank * self.blocks // self.ranks
        return range(first, first + max(1, self.blocks // self.ranks))

    def place_of(self, rank: int) -> int:
        """s: index of a rank among those that share its block."""
        return rank % self.inside

    @property
    def block_in(self) -> int:
        """m_in: features that come into a block."""
        return self.in_features // self.blocks

    @property
    def block_out(self) -> int:
        """m_out: features that go out of a block."""
        return self.out_features // self.blocks

    @property
    def weights(self) -> int:
        """Number of weights of the full layer, without its bias."""
        p, k = self.blocks, self.ghosts
        return p * (self.block_out * self.block_in + k * self.block_in + (p - 1) * k * self.block_out)

    @property
    def break_even(self) -> float:
        """The ghosts at which weights, and with them multiply-adds, are as many as a dense layer's."""
        others = self.blocks - 1
        return others * self.block_in * self.block_out / (self.block_in + others * self.block_out)


@dataclass(frozen=True)
class RowLayout:
    """The features of a tensor-parallel layer, sharded over R ranks."""

    in_features: int
    out_features: int
    ranks: int = 1

    def __post_init__(self) -> None:
        positive(in_features=self.in_features, out_features=self.out_features, ranks=self.ranks)
        for name, features in (("in_features", self.in_features), ("out_features", self.out_features)):
            if features % self.ranks:
                near = nearest_divisors(gcd(self.in_features, self.out_features), self.ranks)
                raise ValueError(f"{self.ranks} ranks do not divide {name}={features}: run on {near} ranks")
