"""Megatron-Core's own layers against ours, and phantom layers in its models."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.layers import MegatronCorePair

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron: Apex and Transformer Engine are not installed


def gradients(z, d, *inputs):
    return [z.detach(), *torch.autograd.grad(z, inputs, d)]


def megatron_on_rank(x, d, weights):
    from phantom_parallel.ops.collectives import rank_group
    from phantom_parallel.ops.tensor import column_linear, row_linear

    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    shards = [w.chunk(2, dim)[rank].clone() for w, dim in zip(weights[:3], (0, 0, 1), strict=True)] + [weights[3]]
    pair = MegatronCorePair(16, mesh)
    parameters = pair.column.weight, pair.column.bias, pair.row.weight, pair.row.bias
    for parameter, shard in zip(parameters, shards, strict=True):
        parameter.data.copy_(shard)
    x.requires_grad_()
    theirs = gradients(pair(x), d, x, *parameters)
    leaves, group = [shard.requires_grad_() for shard in shards], rank_group(mesh)
    ours = row_linear(column_linear(x, *leaves[:2], group=group), *leaves[2:], group=group)
    return theirs, gradients(ours, d, x, *leaves)


def test_our_megatron_layers_equal_megatrons(ranks):
    torch.manual_seed(0)
    x, d = torch.randn(5, 3, 16), torch.randn(5, 3, 16)
    weights = [torch.randn(16, 16), torch.randn(16), torch.randn(16, 16), torch.randn(16)]
    for theirs, ours in ranks(2)(megatron_on_rank, x, d, weights):
        for actual, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(actual, expected)


def train_on_rank(size, tokens, weights):
    """Losses of a GPT with phantom layers, and its first weights, gathered from all ranks."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import GlobalMemoryBuffer

    from phantom_parallel.integrations.megatron import MegatronPhantomLinear, phantom_layer_spec

    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    with pytest.MonkeyPatch.context() as patch:  # what it takes from CUDA: random numbers and a buffer
        patch.setattr(tensor_parallel.random.CudaRNGStatesTracker, "fork", lambda self, *_: nullcontext())
        patch.setattr(
            GlobalMemoryBuffer, "get_tensor", lambda self, shape, dtype, name: torch.empty(shape, dtype=dtype)
        )
        try:
            config = TransformerConfig(
                num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True,
                tensor_model_parallel_size=size, hidden_dropout=0.0, attention_dropout=0.0,
                masked_softmax_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
            )  # fmt: skip
            model = GPTModel(config, phantom_layer_spec(blocks=4, ghosts=2), vocab_size=64, max_sequence_length=16)
            assert sum(isinstance(module, MegatronPhantomLinear) for module in model.modules()) == 8
            axes = {
                name: parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
                for name, parameter in model.named_parameters()
            }
            gathered = {}
            for name, parameter in model.named_parameters():
                if weights is not None:
                    axis = axes[name]
                    parameter.data.copy_(weights[name] if axis is None else weights[name].chunk(size, axis)[rank])
                parts = [torch.empty_like(parameter) for _ in range(size)]
                dist.all_gather(parts, parameter.detach())
                gathered[name] = parts[0] if axes[name] is None else torch.cat(parts, axes[name])
            length = tokens.shape[1]
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
            optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
            for _ in range(3):
                loss = model(tokens, torch.arange(length)[None], mask, labels=tokens.roll(-1, 1)).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses, gathered
        finally:
            parallel_state.destroy_model_parallel()


@pytest.mark.slow
def test_a_gpt_of_megatron_trains_with_phantom_layers(ranks):
    tokens = torch.arange(32).view(2, 16) % 7
    (losses, weights), other = ranks(2)(train_on_rank, 2, tokens, None)
    assert other[0] == pytest.approx(losses)
    assert losses[-1] < losses[0]
    [(expected, _)] = ranks(1)(train_on_rank, 1, tokens, weights)
    assert losses == pytest.approx(expected, rel=1e-4)
