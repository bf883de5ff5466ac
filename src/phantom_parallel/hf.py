"""Models of ``transformers`` with phantom layers: saving, loading and training them, in one process and on ranks.

Importing this module registers phantom layers as a quantization method of ``transformers``, which is its hook for
models whose modules are replaced before their weights load: ``save_pretrained`` and ``from_pretrained`` work as usual.

Without this import, ``transformers`` would build dense layers and initialize them at random. Therefore each phantom
layer is saved with a ``weight`` of one element: a dense layer's shape differs, and ``from_pretrained`` fails.

On ranks, ``transformers`` shards the layers while it loads them, by parallel styles that this module registers. The
model's own plan is used, or where ``transformers`` has none, phantom layers take and return all features::

    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)  # torchrun --nproc-per-node 2

``convert`` and ``replace_linear`` are those of `phantom_parallel`: calibration data are batches of keywords with their
attention masks, a ``DataLoader`` of such, or a dataset with ``input_ids``.
"""

import re
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from importlib.metadata import version
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import TensorParallelLayer, replace_layer_number_by_wildcard
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    installed = find_spec("transformers") and version("transformers")
    raise ImportError(
        f"phantom_parallel.hf needs transformers 5.22 or newer, and {installed or 'none'} is installed: "
        "pip install 'transformers>=5.22'"
    ) from error

from phantom_parallel import convert, replace_linear
from phantom_parallel.energy.meter import RunningEnergy
from phantom_parallel.infer.evaluate import EvalConfig, Report, evaluate_text, read_texts
from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.ops.collectives import block_group
from phantom_parallel.ops.features import gather_features, shard_features
from phantom_parallel.utils.layout import BlockLayout

METHOD = "phantom_parallel.hf"  # transformers shows it where this module was not imported
_MARKER = "weight"

__all__ = ["EnergyCallback", "PhantomConfig", "PhantomQuantizer", "PhantomStyle", "describe", "fitting_ranks"]
__all__ += ["convert", "replace_linear"]


@register_quantization_config(METHOD)
class PhantomConfig(QuantizationConfigMixin):  # type: ignore[misc, unused-ignore]
    """Which modules of a model are phantom layers.

    Args:
        layers: For the name of each, its ``in_features``, ``out_features``, ``bias``, ``blocks`` and ``ghosts``.
    """

    def __init__(self, layers: dict[str, dict[str, Any]], **kwargs: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment, unused-ignore]
        self.layers = layers


@register_quantizer(METHOD)
class PhantomQuantizer(HfQuantizer):  # type: ignore[misc, unused-ignore]
    """Replaces linear layers by empty phantom layers before the weights load."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        layers: dict[str, dict[str, Any]] = self.quantization_config.layers  # type: ignore[attr-defined]
        for name, settings in layers.items():
            layer = PhantomLinear(**settings, device="meta", dtype=next(model.parameters()).dtype)
            model.set_submodule(name, layer, strict=True)
            # Some models initialize the linear layers of a module by their weight, which a phantom layer has not.
            for module in (layer, model.get_submodule(name.rpartition(".")[0])):
                module._is_hf_initialized = True  # type: ignore[assignment]
        model._keys_to_ignore_on_load_unexpected |= {rf"^{re.escape(name)}\.{_MARKER}$" for name in layers}  # type: ignore
        model.register_load_state_dict_pre_hook(_drop_markers)

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Replace the styles of phantom layers in a plan, of the model's own or none, by their phantom counterparts."""
        ranks = getattr(getattr(model.config, "distributed_config", None), "tp_size", 1)
        if ranks > 1 and ranks not in (fit := fitting_ranks(model.config)):
            near = " or ".join(map(str, fit))
            raise ValueError(f"{ranks} ranks do not fit the heads, key-value heads and blocks of the model: use {near}")
        if plan is model.ep_plan:
            return
        pairs = {name: style for name, _ in model.named_modules() for end, style in _PAIRS if f".{name}".endswith(end)}
        if not all(isinstance(model.get_submodule(name), PhantomLinear) for name in pairs):
            pairs = {}  # a dense layer takes and returns all features
        for name in self.quantization_config.layers:  # type: ignore[attr-defined]
            pattern = replace_layer_number_by_wildcard(name)
            style = plan.get(pattern) or pairs.get(name, "")
            plan[pattern] = style if style.startswith("phantom") else _STYLES.get(style, "phantom")

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        layers: dict[str, Any] = model.config.quantization_config.layers
        return model.state_dict() | {f"{name}.{_MARKER}": torch.zeros(1) for name in layers}, {}

    def is_serializable(self) -> bool:
        return True

    is_trainable = is_qat_trainable = property(lambda self: True)  # all parameters, and not only adapters


class PhantomStyle(TensorParallelLayer):  # type: ignore[misc, unused-ignore]
    """Parallel style of phantom layers in plans of ``transformers``.

    Args:
        dense: Name of the style of layers that the plan matches as well and that are not phantom layers.
        gather_output: Whether the output has all features, or those of this rank.
    """

    def __init__(self, dense: str, *, gather_output: bool) -> None:
        self.dense, self.gather_output = dense, gather_output

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        if not isinstance(module, PhantomLinear):
            ALL_PARALLEL_STYLES[self.dense].shard_param(module, param, mesh)
        elif (weight := module._parameters.get(param)) is not None:
            shard = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[param] = nn.Parameter(shard, requires_grad=weight.requires_grad)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, PhantomLinear):
            return ALL_PARALLEL_STYLES[self.dense].install_forward(module, mesh)
        module.mesh, module.group = mesh, block_group(mesh, module.blocks)
        module.layout = replace(module.layout, ranks=mesh.size())
        return super().install_forward(module, mesh)

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        x, *rest = args
        if x.shape[-1] == module.in_features:
            x = _shard_once(x, mesh)
        return (x, *rest), kwargs

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        return gather_features(output, mesh) if self.gather_output else output


def _shard_once(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's features of x. Layers that share an input share them, so that one all-gather returns its gradient."""
    if torch.compiler.is_compiling() or not x.requires_grad:
        return shard_features(x, mesh)
    key = x._version, mesh
    if getattr(x, "_phantom_shard", (None,))[0] != key:
        x._phantom_shard = key, shard_features(x, mesh)  # type: ignore[attr-defined]
    return x._phantom_shard[1]  # type: ignore[attr-defined]


_STYLES = {"colwise": "phantom_colwise", "rowwise": "phantom_rowwise"}  # counterparts of those of transformers
_PAIRS = (  # of models for which transformers has no plan, BERT and GPT-2: how the names of layers end
    *((f".attention.self.{name}", "colwise") for name in ("query", "key", "value")),
    *((name, "colwise") for name in (".intermediate.dense", ".mlp.c_fc")),
    *((name, "rowwise") for name in (".output.dense", ".mlp.c_proj")),
)
for _name, _style in {
    "phantom_colwise": PhantomStyle("colwise", gather_output=False),
    "phantom_rowwise": PhantomStyle("rowwise", gather_output=True),
    "phantom": PhantomStyle("replicate", gather_output=True),
}.items():
    ALL_PARALLEL_STYLES.register(_name, _style)  # type: ignore[arg-type]


def fitting_ranks(model: Any) -> list[int]:
    """The numbers of ranks that a model with phantom layers can be sharded over, from its config alone.

    They divide its heads and key-value heads, and divide the blocks of its layers or are multiples of them.

    Args:
        model: The folder of a saved model, or its config.
    """
    config = AutoConfig.from_pretrained(model) if isinstance(model, str | PathLike) else model
    described = config.quantization_config
    layers = described["layers"] if isinstance(described, dict) else described.layers
    text = config.get_text_config()
    heads = [text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads]
    fitting = []
    for ranks in range(1, min(heads) + 1):
        with suppress(ValueError):
            for layer in layers.values():
                BlockLayout(**{name: size for name, size in layer.items() if name != "bias"}, ranks=ranks)
            fitting += [ranks] if not any(n % ranks for n in heads) else []
    return fitting


def describe(model: Any) -> None:
    """Write the phantom layers of a model into its config. ``save_pretrained`` does it by itself."""
    phantoms = {name: layer for name, layer in model.named_modules() if isinstance(layer, PhantomLinear)}
    if not phantoms:
        raise ValueError("the model has no phantom layers: convert it first")
    sizes = ("in_features", "out_features", "blocks", "ghosts")
    layers = {
        name: {size: getattr(layer, size) for size in sizes} | {"bias": layer.bias is not None}
        for name, layer in phantoms.items()
    }
    sharded = any(layer.mesh is not None for layer in phantoms.values())
    if sharded and not model.is_distributed_loading_by_transformers:
        raise ValueError("phantom layers on a mesh cannot be saved by transformers: use phantom_parallel.save_model")
    if not isinstance(getattr(model, "hf_quantizer", None), PhantomQuantizer):
        model.register_load_state_dict_pre_hook(_drop_markers)
    model.config.quantization_config = PhantomConfig(layers)
    model.hf_quantizer = PhantomQuantizer(model.config.quantization_config, pre_quantized=True)


def _drop_markers(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook before ``load_state_dict``, by which ``Trainer`` resumes."""
    for name, layer in model.named_modules():
        if isinstance(layer, PhantomLinear):
            state.pop(f"{prefix}{name}.{_MARKER}", None)


_save_pretrained = PreTrainedModel.save_pretrained


@wraps(_save_pretrained)
def _describe_and_save(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    if any(isinstance(module, PhantomLinear) for module in model.modules()):
        describe(model)
    _save_pretrained(model, *args, **kwargs)


PreTrainedModel.save_pretrained = _describe_and_save  # type: ignore[method-assign, assignment]


def evaluate(folder: Path, config: EvalConfig, report: Report) -> dict[str, float]:
    """Perplexity and nats a token of a language model on a text, for ``phantom eval``. All ranks call this."""
    text = b"" if config.tasks else read_texts(config.data)
    plan = DistributedConfig(tp_size=config.ranks) if config.ranks > 1 else None
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if config.tasks:
        return evaluate_tasks(model, tokenizer, config)
    encoded = tokenizer(text.decode(errors="replace"), add_special_tokens=False)
    tokens = torch.tensor(encoded["input_ids"], device=model.device)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", len(tokens))
    return evaluate_text(lambda batch: model(batch).logits, tokens, text, context, config, report)


def evaluate_tasks(model: Any, tokenizer: Any, config: EvalConfig) -> dict[str, float]:
    """Scores of a language model on tasks of lm_eval, by task and metric. All ranks call this and score everything."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError("--tasks needs lm_eval, which is not installed: pip install lm_eval") from None
    manager = TaskManager(include_path=None if config.task_folder is None else str(config.task_folder))
    if unknown := sorted(set(config.tasks) - set(manager.all_tasks)):
        raise ValueError(f"lm_eval has no task {unknown[0]}: lm_eval ls tasks lists them, or give --task-folder")
    settings = {"tasks": list(config.tasks), "task_manager": manager, "limit": config.limit, "bootstrap_iters": 0}
    adapter = HFLM(model, tokenizer=tokenizer, batch_size=config.batch)
    scores = (simple_evaluate(adapter, **settings) or {"results": {}})["results"]  # None but on rank 0
    named = {f"{task} {metric.partition(',')[0]}": score for task in scores for metric, score in scores[task].items()}
    return {name: score for name, score in named.items() if isinstance(score, float) and "stderr" not in name}


class EnergyCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Logs the joules of a training so far, whenever ``Trainer`` logs. Checkpoints store them.

    In ``Trainer(callbacks=[EnergyCallback()])`` they come into ``trainer.state.log_history``; `add_to` has trackers log
    them as well, which ``Trainer`` calls before the callbacks of its users.

    Args:
        profile: Power profile to model energy with where there are no sensors, as for `EnergyMeter`.

    Example::

        EnergyCallback().add_to(trainer)
    """

    def __init__(self, profile: str | None = None) -> None:
        self._energy = RunningEnergy(profile)

    def add_to(self, trainer: Any) -> None:
        """Add the callback to a ``Trainer``, after that which decides when to log and before trackers."""
        trainer.callback_handler.callbacks.insert(1, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__, {"attributes": {"joules": {}}})
        self._energy.start(saved["attributes"]["joules"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            self._read(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        joules = self._read(state)
        logs |= joules
        state.log_history[-1] |= joules

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._energy.stop()

    def _read(self, state: Any) -> dict[str, float]:
        joules = self._energy.read()
        saved = {"args": {"profile": self._energy.profile}, "attributes": {"joules": dict(self._energy.joules)}}
        state.stateful_callbacks[type(self).__name__] = saved
        return joules
