"""Models of ``transformers`` with phantom layers, in one process: saving, loading and training them.

Importing this module registers phantom layers as a quantization method of ``transformers``, which is its hook for
models whose modules are replaced before their weights load::

    import phantom_parallel.hf

    phantom_parallel.convert(model, batches, blocks=3, ghosts=64)
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)

Without this import, ``transformers`` warns of the unknown method and would build a dense model, whose linear layers are
not in the checkpoint and would be initialized at random. Therefore each phantom layer is saved with a ``weight`` of one
element beside its own parameters: a dense layer's shape differs, and ``from_pretrained`` fails.

Ranks run models of the Llama architecture through ``phantom model import`` and ``phantom model convert``.
"""

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from phantom_parallel.nn.linear import PhantomLinear

try:
    from transformers import PreTrainedModel
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError("phantom_parallel.hf needs transformers: pip install 'phantom-parallel[pretrained]'") from error

METHOD = "phantom_parallel.hf"  # transformers shows it where this module was not imported
_MARKER = "weight"

__all__ = ["PhantomConfig", "PhantomQuantizer", "describe"]


@register_quantization_config(METHOD)
class PhantomConfig(QuantizationConfigMixin):  # type: ignore[misc, unused-ignore]
    """Which modules of a model are phantom layers.

    Args:
        layers: For the name of each, its ``in_features``, ``out_features``, ``bias``, ``blocks`` and ``ghosts``.
    """

    def __init__(self, layers: dict[str, dict[str, Any]], **kwargs: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment, unused-ignore]
        if not isinstance(layers, dict):
            raise ValueError(f"layers must be an object with a layer for each name, got {type(layers).__name__}")
        self.layers = layers


@register_quantizer(METHOD)
class PhantomQuantizer(HfQuantizer):  # type: ignore[misc, unused-ignore]
    """Replaces linear layers by empty phantom layers before the weights load."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        layers: dict[str, dict[str, Any]] = self.quantization_config.layers  # type: ignore[attr-defined]
        for name, settings in layers.items():
            try:
                layer = PhantomLinear(**settings, device="meta", dtype=next(model.parameters()).dtype)
                model.set_submodule(name, layer, strict=True)
                # Some models initialize the linear layers of a module by their weight, which a phantom layer has not.
                for module in (layer, model.get_submodule(name.rpartition(".")[0])):
                    module._is_hf_initialized = True  # type: ignore[assignment]
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"the config has a phantom layer {name!r} that cannot be made: {error}") from None
        model._keys_to_ignore_on_load_unexpected |= {rf"^{re.escape(name)}\.{_MARKER}$" for name in layers}  # type: ignore
        model.register_load_state_dict_pre_hook(_drop_markers)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        layers: dict[str, Any] = model.config.quantization_config.layers
        return model.state_dict() | {f"{name}.{_MARKER}": torch.zeros(1) for name in layers}, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether all parameters can be trained, and not only adapters."""
        return True


def describe(model: Any) -> None:
    """Write the phantom layers of a model into its config. ``save_pretrained`` does it by itself."""
    layers = {
        name: {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": layer.bias is not None,
            "blocks": layer.blocks,
            "ghosts": layer.ghosts,
        }
        for name, layer in model.named_modules()
        if isinstance(layer, PhantomLinear)
    }
    if not layers:
        raise ValueError("the model has no phantom layers: convert it first")
    if any(layer.mesh is not None for layer in model.modules() if isinstance(layer, PhantomLinear)):
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


def _describe_before(save: Callable[..., None]) -> Callable[..., None]:
    """``save_pretrained`` that describes models whose phantom layers were not made by `phantom_parallel.convert`."""

    @wraps(save)
    def save_pretrained(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(module, PhantomLinear) for module in model.modules()):
            describe(model)
        save(model, *args, **kwargs)

    return save_pretrained


PreTrainedModel.save_pretrained = _describe_before(PreTrainedModel.save_pretrained)  # type: ignore[method-assign]
