"""Phantom layers in torchtitan's Llama, by our override."""

import zlib
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

needs_torchtitan = pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")


def attention_on_cpu(q, k, v, *, scale, enable_gqa, **_):
    """In place of FlexAttention, which has no backward on CPUs. Sequences are one document each."""
    settings = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **settings), SimpleNamespace(lse=None)


def train_on_rank(size, tokens):
    torch._utils._get_available_device_type = lambda: "cpu"  # which torchtitan reads when it is imported
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.config import OverrideConfig
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm, attention
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    attention.FlexAttention._compiled_flex_attn = staticmethod(attention_on_cpu)
    attention._compiled_create_block_mask = create_block_mask
    rope = ComplexRoPE.Config(dim=8, max_seq_len=64, theta=10000)
    sizes = {"n_layers": 2, "dim": 32, "n_heads": 4, "hidden_dim": 64, "rope": rope, "attn_backend": "flex"}
    inits = llama3._EMBEDDING_INIT, llama3._NORM_INIT, llama3._output_linear_init(32)
    config = llama3.Llama3Model.Config(
        dim=32, vocab_size=64,
        tok_embeddings=Embedding.Config(num_embeddings=64, embedding_dim=32, param_init=inits[0]),
        norm=RMSNorm.Config(normalized_shape=32, param_init=inits[1]),
        lm_head=Linear.Config(in_features=32, out_features=64, param_init=inits[2]),
        layers=llama3._build_llama3_layers(**sizes),
    )  # fmt: skip
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": size, "pp": 1, "ep": 1, "world_size": size}
    dims = ParallelDims(**degrees, spmd_backend="partial_dtensor")
    dims.build_mesh()
    set_llama3_sharding_config(config, enable_sp=True)
    override = OverrideConfig(
        imports=[("phantom_parallel.integrations.torchtitan.phantom", {"blocks": 4, "ghosts": 2})]
    )
    assert len(apply_overrides(override, config)) == 6
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    if size > 1:
        model.parallelize(dims)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for name, parameter in model.named_parameters():  # the same on any number of ranks
            whole = 0.2 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
            )
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(whole)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    masks, losses = model.get_attention_masks(positions), []
    optimizer = torch.optim.SGD(model.parameters(), 0.2, foreach=False)
    for _ in range(3):
        logits = model(tokens, positions, masks)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@needs_torchtitan
@pytest.mark.slow
def test_the_llama_of_torchtitan_trains_with_phantom_layers(ranks):
    tokens = torch.arange(32).view(2, 16) % 7
    [expected] = ranks(1)(train_on_rank, 1, tokens)
    assert expected[-1] < expected[0]
    for losses in ranks(2)(train_on_rank, 2, tokens):
        assert losses == pytest.approx(expected, rel=1e-5)
