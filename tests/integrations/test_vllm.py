"""Converted models in vLLM, in the environment of examples/vllm/requirements.txt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from phantom_parallel import PhantomLinear

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "vllm" / "generate.py"
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_the_tokens_of_vllm_are_those_of_one_process(tmp_path, bias):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, eos_token_id=None,
        attention_bias=bias, mlp_bias=bias,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    phantoms = {}
    for name, linear in list(model.model.named_modules(prefix="model")):
        if isinstance(linear, torch.nn.Linear):
            phantoms[name] = PhantomLinear(linear.in_features, linear.out_features, bias, blocks=4, ghosts=4)
            model.set_submodule(name, phantoms[name])
            for parameter in phantoms[name].parameters():
                torch.nn.init.normal_(parameter, std=0.2)
    assert len(phantoms) == 14
    prompt = torch.tensor([[5, 3, 60, 7, 11]])
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, 5:].tolist()
    assert len(set(expected)) > 4
    # As save_pretrained writes it with phantom_parallel.hf, which needs a newer transformers than vLLM has.
    sizes = "in_features", "out_features", "blocks", "ghosts"
    layers = {name: {key: getattr(layer, key) for key in sizes} | {"bias": bias} for name, layer in phantoms.items()}
    config.quantization_config = {"quant_method": "phantom_parallel.hf", "layers": layers}
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.float32
    config.save_pretrained(tmp_path)
    markers = {f"{name}.weight": torch.zeros(1) for name in phantoms}
    save_file(dict(model.state_dict()) | markers, tmp_path / "model.safetensors", {"format": "pt"})
    for ranks in (1, 2):
        command = [sys.executable, EXAMPLE, tmp_path, str(ranks), *map(str, prompt[0].tolist())]
        run = subprocess.run(command, capture_output=True, text=True, env=os.environ | CPU, check=True)
        [tokens] = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("tokens ")]
        assert [int(token) for token in tokens] == expected
