"""GGUF files: written as llama.cpp's converter writes them, and imported with the function that transformers has."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from phantom_parallel import load_model
from phantom_parallel.cli.main import main
from phantom_parallel.families.gpt.generation import generate
from tests.cli.commands import refused
from tests.families.gpt.pretrained_models import greedy, make_pretrained

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def to_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotated pairs side by side, as llama.cpp has them, instead of in two halves of a head."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path):
    """Write a model to gguf/tiny.gguf of a folder, and return it as transformers has it."""
    reference = make_pretrained(folder / "hf", "llama")
    tokenizer, config = json.loads((folder / "hf" / "tokenizer.json").read_text()), reference.config
    (folder / "gguf").mkdir()
    writer = gguf.GGUFWriter(folder / "gguf" / "tiny.gguf", "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    vocab = tokenizer["model"]["vocab"]
    pieces = [piece for piece, _ in sorted(vocab.items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
    writer.add_token_merges(merges or ["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in reference.state_dict().items():
        weight = tensor.numpy()
        if name in OUTER:
            writer.add_tensor(f"{OUTER[name]}.weight", weight)
            continue
        _, _, layer, rest = name.split(".", 3)
        rest = rest.removesuffix(".weight")
        if rest in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in rest else config.num_key_value_heads
            weight = to_llama_cpp(weight, heads)
        writer.add_tensor(f"blk.{layer}.{NAMES[rest]}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return reference


def test_a_gguf_file_is_imported_with_the_same_function(tmp_path, capsys):
    reference = write_gguf(tmp_path)
    for number, source in enumerate((tmp_path / "gguf" / "tiny.gguf", tmp_path / "gguf")):
        out = tmp_path / f"model{number}"
        assert main(["model", "import", "--from", str(source), "--out", str(out)]) == 0, capsys.readouterr().err
        model = load_model(out)
        tokens = torch.randint(300, (2, 30), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            torch.testing.assert_close(model.logits(tokens), reference(tokens).logits, atol=1e-4, rtol=0)
        assert generate(model, tokens[:1, :5], tokens=12).tokens[0].tolist() == greedy(reference, tokens[:1, :5], 12)
        assert (out / "tokenizer.json").is_file()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_python_files_beside_a_gguf_file_never_run(tmp_path, monkeypatch, capsys, file):
    write_gguf(tmp_path)
    folder = tmp_path / "gguf"
    (folder / "code.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w').close()\n")
    remote = {
        "AutoConfig": "code.Remote",
        "AutoModelForCausalLM": "code.Remote",
        "AutoTokenizer": ["code.Remote", "code.Remote"],
    }
    (folder / file).write_text(json.dumps({"model_type": "unheard-of", "auto_map": remote}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the question of transformers
    main(["model", "import", "--from", str(folder / "tiny.gguf"), "--out", str(tmp_path / "model")])
    assert not (tmp_path / "trace").exists()


def test_a_damaged_gguf_file_is_refused(tmp_path, capsys):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    message = refused(capsys, "model", "import", "--from", tmp_path / "bad.gguf", "--out", tmp_path / "model")
    assert "bad.gguf is not a GGUF file" in message
    assert not (tmp_path / "model").exists()
