"""What one rank of a `phantom_parallel.GPT` computes, sends and keeps, and these passes for dry runs and timing.

The tables of exchanges and what else is counted are in docs/transformers-counting.md. Parts are named as the modules
are. ``prefill`` and ``decode`` are forward passes that fill a cache.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.cost import terms
from phantom_parallel.cost.dryrun import DTYPES, FAKE, InferencePass, TrainingStep, build_model
from phantom_parallel.cost.terms import Exchange, Group, LayerCost, Memory, Product, Shape, Stage
from phantom_parallel.distributed.pipeline import Pipeline, ends, sum_over_ends
from phantom_parallel.families.gpt.config import GPTConfig, check_interleave
from phantom_parallel.families.gpt.model import GPT, next_token
from phantom_parallel.nn.sharded import to_local
from phantom_parallel.utils.layout import BlockLayout, RowLayout
from phantom_parallel.utils.settings import NO_OPTION, Features, NonNegativeInt, PositiveFloat, PositiveInt, Ranks
from phantom_parallel.utils.strategies import StrategyName, get_strategy, head_splits_rows

Mode = Literal["train", "prefill", "decode"]
INDEX_BYTES = 8  # of a token
Costs = tuple[tuple[LayerCost, ...], tuple[Exchange, ...]]


@dataclass(frozen=True)
class GPTShape(Shape):
    """A transformer and how it is run, for example ``GPTShape(model.config, sequence=256, batch=8, ranks=4)``."""

    family: ClassVar[str] = "gpt"
    listed: ClassVar[tuple[str, ...]] = ("dim", "layers", "heads", "sequence", "batch")
    modes: ClassVar[tuple[str, ...]] = get_args(Mode)
    modelled: ClassVar[tuple[str, ...]] = ("tensor-2d", "caat-net")
    example: ClassVar[dict[str, Any]] = {"vocab": 32768, "dim": 4096, "layers": 4, "heads": 32, "context": 2048}

    model: GPTConfig
    batch: Features = 1
    sequence: Features = None  # type: ignore[assignment]  # positions that a pass works on; by default the context
    activation_checkpointing: bool = False
    """Keep only the input of each layer, and compute the rest again in backward."""
    interleave: PositiveInt = 1
    """Parts of a copy's sequences that are interleaved in a training step, so that exchanges of one overlap with
    products of the others."""
    mode: Mode = "train"  # or a forward pass that fills a cache: `prefill` and `decode` make those
    past: NonNegativeInt = 0  # positions that the cache holds already
    pp: Ranks = 1  # stages of a pipeline, of ``ranks`` ranks each
    channels: PositiveFloat = field(default=1.0, metadata=NO_OPTION)  # share of a layer's output that ranks sum

    @classmethod
    def filled(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The context is that of the sequence, unless it is given."""
        if settings.get("sequence") is not None and settings.get("context") is None:
            settings["context"] = settings["sequence"] + settings.get("past", 0)
        return super().filled(settings)

    def __post_init__(self) -> None:
        if self.sequence is None:
            object.__setattr__(self, "sequence", self.model.context)
        super().__post_init__()
        if (self.past > 0) != (self.mode == "decode"):
            raise ValueError(f"past belongs to decode, and must be above 0 there: got past={self.past} for {self.mode}")
        model = self.model
        model.check_stages(self.pp, self.interleave)
        check_interleave(self.interleave, model, self.ranks, self.activation_checkpointing)
        if self.grid > 1 and (model.vocab % self.ranks or self.batch % self.grid):
            raise ValueError(f"a grid of {self.ranks} ranks does not divide vocab={model.vocab} or batch={self.batch}")
        if self.mode == "train" and self.batch % self.interleave:
            raise ValueError(f"interleave={self.interleave} does not divide the {self.batch} sequences of a copy")
        if self.mode != "train" and not self.splits_work and self.stage is None:
            raise ValueError(f"the strategy {self.strategy} is for training: {self.mode} runs on ranks by megatron")
        assert self.terms is not None  # layouts that are not possible raise here

    @cached_property
    def terms(self) -> Costs:
        if self.splits_work:
            return _whole_costs(self), ()
        return _fsdp_costs(self) if self.stage is None else _pipeline_costs(self, self.stage)

    def with_strategy(self, strategy: StrategyName, **changes: Any) -> Self:
        return super().with_strategy(strategy, **{"layer_ghosts": None} | changes)

    def passes(self) -> dict[str, Self]:
        """A training step, a prefill of as long a prompt, and a token decoded after it. FSDP2 trains only."""
        if self.mode != "train":
            return {}
        if not self.splits_work and self.stage is None:
            return {"train": self}
        return {"train": self, "prefill": self.prefill(), "decode": self.decode()}

    @property
    def step_name(self) -> str:
        return {"train": "one training step", "prefill": "a prompt"}.get(self.mode, f"one token after {self.past:,}")

    def prefill(self, prompt: int | None = None, **changes: Any) -> Self:
        """A cache made and filled with prompts of so many positions, for the logits of each one's last."""
        prompt = self.sequence if prompt is None else prompt
        sizes = {"mode": "prefill", "sequence": prompt, "past": 0, "context": max(self.model.context, prompt)}
        return self.updated(**sizes | changes)

    def decode(self, past: int | None = None, **changes: Any) -> Self:
        """One more token for each sequence, after ``past`` positions."""
        past = self.sequence if past is None else past
        sizes = {"mode": "decode", "past": past, "sequence": 1, "context": max(self.model.context, past + 1)}
        return self.updated(**sizes | changes)

    @property
    def parts_of_layer(self) -> int:
        """qkv, attention, out, gate_up, down; in parallel qkv_gate_up, attention, out_down."""
        return 3 if self.model.parallel_block else 5

    @property
    def repeated(self) -> int:
        """The norms' weights where the stream is whole."""
        norms = (1 if self.model.parallel_block else 2) * self.model.layers + 1
        return norms * self.model.dim if self.stream == self.model.dim else 0

    @property
    def memory(self) -> Memory:
        """In inference, activations are the cache, with the rows of a tied head where an exchange made them."""
        if self.mode == "train":
            memory, model = super().memory, self.model
            # The first two sublayers of a ladder read the same stream, which is kept once unless norms copy it.
            shared = model.ladder and model.layers > model.parallel_block
            shared = shared and (self.sharded or self.word_bytes == self.precise_bytes)
            return replace(memory, activations=memory.activations - shared * self.word_bytes * self.rows * self.stream)
        positions, stage = self.batch * (self.past + self.sequence), self.stage
        layers, ranks = (self.model.layers, self.ranks) if stage is None else (len(stage.own), stage.ranks)
        cached = 2 * layers * positions * self.model.kv_heads // ranks * self.model.head_dim
        cached += self.exchanged_rows if stage is None or stage.is_last else 0
        return Memory(self.word_bytes * self.parameters, 0, 0, self.word_bytes * cached)

    @property
    def rows(self) -> int:
        """T."""
        return self.batch * self.sequence

    @property
    def stream(self) -> int:
        """Features of the residual stream on a rank."""
        return self.model.dim // self.ranks if self.sharded or self.grid > 1 else self.model.dim

    @property
    def sharded(self) -> bool:
        """Whether the residual stream is sharded by features."""
        return get_strategy(self.strategy).shards_features

    @property
    def precise_bytes(self) -> int:
        """Bytes of a float32; of a float64 where all are."""
        return max(4, self.word_bytes)

    @property
    def exchanged_rows(self) -> int:
        """Words of a tied head's rows where the embedding is sharded by features instead; else 0."""
        exchanged = self.model.tie_embeddings and self.sharded and self.ranks > 1
        return self.model.vocab // self.ranks * self.model.dim if exchanged else 0

    def _parts(self) -> Iterator[LayerCost]:
        if self.interleave > 1 and self.mode == "train":
            part = replace(self, batch=self.batch // self.interleave, interleave=1)
            yield from (terms.interleaved(cost, self.interleave) for cost in part.costs[:-1])
            yield _head(part, self.interleave)
            return
        yield _embedding(self)
        made: dict[tuple[int | None, ...], tuple[LayerCost, ...]] = {}
        for index, ghosts in enumerate(self.model.ghosts_of_layers):
            made[ghosts] = parts = made.get(ghosts) or _layer(self, *ghosts)
            yield from (replace(part, name=f"layers.{index}.{part.name}") for part in parts)
        yield _head(self)

    @property
    def timed_parts(self) -> tuple[LayerCost, ...]:
        """In a ladder, an output projection and the input projection after it overlap with the other's exchanges."""
        parts = list(self.costs)
        for index, (back, into) in enumerate(pairwise(self.costs)):
            if self.model.ladder and self.inside == 1 and index and into.name.endswith(("qkv", "gate_up")):
                parts[index : index + 2] = terms.behind(into.exchanges, back), terms.behind(back.exchanges, into)
        return tuple(parts)

    def with_sums(self, exchange: Exchange, rows: int) -> Exchange:
        """An exchange that also carries one of the norm's sums for each row. A sum is one of words."""
        each = self.word_bytes if exchange.op in ("reduce_scatter", "all_reduce") else self.precise_bytes
        return replace(exchange, extra_bytes=exchange.extra_bytes + rows * each)

    def norm_bytes(self, rows: int) -> int:
        """The norm of a stream without blocks keeps its input and that over its root mean square."""
        return 2 * rows * self.stream * self.precise_bytes


@lru_cache(maxsize=256)  # many layouts have the same micro-batches
def _whole_costs(shape: GPTShape) -> tuple[LayerCost, ...]:
    return tuple(shape._parts() if shape.mode == "train" else map(_only_forward, shape._parts()))


def _only_forward(cost: LayerCost) -> LayerCost:
    """A part in inference: nothing is kept and there is no backward."""
    products = tuple(p for p in cost.products if p.phase == "forward")
    exchanges = tuple(e for e in cost.exchanges if e.phase == "forward")
    return replace(cost, products=products, exchanges=exchanges, kept=0, kept_bytes=0, streamed=(cost.streamed[0], 0))


def _embedding(shape: GPTShape) -> LayerCost:
    """No product: rows of the weight are looked up. Cut by rows, each rank has those of some tokens only, and torch
    gives the gradient of all rows to each, unless a tied head adds its own.
    """
    model, ranks, words = shape.model, shape.ranks, shape.rows * shape.stream
    weight, full = model.vocab * model.dim // ranks, shape.wire == "full"
    by_rows = shape.strategy == "megatron" and shape.grid == 1
    exchanges = terms.summed_on_wire("x", "forward", ranks, shape.rows, model.dim, shape.wire) if by_rows else []
    masks = by_rows and ranks > 1 and not full
    whole = by_rows and ranks > 1 and full and not model.tie_embeddings
    return LayerCost(
        name="embedding",
        parameters=(weight,),
        products=(),
        exchanges=terms.between_ranks(exchanges),
        kept=0,
        kept_bytes=shape.rows * (INDEX_BYTES + masks),
        streamed=(2 * words, 2 * words),
        leading=(model.vocab,),
        whole_gradients=(weight * ranks,) if whole else (),
    )


def _layer(
    shape: GPTShape, to_qkv: int | None, to_out: int | None, to_gate_up: int | None, to_down: int | None
) -> tuple[LayerCost, ...]:
    """The parts of a layer whose linear layers have these numbers of ghosts."""
    model, attention = shape.model, _attention(shape)
    parts: tuple[LayerCost, ...]
    if model.parallel_block:
        parts = _into(shape, "qkv_gate_up", model.qkv_features + 2 * model.hidden, to_qkv), attention
        last = _back(shape, "out_down", model.dim + model.hidden, to_out)
    else:
        qkv = _into(shape, "attention.qkv", model.qkv_features, to_qkv, bias=model.qkv_bias)
        out = _back(shape, "attention.out", model.dim, to_out)
        parts = qkv, attention, out, _into(shape, "mlp.gate_up", 2 * model.hidden, to_gate_up)
        last = _back(shape, "mlp.down", model.hidden, to_down)
    words = shape.rows * model.hidden // shape.ranks  # of silu(gate) up before the last projection
    raw = 0 if shape.strategy == "phantom" else 2 * words  # gate and up, which phantom keeps anyway
    parts = *parts, replace(last, kept=last.kept + words + raw, streamed=(5 * words, 8 * words))
    if shape.channels < 1:  # CAAT-Net (arXiv 2506.19645): so many of a layer's features are summed. Modelled only
        channels = round(shape.channels * model.dim)
        sums = [tuple(replace(e, words=e.words * channels // model.dim) for e in part.exchanges) for part in parts]
        parts = tuple(replace(part, exchanges=summed) for part, summed in zip(parts, sums, strict=True))
    if not shape.activation_checkpointing or shape.mode != "train":
        return parts
    # What a layer ends with need not be computed again where backward asks for its input only, as a plain product's
    # does; a phantom layer's asks for the gathered ghosts as well, and a low-rank layer's for what is exchanged.
    ends = len(parts) if shape.sharded else len(parts) - 1
    again = [terms.recomputed(part) if index < ends else part for index, part in enumerate(parts)]
    kept = shape.rows * shape.stream  # what enters the layer
    return tuple(replace(part, kept=0 if index else kept, kept_bytes=0) for index, part in enumerate(again))


def _into(shape: GPTShape, name: str, out_features: int, ghosts: int | None, *, bias: bool = False) -> LayerCost:
    """A norm and the linear layer after it: from the stream to features that are sharded by heads or pieces."""
    rows, stream = shape.rows, shape.stream
    statistics = rows * shape.precise_bytes  # r of each row
    streamed = (5 * rows * stream, 6 * rows * stream)  # the norm, and the sum into the stream
    given: dict[str, Any] = {"bias": bias, "wire": shape.wire, "name": name}
    if shape.strategy != "phantom":
        layout = RowLayout(shape.model.dim, out_features, shape.ranks)
        if shape.model.low_rank is not None:
            low = terms.low_rank_layer(layout, shape.model.low_rank, rows, **given)
            first, rest = low.exchanges[:1], low.exchanges[1:]  # g, or the sum of it
            exchanges = (*(shape.with_sums(e, rows) for e in first), *rest)
            parameters = (stream, *low.parameters)
            return replace(low, parameters=parameters, exchanges=exchanges, kept_bytes=statistics, streamed=streamed)
        if shape.grid > 1:
            whole = terms.grid_layer(layout, rows, shape.grid, **given)
        else:
            whole = terms.column_layer(layout, rows, **given)
        statistics += shape.norm_bytes(rows)
        parameters, leading = (stream, *whole.parameters), (stream, *whole.leading)
        return replace(whole, parameters=parameters, leading=leading, kept_bytes=statistics, streamed=streamed)
    blocks = _blocks(shape, shape.model.dim, out_features, ghosts)
    plain = terms.phantom_layer(blocks, rows, rank=shape.rank, **given)
    if shape.ranks > 1 and shape.inside == 1 and shape.wire == "full":
        statistics += rows * shape.ranks * shape.precise_bytes  # squares, in the message that the ghosts are kept in
    carried = ("x", "g", "h", "dx")
    return replace(
        plain,
        parameters=(stream, *plain.parameters),
        exchanges=tuple(shape.with_sums(e, rows) if e.term in carried else e for e in plain.exchanges),
        kept=plain.kept + rows * out_features // shape.ranks,
        kept_bytes=statistics,
        streamed=streamed,
    )


def _back(shape: GPTShape, name: str, in_features: int, ghosts: int | None) -> LayerCost:
    """The output projection from such features to the stream."""
    given: dict[str, Any] = {"bias": False, "wire": shape.wire, "name": name}
    if shape.strategy == "phantom":
        blocks = _blocks(shape, in_features, shape.model.dim, ghosts)
        return terms.phantom_layer(blocks, shape.rows, rank=shape.rank, **given)
    layout = RowLayout(in_features, shape.model.dim, shape.ranks)
    if shape.model.low_rank is not None:
        return terms.low_rank_layer(layout, shape.model.low_rank, shape.rows, **given)
    if shape.grid > 1:
        return terms.grid_layer(layout, shape.rows, shape.grid, transposed=True, **given)
    return terms.row_layer(layout, shape.rows, **given)


def _blocks(shape: GPTShape, in_features: int, out_features: int, ghosts: int | None) -> BlockLayout:
    assert shape.blocks is not None and ghosts is not None  # noqa: PT018
    return BlockLayout(in_features, out_features, shape.blocks, ghosts, shape.ranks)


def _attention(shape: GPTShape) -> LayerCost:
    """Scores of each head of this rank, and the sums of values they weigh; the turning of queries and keys."""
    among, rows, batch = shape.ranks // shape.grid, shape.rows // shape.grid, shape.batch // shape.grid
    heads, kv_heads, head_dim = shape.model.heads // among, shape.model.kv_heads // among, shape.model.head_dim
    each, t, s = batch * heads, shape.sequence, shape.past + shape.sequence
    products = (
        Product("Q K^T", "forward", each, t, head_dim, s),
        Product("A V", "forward", each, t, s, head_dim),
        Product("Q K^T again", "backward", each, t, head_dim, s),
        Product("dA = d V^T", "backward", each, t, head_dim, s),
        Product("dV = A^T d", "backward", each, s, t, head_dim),
        Product("dQ = dS K", "backward", each, t, s, head_dim),
        Product("dK = dS^T Q", "backward", each, s, t, head_dim),
    )
    q, kv = rows * heads * head_dim, rows * kv_heads * head_dim
    cached = batch * s * kv_heads * head_dim
    copied = q if heads > kv_heads > 1 else 0  # queries, out of what was turned with the keys
    copied += q if shape.model.parallel_block else 0  # the result, which is copied beside the hidden features
    # Values lie in what qkv gave, which phantom keeps anyway, unless a bias was added to it.
    raw = 0 if shape.strategy == "phantom" and not shape.model.qkv_bias else q + 2 * kv
    turning = 7 * (q + kv)
    return LayerCost(
        name="attention",
        parameters=(),
        products=products,
        exchanges=(),
        kept=q + kv + copied + raw,  # the result is the next layer's input
        kept_bytes=rows * heads * shape.precise_bytes,
        streamed=(2 * q + 2 * cached + turning, 4 * q + 4 * cached + turning),
        fused=True,
    )


def _head(shape: GPTShape, parts: int = 1) -> LayerCost:
    """The norm, the projection to logits, and the loss or the last position's logits, of one of so many interleaved
    parts times their number. The parts share the head's weight.
    """
    model, ranks, dim, train = shape.model, shape.ranks, shape.model.dim, shape.mode == "train"
    sharded, precise, here = shape.sharded, shape.precise_bytes, model.vocab // ranks
    by_rows = False
    if sharded and train and shape.inside == 1:
        words = {"word_bytes": shape.word_bytes, "weight_bytes": shape.word_bytes, "parts": parts}
        by_rows = head_splits_rows(parts * shape.rows, dim, model.vocab, ranks, wire=shape.wire, **words)
    if by_rows:
        rows, tokens, shared = shape.rows // ranks, model.vocab, model.vocab * dim
        # log-probabilities and r of each row, all targets, the sum of their weights, and how many count
        kept_bytes = rows * (tokens + 1) * precise + (shape.rows + 1) * INDEX_BYTES + precise
    else:
        rows, tokens, shared = shape.rows if train else shape.batch, here, shape.exchanged_rows
        # Weights of the logits, the norm's r and the target of each row; on ranks also what scales the weights and
        # whether the target is here, and otherwise one number of the loss.
        kept_bytes = shape.rows * ((here + 1) * precise + INDEX_BYTES) + (0 if sharded else shape.norm_bytes(rows))
        kept_bytes += shape.rows * (precise + 1) if ranks > 1 else precise
    parameters = (shape.stream,) if model.tie_embeddings else (shape.stream, here * dim)
    cost = LayerCost(
        name="head",
        parameters=parameters,
        products=(
            Product("W y", "forward", 1, rows, dim, tokens),
            Product("dW = d^T y", "backward", 1, tokens, rows, dim),
            Product("W^T d", "backward", 1, rows, tokens, dim),
        ),
        exchanges=terms.between_ranks(_head_exchanges(shape, rows, by_rows)),
        kept=rows * dim + (shape.rows * shape.stream if sharded else 0),
        kept_bytes=kept_bytes,
        streamed=(rows * (2 * dim + 3 * tokens), rows * (3 * dim + 3 * tokens)),
        leading=(shape.stream, here)[: len(parameters)],
    )
    cost = cost if parts == 1 else terms.interleaved(cost, parts, once=("W", "dW"))
    return replace(cost, kept=cost.kept + shared)


def _head_exchanges(shape: GPTShape, rows: int, by_rows: bool) -> list[Exchange]:
    ranks, wire, meanwhile = shape.ranks, shape.wire, ("dW = d^T y",)
    here, numbers = shape.model.vocab // ranks, max(1, 4 // shape.word_bytes)  # words of a number of the loss
    words = rows * shape.stream
    out, back = ("all_to_all",) * 2 if by_rows else ("all_gather", "reduce_scatter")
    sent = Exchange("y", "forward", out, ranks, words), Exchange("dy", "backward", back, ranks, words, meanwhile)  # type: ignore[arg-type]
    y, dy = (shape.with_sums(terms.on_wire(e, rows, wire), rows) for e in sent)
    if by_rows:
        weight = here * shape.model.dim
        return [
            Exchange("W", "forward", "all_gather", ranks, weight, background=True),
            y,
            Exchange("loss", "forward", "all_gather", ranks, numbers),
            dy,
            Exchange("dW", "backward", "reduce_scatter", ranks, weight, background=True),
        ]
    exchanges = []
    if shape.exchanged_rows and shape.mode != "decode":
        piece = shape.exchanged_rows // ranks
        exchanges.append(Exchange("W", "forward", "all_to_all", ranks, piece))
        exchanges.append(Exchange("dW", "backward", "all_to_all", ranks, piece))
    if shape.sharded or shape.grid > 1:
        exchanges += [part for e in (y, dy) for part in terms.over_blocks(e, shape.blocks)]
    else:
        exchanges += terms.summed_on_wire("dy", "backward", ranks, rows, shape.model.dim, wire, meanwhile)
    if shape.mode == "train":
        last = Exchange("loss", "forward", "all_gather", ranks, rows * 3 * numbers)
    else:
        last = terms.on_wire(Exchange("logits", "forward", "all_gather", ranks, rows * here), rows, wire)
    return exchanges + terms.over_blocks(last, shape.blocks)


def _fsdp_costs(shape: GPTShape) -> Costs:
    """Each layer is a group of parameters; embedding and head are another one, which is kept until backward."""
    dense = shape.dense(batch=shape.batch // shape.ranks)
    size, last, layers = dense.parts_of_layer, len(dense.costs) - 1, shape.model.layers
    groups = [Group((0, last), True)]
    for layer in range(layers):
        kept = layer == layers - 1 or not shape.reshard_after_forward
        groups.append(Group(tuple(range(1 + layer * size, 1 + (layer + 1) * size)), kept))
    return terms.fully_sharded(dense.costs, groups, shape.ranks, shape.rank)


def _pipeline_costs(shape: GPTShape, stage: Stage) -> Costs:
    """The parts of a stage, and what it sends. In training, the ends sum the gradient of an embedding that they share;
    in inference, the last stage sends the tokens to all.
    """
    micro_batch, tied, trains = shape.micro_batch(), shape.model.tie_embeddings, shape.mode == "train"
    costs, size = micro_batch.costs, micro_batch.parts_of_layer
    exchanges, embedding, head = stage.exchanges(micro_batch.rows * micro_batch.stream, shape.wire), costs[0], costs[-1]
    if not trains:
        token = Exchange("tokens", "forward", "broadcast", stage.stages, 0, stride=stage.ranks)
        exchanges = tuple(e for e in exchanges if e.phase == "forward")
        exchanges += (replace(token, extra_bytes=shape.batch * INDEX_BYTES),)
    elif tied and (stage.is_first or stage.is_last):
        apart = (stage.stages - 1) * stage.ranks
        shared = Exchange("embedding's gradient", "sync", "all_reduce", 2, embedding.parameters[0], stride=apart)
        exchanges += (shared,)
    parts = [stage.cost(part) for part in costs[1 + stage.own.start * size : 1 + stage.own.stop * size]]
    if stage.is_first:
        parts.insert(0, stage.cost(embedding))
    elif stage.is_last and tied:
        parts.insert(0, replace(embedding, exchanges=(), kept_bytes=0, streamed=(0, 0)))  # for the head
    if stage.is_last:
        parts.append(stage.cost(head))
    return tuple(parts), exchanges


def build_step(shape: GPTShape, mesh: DeviceMesh | None, *, device: str = "cpu") -> TrainingStep | InferencePass:
    """The model on this rank, and the pass of the shape's mode on random tokens."""
    dtype, where = DTYPES[shape.word_bytes], "cpu" if device == FAKE else device
    settings = {"activation_checkpointing": shape.activation_checkpointing, "interleave": shape.interleave}
    model = build_model(GPT, shape, mesh, device, **settings)
    rows = shape.batch // shape.ranks if shape.strategy == "fsdp" else shape.batch
    tokens = torch.randint(shape.model.vocab, (rows, shape.sequence), device=where)
    if shape.mode != "train":
        return _inference(model, tokens, shape.past)
    targets = tokens.clone()
    recomputed = tuple(model.layers[index] for index in model.stage) if shape.activation_checkpointing else ()
    if shape.stage is None or model.stages is None:
        return TrainingStep(model, lambda: model.loss(tokens, targets), model._rotary(), recomputed)
    schedule: dict[str, Any] = {"micro_batches": shape.stage.micro_batches, "device": torch.device(where)}
    schedule |= {"stream": (shape.sequence, model.stream_features), "dtype": dtype, "wire": shape.wire}
    pipeline = Pipeline(model, model, model.stages, **schedule)
    shared = ends(model.stages) if shape.model.tie_embeddings else None
    return TrainingStep(
        model,
        lambda: pipeline.forward_backward(tokens, targets),
        model._rotary(),
        recomputed,
        pipeline,
        finish=lambda: sum_over_ends(model.embedding.weight, shared) if shared is not None else None,
    )


def _inference(model: GPT, tokens: Tensor, past: int) -> InferencePass:
    """A cache made and filled by a prompt; or one that holds ``past`` positions already, filled by what follows."""
    length = past + tokens.shape[1]
    ready = model.new_cache(tokens.shape[0], length) if past else None

    def forward() -> Iterable[Tensor]:
        cache = ready or model.new_cache(tokens.shape[0], length)
        cache.position = past
        next_token(model, tokens, cache, lambda logits: logits.argmax(-1))
        if cache.head is None or len({to_local(t).untyped_storage()._cdata for t in (cache.head, weight)}) == 1:
            return cache.keys, cache.values
        return cache.keys, cache.values, cache.head

    weight: Any = getattr(model.embedding, "weight", None)  # which stages of a pipeline may not have
    return InferencePass(model, forward)


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
