"""Pretrained transformers in and out: Hugging Face's Llama, Mistral and Qwen2 as models of the family ``gpt``.

Both compute the same function. Only the order of rows differs: queries, keys and values are one linear layer, ordered
by groups of heads, and gate and up are one, in alternating pieces.

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

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phantom_parallel.checkpoint.model import CONFIG, StoredModel, write_model
from phantom_parallel.checkpoint.pretrained import (
    GENERATION_CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER,
    PretrainedModel,
    copy_kept_files,
)
from phantom_parallel.checkpoint.shards import write_tensors
from phantom_parallel.families.gpt.config import MODULES, GPTConfig, RopeScaling
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.text import BPETokenizer
from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.utils.files import atomic_folder, check_replaceable, read_json, write_bytes, write_json

MODEL_TYPES = ("llama", "mistral", "qwen2")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED = "rotary_emb.inv_freq"  # a buffer of old files, which the config determines
# Fields of our configs, and what config.json calls them.
_SIZES = {
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "context": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
_DEFAULTS = {"num_key_value_heads": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
_ROPE = {
    "linear": {"factor": "factor"},
    "llama3": {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
    | {"original_context": "original_max_position_embeddings"},
}


def import_model(
    source: Path, out: Path, *, dtype: str = "fp32", context: int | None = None, overwrite: bool = False
) -> GPTConfig:
    """Write a pretrained model, a folder or a GGUF file, as a dense model of the family, and return its config. One
    tensor at a time is in memory. ``context`` is the maximum number of positions, by default the pretrained model's.

    Raises:
        ValueError: If the model is not supported, or a file of it is damaged; before anything is written.
    """
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
        outline = {name: tensor.to(DTYPES[dtype]) for name, tensor in GPT(config).state_dict().items()}
    weights = {weight.name: weight for weight in _weights(config)}

    def load(name: str) -> Tensor:
        weight = weights[name]
        parts = [pretrained.load(part).unflatten(0, (weight.groups, -1)) for part in weight.tensors]
        tensor = torch.cat(parts, 1).flatten(0, 1).to(DTYPES[dtype])
        if not tensor.isfinite().all():
            raise ValueError(f"{source}: {name} has values that are not finite")
        return tensor

    def complete(folder: Path) -> None:
        for name, data in pretrained.files.items():
            write_bytes(folder / name, data)

    write_model(config, outline, load, out, overwrite=overwrite, complete=complete)
    return config


def export_model(model: Path, out: Path, *, dtype: str | None = None, overwrite: bool = False) -> str:
    """Write a model of the family as a folder that ``AutoModelForCausalLM.from_pretrained`` loads, and return the name
    of its architecture. Phantom layers become the dense layers that they equal. One layer at a time is in memory.
    """
    check_replaceable(out, overwrite, CONFIG, model)
    stored = StoredModel(model)
    if stored.config.parallel_block or stored.config.ladder:
        raise ValueError(f"{model} has parallel blocks or a ladder, which Hugging Face's architectures do not have")
    written = stored.dtype if dtype is None else DTYPES[dtype]
    sources = {name: weight for weight in _weights(stored.config) for name in weight.tensors}
    outline = {n: torch.empty(weight.tensors[n], dtype=written, device="meta") for n, weight in sources.items()}

    def load(name: str) -> Tensor:
        weight = sources[name]
        sizes = [shape[0] // weight.groups for shape in weight.tensors.values()]
        pieces = _dense(weight, stored).unflatten(0, (weight.groups, -1)).split(sizes, 1)
        return pieces[list(weight.tensors).index(name)].flatten(0, 1).to(written).contiguous()

    with atomic_folder(out) as scratch:
        write_tensors(scratch, outline, load)
        copy_kept_files(model, scratch)
        generation = read_json(scratch / GENERATION_CONFIG) if (scratch / GENERATION_CONFIG).is_file() else {}
        special_tokens = {name: generation.get(name) for name in SPECIAL_TOKENS}  # null rather than Llama's defaults
        settings = _settings_of(stored.config, str(written).removeprefix("torch.")) | special_tokens
        write_json(scratch / CONFIG, settings)
    return str(settings["architectures"][0])


def config_of(settings: dict[str, Any], source: Path) -> GPTConfig:
    """The config of a pretrained model, from its settings; ValueError if it has something that the family has not."""
    try:
        return _config_of(_DEFAULTS | {name: value for name, value in settings.items() if value is not None})
    except KeyError as error:
        raise ValueError(f"{source}: config.json has no {error.args[0]}") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{source}: config.json has something that is not supported: {error}") from None


def _config_of(settings: dict[str, Any]) -> GPTConfig:
    kind = settings.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type {kind!r}, only {', '.join(MODEL_TYPES)} are")
    if "quantization_config" in settings:
        raise ValueError("quantization_config: only models in floating point, or GGUF files, are")
    for name, supported in (("hidden_act", "silu"), ("mlp_bias", False), ("partial_rotary_factor", 1.0)):
        if settings.get(name, supported) != supported:
            raise ValueError(f"{name} = {settings[name]!r}, only {supported!r} is")
    if kind != "qwen2" and settings.get("attention_bias"):
        raise ValueError("attention_bias = true, only with model_type qwen2, which has no bias after attention")
    sizes = {own: settings[name] for own, name in _SIZES.items()}
    dim, heads = sizes["dim"], sizes["heads"]
    if (head_dim := settings.get("head_dim")) is not None and head_dim * heads != dim:
        raise ValueError(f"head_dim = {head_dim!r}, only hidden_size / num_attention_heads = {dim / heads:g} is")
    # At most as many positions as a sliding window has: within the window, attention is the full one.
    if "sliding_window" in settings and (kind != "qwen2" or settings.get("use_sliding_window", False)):
        sizes["context"] = min(sizes["context"], settings["sliding_window"])
    base, scaling = _rope_of(settings)
    return GPTConfig(**sizes, strategy="dense", rope_base=base, qkv_bias=kind == "qwen2", rope_scaling=scaling)


def _rope_of(settings: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary position embedding, in the form of any release of ``transformers``."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    base = float(rope.get("rope_theta") or settings.get("rope_theta") or 10000.0)
    kind: Any = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return base, None
    if kind not in _ROPE:
        raise ValueError(f"rope scaling of the type {kind!r}, only default, {' and '.join(_ROPE)} are")
    return base, RopeScaling(**{own: rope[name] for own, name in _ROPE[kind].items()}, kind=kind)


def _settings_of(config: GPTConfig, dtype: str) -> dict[str, Any]:
    """``config.json`` of a model that is exported."""
    kind, name = ("qwen2", "Qwen2ForCausalLM") if config.qkv_bias else ("llama", "LlamaForCausalLM")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if (scaling := config.rope_scaling) is not None:
        rope |= {"rope_type": scaling.kind}
        rope |= {other: getattr(scaling, own) for own, other in _ROPE[scaling.kind].items()}
    return {
        "architectures": [name],
        "model_type": kind,
        **{other: getattr(config, own) for own, other in _SIZES.items()},
        "hidden_act": "silu",
        "rope_parameters": rope,
        "rope_theta": config.rope_base,
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
        "dtype": dtype,
    }


class _Weight(NamedTuple):
    """A parameter of the dense model, and the pretrained model's tensors whose rows alternate in it, by shape."""

    name: str
    tensors: dict[str, tuple[int, ...]]
    groups: int = 1


def _weights(config: GPTConfig) -> Iterator[_Weight]:
    n, hidden, kv = config.dim, config.hidden, config.kv_heads * config.head_dim
    yield _Weight("embedding.weight", {_EMBEDDING: (config.vocab, n)})
    for index in range(config.layers):
        own, other = f"layers.{index}.", f"model.layers.{index}."
        rows = {f"{other}self_attn.{letter}_proj": size for letter, size in (("q", n), ("k", kv), ("v", kv))}
        qkv = f"{own}attention.qkv.linear"
        gate_up: dict[str, tuple[int, ...]] = {f"{other}mlp.{name}_proj.weight": (hidden, n) for name in ("gate", "up")}
        yield _Weight(f"{own}attention.qkv.norm", {f"{other}input_layernorm.weight": (n,)})
        yield _Weight(f"{qkv}.weight", {f"{name}.weight": (size, n) for name, size in rows.items()}, config.kv_heads)
        if config.qkv_bias:
            yield _Weight(f"{qkv}.bias", {f"{name}.bias": (size,) for name, size in rows.items()}, config.kv_heads)
        yield _Weight(f"{own}attention.out.weight", {f"{other}self_attn.o_proj.weight": (n, n)})
        yield _Weight(f"{own}mlp.gate_up.norm", {f"{other}post_attention_layernorm.weight": (n,)})
        yield _Weight(f"{own}mlp.gate_up.linear.weight", gate_up, config.hidden_groups)
        yield _Weight(f"{own}mlp.down.weight", {f"{other}mlp.down_proj.weight": (n, hidden)})
    yield _Weight("head.norm", {"model.norm.weight": (n,)})
    if not config.tie_embeddings:
        yield _Weight("head.linear.weight", {_HEAD: (config.vocab, n)})


def _dense(weight: _Weight, stored: StoredModel) -> Tensor:
    """A parameter of the dense model, or the one that phantom layers equal."""
    config: GPTConfig = stored.config
    module, _, kind = weight.name.rpartition(".")
    if config.strategy != "phantom" or not module.startswith("layers.") or kind != "weight":
        name = weight.name if config.strategy != "phantom" else weight.name.replace("head.linear", "head")
        return stored.tensors.load(name)
    _, index, rest = module.split(".", 2)
    ghosts = config.ghosts_of_layers[int(index)][MODULES.index(rest)]
    in_features, out_features = next(iter(weight.tensors.values()))[1], sum(s[0] for s in weight.tensors.values())
    layer = PhantomLinear(in_features, out_features, False, blocks=config.blocks, ghosts=ghosts, device="meta")  # type: ignore[arg-type]
    names = ("local", "compress", "decompress")
    layer.load_state_dict({name: stored.tensors.load(f"{module}.{name}").double() for name in names}, assign=True)
    return layer.to_dense().weight.detach()


def _check_tensors(pretrained: PretrainedModel, config: GPTConfig) -> None:
    expected = {name: shape for weight in _weights(config) for name, shape in weight.tensors.items()}
    for name, shape in expected.items():
        if name not in pretrained.shapes:
            raise ValueError(f"{pretrained.path} has no tensor {name}")
        if pretrained.shapes[name] != shape:
            given = list(pretrained.shapes[name])
            raise ValueError(f"{pretrained.path}: {name} has shape {given}, the config gives {list(shape)}")
    extra = [name for name in pretrained.shapes if name not in expected and not name.endswith(_IGNORED)]
    if config.tie_embeddings and _HEAD in extra:  # a copy of the embedding, in files of earlier releases
        extra.remove(_HEAD)
        if not torch.equal(pretrained.load(_HEAD), pretrained.load(_EMBEDDING)):
            tied = f"{_HEAD} differs from {_EMBEDDING}, which tie_word_embeddings = true makes one"
            raise ValueError(f"{pretrained.path}: {tied}: set it to false, or remove {_HEAD}")
    if extra:
        raise ValueError(f"{pretrained.path} has tensors that are not supported: {', '.join(extra[:3])}")
