"""The family ``gpt``: decoder-only transformers, with their conversion from dense to phantom models."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd, lcm, log
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from phantom_parallel.families.base import Batches, Converter, Family
from phantom_parallel.families.gpt.config import MODULES, GPTConfig, GPTTrainConfig
from phantom_parallel.families.gpt.cost import GPTShape, build_step, step_shapes
from phantom_parallel.families.gpt.generation import converse, measure_inference, run
from phantom_parallel.families.gpt.heal import HealConfig
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.pretrained import config_of, export_model, import_model
from phantom_parallel.families.gpt.task import GPTTask
from phantom_parallel.families.gpt.text import find_tokenizer
from phantom_parallel.infer.evaluate import EvalConfig, Report, evaluate_text, read_texts
from phantom_parallel.nn.sharded import to_local

_HELD_OUT = 16  # sequences, at most
_BATCH_SIZE = 8  # sequences of a batch


class GPTConverter(Converter):
    """Every linear layer has a number of ghosts; embedding and head stay."""

    linear_layers: ClassVar[tuple[str, ...]] = tuple(f"layers.*.{name}" for name in MODULES)
    own_ghosts: ClassVar[bool] = True

    def batches(self, path: Path, config: GPTConfig, data: Path, rows: int, length: int) -> Batches:
        length = min(length, config.context)
        tokens = read_tokens(path, data, config)
        windows = len(tokens) // length
        held_out = min(_HELD_OUT, windows // 5)
        used = min(-(-rows // length), windows - held_out)
        if held_out < 1 or used * length < config.hidden:
            needed = f"a covariance of {config.hidden} features and a fifth held out"
            raise ValueError(f"{data} has {len(tokens)} tokens, too few for {needed}: give more text")
        order = list(range(windows))
        random.Random(0).shuffle(order)
        cut = tokens[: windows * length].view(windows, length)
        return [list(cut[part].split(_BATCH_SIZE)) for part in (order[held_out : held_out + used], order[:held_out])]  # type: ignore[return-value]

    @torch.no_grad()
    def loss(self, model: nn.Module, dense: nn.Module, batch: Tensor) -> float:
        """Nats a token."""
        return float(_mean_loss(model, batch))

    def objective(self) -> Callable[[nn.Module, Tensor], Tensor]:
        return _mean_loss

    @torch.no_grad()
    def phantom(self, model: nn.Module, blocks: int, ghosts: Mapping[str, int]) -> GPT:
        dense = cast(GPT, model)
        rows = [[ghosts[f"layers.{index}.{name}"] for name in MODULES] for index in range(dense.config.layers)]
        default = min(max(map(max, rows)), min(dense.config.dim, dense.config.hidden) // blocks)
        each: Any = tuple(map(tuple, rows))
        config = replace(dense.config, strategy="phantom", blocks=blocks, ghosts=default, layer_ghosts=each)
        made = GPT(config, device="meta", dtype=dense.embedding.weight.dtype)
        tensors = {name.replace("head.linear.", "head."): t.detach() for name, t in dense.state_dict().items()}
        made.load_state_dict(tensors, assign=True)
        return made


def _mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return cast(GPT, model).loss(batch[:, :-1], batch[:, 1:])


def read_tokens(model: Path, data: Path | None, config: GPTConfig) -> Tensor:
    """The tokens of a text file, or of the files of a folder in the order of their names, by the model's tokenizer."""
    tokens = torch.from_numpy(find_tokenizer(model).encode(read_texts(data)).astype("int64"))
    if len(tokens) and int(tokens.max()) >= config.vocab:
        raise ValueError(f"{data} has a token {int(tokens.max())}, but the model's vocabulary is {config.vocab}")
    return tokens


def evaluate(model: GPT, folder: Path, config: EvalConfig, report: Report) -> dict[str, float]:
    """Perplexity and nats a token on a text."""
    text, device = read_texts(config.data), to_local(next(model.parameters())).device
    tokens = read_tokens(folder, config.data, model.config).to(device)
    return evaluate_text(model.logits, tokens, text, model.config.context, config, report)


def smaller_models(config: GPTTrainConfig) -> list[dict[str, Any]]:
    """Narrower models with as many layers and heads of the same size, at most 3/4 as many."""
    model, sizes = config.model, list[dict[str, Any]]()
    for heads in sorted({model.heads * eighths // 8 for eighths in (1, 2, 3, 4, 6)} - {0}):
        kv_heads = gcd(heads, max(1, model.kv_heads * heads // model.heads))
        hidden = -(-model.hidden * heads // (model.heads * (step := lcm(64, kv_heads)))) * step
        sizes.append({"dim": heads * model.head_dim, "heads": heads, "kv_heads": kv_heads, "hidden": hidden})
    return sizes


FAMILY = Family(
    name="gpt",
    title="decoder-only transformers",
    baseline="megatron",
    config=GPTConfig,
    model=GPT,
    train_config=GPTTrainConfig,
    task=GPTTask,
    shape=GPTShape,
    build_step=build_step,
    step_shapes=step_shapes,
    inference_command="generate",
    default_preset="gpt",
    converter=GPTConverter,
    heal_config=HealConfig,
    text_generation=(run, converse),
    import_model=import_model,
    pretrained_config=config_of,
    export_model=export_model,
    measure_inference=measure_inference,
    smaller_models=smaller_models,
    evaluate=evaluate,
    describe_loss=lambda config: ("cross-entropy, nats a token", log(config.model.vocab), "a uniform guess"),
    nats=True,
)
