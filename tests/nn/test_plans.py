"""Plans for Llama and Qwen as in docs/pytorch.md, on modules of the same names; and the sharded stream."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from phantom_parallel import Ledger, PhantomLinear, PhantomParallel
from phantom_parallel.nn import FeatureEmbedding, NormedPhantomLinear, VocabularyHead
from phantom_parallel.ops import vocabulary_cross_entropy
from tests.nn.stand_ins import Llama, tokens
from tests.reference import relative_error

BLOCKS = 4


def whole_model_plan(prefix: str, ghosts: int) -> dict[str, ParallelStyle]:
    """All parameters become DTensors, and the stream is sharded by positions."""
    into = PhantomParallel(blocks=BLOCKS, ghosts=ghosts, input_layouts=Shard(1))
    back = PhantomParallel(blocks=BLOCKS, ghosts=ghosts, output_layouts=Shard(1))
    norm = SequenceParallel(use_local_output=True)
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        f"{prefix}.*_layernorm": norm,
        f"{prefix}.self_attn.[qkv]_proj": into,
        f"{prefix}.self_attn.[qk]_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        f"{prefix}.self_attn.o_proj": back,
        f"{prefix}.mlp.gate_proj": into,
        f"{prefix}.mlp.up_proj": into,
        f"{prefix}.mlp.down_proj": back,
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def cut_once_plan(prefix: str, ghosts: int) -> dict[str, ParallelStyle]:
    """The stream is cut before a module, and not before each of its projections."""
    inside, to = PhantomParallel(blocks=BLOCKS, ghosts=ghosts), Shard(2)
    named = {"hidden_states": Replicate()}, {"hidden_states": to}
    return llama_plan(prefix, ghosts) | {
        f"{prefix}.self_attn": PrepareModuleInput(
            input_kwarg_layouts=named[0], desired_input_kwarg_layouts=named[1], use_local_output=True
        ),
        f"{prefix}.self_attn.[qkv]_proj": inside,
        f"{prefix}.mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=to, use_local_output=True),
        f"{prefix}.mlp.gate_proj": inside,
        f"{prefix}.mlp.up_proj": inside,
    }


def llama_plan(prefix: str, ghosts: int) -> dict[str, ParallelStyle]:
    entering = PhantomParallel(blocks=BLOCKS, ghosts=ghosts, input_layouts=Replicate())
    leaving = PhantomParallel(blocks=BLOCKS, ghosts=ghosts, output_layouts=Replicate())
    return {
        f"{prefix}.self_attn.[qkv]_proj": entering,
        f"{prefix}.self_attn.o_proj": leaving,
        f"{prefix}.mlp.gate_proj": entering,
        f"{prefix}.mlp.up_proj": entering,
        f"{prefix}.mlp.down_proj": leaving,
    }


PLANS = {"whole model": whole_model_plan, "llama": llama_plan, "llama, cut once": cut_once_plan}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Llama(head_norms=name == "whole model").double()


def parallelized(name: str, ghosts: int) -> nn.Module:
    """The stand-in over all ranks. With as many ghosts as a block has features, the fit loses nothing."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(build(name), mesh, PLANS[name]("model.layers.*", ghosts))


def errors_of_plan(name: str) -> dict[str, float]:
    """Output and gradients against the model before the plan: of L and the bias, and of all replicated parameters."""
    model = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # such layers are larger than dense ones
        mine = parallelized(name, ghosts=8)
    expected, actual = model(tokens()), mine(tokens())
    expected.square().sum().backward()
    actual.square().sum().backward()
    if name == "whole model":  # clipping refuses a mix of tensors and DTensors
        assert isinstance(nn.utils.clip_grad_norm_(mine.parameters(), float("inf")), DTensor)
    errors = {"output": relative_error(actual, expected)}
    for (path, before), (_, after) in zip(model.named_modules(), mine.named_modules(), strict=True):
        for parameter, value in before.named_parameters(recurse=False):
            if not isinstance(after, PhantomLinear):
                grad = getattr(after, parameter).grad
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
                errors[f"{path}.{parameter}"] = relative_error(grad, value.grad)
            elif parameter == "bias" and float(value.grad.norm()) > 1e-9:  # of keys it is zero
                errors[f"{path}.bias"] = relative_error(after.bias.grad.full_tensor(), value.grad)
            elif parameter == "weight":
                grad = value.grad.view(BLOCKS, value.shape[0] // BLOCKS, BLOCKS, value.shape[1] // BLOCKS)
                diagonal = torch.cat([grad[i, :, i] for i in range(BLOCKS)])
                errors[f"{path}.local"] = relative_error(after.local.grad.full_tensor(), diagonal)
    assert sum(isinstance(module, PhantomLinear) for module in mine.modules()) == 14
    return errors


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_gives_the_outputs_and_gradients_of_the_model(ranks, name):
    for errors in ranks(2)(errors_of_plan, name):
        wrong = {path: error for path, error in errors.items() if not error < 1e-9}
        assert not wrong


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int, **kwargs) -> None:
        super().__init__()
        self.up, self.down = NormedPhantomLinear(dim, hidden, **kwargs), PhantomLinear(hidden, dim, False, **kwargs)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


class ShardedStream(nn.Module):
    """A language model of the three layers that keep the residual stream sharded."""

    def __init__(self, mesh, tie_embeddings: bool) -> None:
        super().__init__()
        kwargs = {"mesh": mesh, "dtype": torch.float64}
        self.embedding = FeatureEmbedding(24, 32, blocks=BLOCKS, **kwargs)
        self.blocks = nn.ModuleList(Block(32, 48, blocks=BLOCKS, ghosts=2, **kwargs) for _ in range(2))
        self.head = VocabularyHead(24, 32, tie_embeddings=tie_embeddings, **kwargs)
        self.tie_embeddings = tie_embeddings

    def forward(self, inputs, targets):
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x, self.head.tied_rows(self.embedding.weight)) if self.tie_embeddings else self.head(x)
        return vocabulary_cross_entropy(logits, targets, group=self.head.group)


def dense_loss(model: ShardedStream, inputs, targets) -> torch.Tensor:
    """The same from torch's own functions, on all features."""
    x = F.embedding(inputs, model.embedding.weight)
    for block in model.blocks:
        up, down = block.up.linear.to_dense(), block.down.to_dense()
        x = x + down(F.silu(up(F.rms_norm(x, (32,), block.up.norm, block.up.eps))))
    rows = model.embedding.weight if model.tie_embeddings else model.head.weight
    logits = F.linear(F.rms_norm(x, (32,), model.head.norm, model.head.eps), rows)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sharded_stream(tie_embeddings: bool) -> tuple[float, dict[str, torch.Tensor], int]:
    size = torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = ShardedStream(init_device_mesh("cpu", (size,)), tie_embeddings)
    with Ledger() as ledger:
        loss = model(tokens(), tokens().roll(1, 1))
        loss.backward()
    full = {name: p.grad.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return float(loss.detach()), full, ledger.moved_bytes


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_a_sharded_stream_has_the_loss_and_gradients_of_one_process(ranks, tie_embeddings):
    torch.manual_seed(0)
    model = ShardedStream(None, tie_embeddings)
    loss = model(tokens(), tokens().roll(1, 1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(
        float(dense_loss(model, tokens(), tokens().roll(1, 1)).detach()), rel=1e-12
    )
    for actual, grads, _ in ranks(2)(sharded_stream, tie_embeddings):
        assert actual == pytest.approx(float(loss.detach()), rel=1e-12)
        assert grads.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert relative_error(grads[name], parameter.grad) < 1e-11, name


def replicated_stream_bytes(name: str) -> int:
    model = parallelized(name, ghosts=2)
    with Ledger() as ledger:
        model(tokens()).square().sum().backward()
    return ledger.moved_bytes


@pytest.mark.parametrize(("name", "gathers"), [("llama", 7), ("llama, cut once", 4)])
def test_a_plan_with_a_replicated_stream_exchanges_the_stream_and_the_ghosts(ranks, name, gathers):
    """Forward, the two layers that leave gather it; backward, the five that enter, or the two modules that cut it once.
    Megatron's four all-reduces are eight times as much as a gather.
    """
    rows, dim, layers, size, word = 12, 32, 2, 2, 8
    stream = (size - 1) * rows * dim // size * word
    ghosts = 2 * 7 * (size - 1) * rows * (BLOCKS // size) * 2 * word  # each way
    assert set(ranks(2)(replicated_stream_bytes, name)) == {layers * (gathers * stream + ghosts)}
