"""Pretrained transformers in and out: Hugging Face's Llama, Mistral and Qwen2 as models of the family ``gpt``.

Both compute the same function. Only the order of rows differs: queries, keys and values are one map, ordered by groups
of heads, and gate and up are one map, in alternating pieces.

    Hugging Face                                 gpt, of the strategy dense
    model.embed_tokens.weight                    embedding.weight
    model.layers.N.input_layernorm.weight        layers.N.attention.qkv.norm
      .self_attn.{q,k,v}_proj                    layers.N.attention.qkv.linear
      .self_attn.o_proj                          layers.N.attention.out
      .post_attention_layernorm                  layers.N.mlp.gate_up.norm
      .mlp.{gate,up}_proj                        layers.N.mlp.gate_up.linear
      .mlp.down_proj                             layers.N.mlp.down
    model.norm.weight                            head.norm
    lm_head.weight                               head.linear.weight
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phantom_parallel.checkpoint.model import CONFIG, StoredModel, write_model
from phantom_parallel.checkpoint.pretrained import (
    GENERATION_CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER,
    PretrainedModel,
    copy_kept_files,
    read_json,
)
from phantom_parallel.checkpoint.shards import TensorLayout, write_tensors
from phantom_parallel.families.gpt.config import GPTConfig, RopeScaling
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.tokens import BPETokenizer
from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.utils.files import atomic_folder, check_replaceable, write_bytes, write_json

MODEL_TYPES = ("llama", "mistral", "qwen2")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED = "rotary_emb.inv_freq"  # a buffer of old files, which the config determines


def import_model(
    source: Path, out: Path, *, dtype: str = "fp32", context: int | None = None, overwrite: bool = False
) -> GPTConfig:
    """Write a pretrained model as a dense model of the family. One tensor at a time is in memory.

    Args:
        source: Folder of the pretrained model, or a GGUF file.
        out: The new folder.
        dtype: Dtype of the tensors that are written.
        context: Maximum number of positions, by default the pretrained model's.
        overwrite: Whether to replace ``out`` if it exists.

    Returns:
        The config of the model.

    Raises:
        ValueError: If the model is not supported, or a file of it is damaged; before anything is written.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    check_replaceable(out, overwrite, CONFIG, source)
    pretrained = PretrainedModel(source)
    config = config_of(pretrained.config, source)
    if context is not None:
        if context > config.context:
            raise ValueError(f"context={context} is longer than the pretrained model's, {config.context}")
        config = replace(config, context=context)
    _check_tensors(pretrained, config)
    if TOKENIZER not in pretrained.files:
        raise ValueError(f"{source} has no {TOKENIZER}, which is the tokenizer's only supported format")
    tokenizer = BPETokenizer.from_bytes(pretrained.files[TOKENIZER], str(source / TOKENIZER))
    if tokenizer.vocab > config.vocab:
        raise ValueError(f"{source}: the tokenizer has {tokenizer.vocab} tokens, the model only {config.vocab}")
    with torch.device("meta"):
        outline = GPT(config).state_dict()
    layouts = [TensorLayout(name, tuple(tensor.shape), DTYPES[dtype]) for name, tensor in outline.items()]

    def load(name: str) -> Tensor:
        tensor = _from_pretrained(name, pretrained.load, config).to(DTYPES[dtype])
        if not tensor.isfinite().all():
            raise ValueError(f"{source}: {name} has values that are not finite")
        return tensor

    def complete(folder: Path) -> None:
        for name, data in pretrained.files.items():
            write_bytes(folder / name, data)

    write_model(config, layouts, load, out, overwrite=overwrite, complete=complete)
    return config


def export_model(model: Path, out: Path, *, dtype: str | None = None, overwrite: bool = False) -> str:
    """Write a model of the family as a folder that ``AutoModelForCausalLM.from_pretrained`` loads. Phantom layers
    become the dense maps that they equal. One map at a time is in memory.

    Args:
        model: Folder of the model.
        out: The new folder.
        dtype: Dtype of the tensors that are written, by default the model's.
        overwrite: Whether to replace ``out`` if it exists.

    Returns:
        Name of the architecture.
    """
    check_replaceable(out, overwrite, CONFIG, model)
    stored = StoredModel(model)
    config: GPTConfig = stored.config
    written = stored.dtype if dtype is None else DTYPES[dtype]
    layouts = [TensorLayout(name, shape, written) for name, shape in _pretrained_shapes(config).items()]
    with atomic_folder(out, overwrite=overwrite) as scratch:
        write_tensors(scratch, layouts, lambda name: _to_pretrained(name, stored.load, config).to(written).contiguous())
        copy_kept_files(model, scratch)
        generation = read_json(scratch / GENERATION_CONFIG) if (scratch / GENERATION_CONFIG).is_file() else {}
        special_tokens = {name: generation.get(name) for name in SPECIAL_TOKENS}  # null rather than Llama's defaults
        settings = _settings_of(config, _NAMES[written]) | special_tokens
        write_json(scratch / CONFIG, settings)
    return str(settings["architectures"][0])


def config_of(settings: dict[str, Any], source: Path) -> GPTConfig:
    """The config of a pretrained model, from its settings.

    Raises:
        ValueError: If it has something that the family has not, by its name.
    """
    try:
        return _config_of(settings)
    except KeyError as error:
        raise ValueError(f"{source}: config.json has no {error.args[0]}") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{source}: config.json has something that is not supported: {error}") from None


def _config_of(settings: dict[str, Any]) -> GPTConfig:
    kind = settings.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type {kind!r}, only {', '.join(MODEL_TYPES)} are")
    if settings.get("quantization_config") is not None:
        raise ValueError("quantization_config: only models in floating point, or GGUF files, are")
    for name, supported in (("hidden_act", "silu"), ("mlp_bias", False), ("partial_rotary_factor", 1.0)):
        if settings.get(name) not in (None, supported):
            raise ValueError(f"{name} = {settings[name]!r}, only {supported!r} is")
    if kind != "qwen2" and settings.get("attention_bias"):
        raise ValueError("attention_bias = true, only with model_type qwen2, which has no bias after attention")
    dim, heads = settings["hidden_size"], settings["num_attention_heads"]
    if (head_dim := settings.get("head_dim")) is not None and head_dim * heads != dim:
        raise ValueError(f"head_dim = {head_dim!r}, only hidden_size / num_attention_heads = {dim / heads:g} is")
    base, scaling = _rope_of(settings)
    return GPTConfig(
        vocab=settings["vocab_size"],
        dim=dim,
        layers=settings["num_hidden_layers"],
        heads=heads,
        kv_heads=settings.get("num_key_value_heads"),  # type: ignore[arg-type]
        hidden=settings["intermediate_size"],
        context=_context_of(settings),
        strategy="dense",
        tie_embeddings=settings.get("tie_word_embeddings") or False,
        rope_base=base,
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        qkv_bias=kind == "qwen2",
        rope_scaling=scaling,
    )


def _rope_of(settings: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary position embedding, in the form of any release of ``transformers``."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    base = float(rope.get("rope_theta") or settings.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RopeScaling("linear", rope["factor"])
    if kind != "llama3":
        raise ValueError(f"rope scaling of the type {kind!r}, only default, linear and llama3 are")
    factor, low, high = (rope[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return base, RopeScaling("llama3", factor, low, high, rope["original_max_position_embeddings"])


def _context_of(settings: dict[str, Any]) -> int:
    """Positions, at most as many as a sliding window has: within the window, attention is the full one."""
    context: int = settings["max_position_embeddings"]
    window = settings.get("sliding_window")
    if settings.get("model_type") == "qwen2" and not settings.get("use_sliding_window", False):
        window = None
    return context if window is None else min(context, window)


def _settings_of(config: GPTConfig, dtype: str) -> dict[str, Any]:
    """``config.json`` of a model that is exported."""
    kind, name = ("qwen2", "Qwen2ForCausalLM") if config.qkv_bias else ("llama", "LlamaForCausalLM")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if (scaling := config.rope_scaling) is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
            rope |= {"original_max_position_embeddings": scaling.original_context}
    return {
        "architectures": [name],
        "model_type": kind,
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "rope_theta": config.rope_base,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
        "dtype": dtype,
    }


def _pretrained_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of the pretrained model that equals a config's."""
    n, hidden, kv = config.dim, config.hidden, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab, n)}
    rows = {"q": n, "k": kv, "v": kv}
    for index in range(config.layers):
        layer = f"model.layers.{index}."
        for name, out in rows.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (out, n)
            if config.qkv_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (out,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (n, n)
        shapes[f"{layer}mlp.gate_proj.weight"] = shapes[f"{layer}mlp.up_proj.weight"] = (hidden, n)
        shapes[f"{layer}mlp.down_proj.weight"] = (n, hidden)
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (n,)
    shapes["model.norm.weight"] = (n,)
    if not config.tie_embeddings:
        shapes[_HEAD] = (config.vocab, n)
    return shapes


def _check_tensors(pretrained: PretrainedModel, config: GPTConfig) -> None:
    expected = _pretrained_shapes(config)
    for name, shape in expected.items():
        if name not in pretrained.shapes:
            raise ValueError(f"{pretrained.path} has no tensor {name}")
        if pretrained.shapes[name] != shape:
            raise ValueError(
                f"{pretrained.path}: {name} has shape {list(pretrained.shapes[name])}, the config gives {list(shape)}"
            )
    extra = [name for name in pretrained.shapes if name not in expected and not name.endswith(_IGNORED)]
    if config.tie_embeddings and _HEAD in extra:  # a copy of the embedding, in files of earlier releases
        extra.remove(_HEAD)
        if not torch.equal(pretrained.load(_HEAD), pretrained.load(_EMBEDDING)):
            raise ValueError(
                f"{pretrained.path}: {_HEAD} differs from {_EMBEDDING}, which tie_word_embeddings = true makes one: "
                f"set it to false to keep both, or remove {_HEAD}"
            )
    if extra:
        raise ValueError(f"{pretrained.path} has tensors that are not supported: {', '.join(extra[:3])}")


_PLAIN = {
    "embedding.weight": _EMBEDDING,
    "head.norm": "model.norm.weight",
    "head.linear.weight": _HEAD,
}
_PLAIN_OF_LAYER = {
    "attention.qkv.norm": "input_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp.gate_up.norm": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def _from_pretrained(name: str, load: Callable[[str], Tensor], config: GPTConfig) -> Tensor:
    """The tensor ``name`` of the dense model, made of those of the pretrained one."""
    if name in _PLAIN:
        return load(_PLAIN[name])
    _, index, rest = name.split(".", 2)
    layer = f"model.layers.{index}."
    if rest in _PLAIN_OF_LAYER:
        return load(layer + _PLAIN_OF_LAYER[rest])
    part = rest.rsplit(".", 1)[1]  # weight or bias
    if rest.startswith("attention.qkv"):
        pieces = [load(f"{layer}self_attn.{letter}_proj.{part}") for letter in "qkv"]
        grouped = [piece.view(config.kv_heads, -1, *piece.shape[1:]) for piece in pieces]
        return torch.cat(grouped, 1).flatten(0, 1)  # q ... q k v of each group
    pieces = [load(f"{layer}mlp.{gate}_proj.{part}") for gate in ("gate", "up")]
    grouped = [piece.view(config.hidden_groups, -1, *piece.shape[1:]) for piece in pieces]
    return torch.cat(grouped, 1).flatten(0, 1)


def _to_pretrained(name: str, load: Callable[[str], Tensor], config: GPTConfig) -> Tensor:
    """The tensor ``name`` of the pretrained model, made of those of a model of any strategy."""
    if name == _HEAD and config.strategy == "phantom":
        return load("head.weight")
    for own, other in _PLAIN.items():
        if name == other:
            return load(own)
    _, _, index, rest = name.split(".", 3)
    layer = f"layers.{index}."
    ghosts = dict(zip(("qkv", "out", "gate_up", "down"), config.ghosts_of_layers[int(index)], strict=True))
    if rest.endswith("layernorm.weight"):
        return load(layer + next(own for own, other in _PLAIN_OF_LAYER.items() if other == rest))
    if rest == "self_attn.o_proj.weight":
        return _dense(f"{layer}attention.out", load, config, (config.dim, config.dim), ghosts["out"])
    if rest == "mlp.down_proj.weight":
        return _dense(f"{layer}mlp.down", load, config, (config.hidden, config.dim), ghosts["down"])
    part = rest.rsplit(".", 1)[1]
    if rest.startswith("self_attn"):
        module, shape, k = f"{layer}attention.qkv.linear", (config.dim, config.qkv_features), ghosts["qkv"]
    else:
        module, shape, k = f"{layer}mlp.gate_up.linear", (config.dim, 2 * config.hidden), ghosts["gate_up"]
    whole = load(f"{module}.bias") if part == "bias" else _dense(module, load, config, shape, k)
    if rest.startswith("self_attn"):
        groups = whole.view(config.kv_heads, config.queries_per_kv + 2, config.head_dim, *whole.shape[1:])
        letter = rest.split(".")[1][0]
        chosen = groups[:, :-2] if letter == "q" else groups[:, -2 if letter == "k" else -1, None]
        return chosen.flatten(0, 2)
    pieces = whole.view(config.hidden_groups, 2, -1, *whole.shape[1:])
    return pieces[:, 0 if "gate" in rest else 1].flatten(0, 1)


def _dense(
    module: str, load: Callable[[str], Tensor], config: GPTConfig, shape: tuple[int, int], ghosts: int | None
) -> Tensor:
    """The weight of a linear map, or the one that a phantom map equals."""
    if ghosts is None or config.blocks is None:
        return load(f"{module}.weight")
    layer = PhantomLinear(*shape, False, blocks=config.blocks, ghosts=ghosts, device="meta")
    names = ("local", "compress", "decompress")
    layer.load_state_dict({name: load(f"{module}.{name}").double() for name in names}, assign=True)
    return layer.to_dense().weight.detach()
