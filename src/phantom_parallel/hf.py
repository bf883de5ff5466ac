"""Models of ``transformers`` with phantom layers: ``save_pretrained`` and ``from_pretrained``, in one process.

Importing this module registers phantom layers as a quantization method of ``transformers``, which is its hook for
models whose modules are replaced before their weights load::

    import phantom_parallel.hf

    phantom_parallel.hf.convert(model, batches, blocks=3, ghosts=64)
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)

Ranks run models of the Llama architecture through ``phantom import`` and ``phantom convert``.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from phantom_parallel.conversion.api import ConversionReport
from phantom_parallel.conversion.api import convert as convert_maps
from phantom_parallel.conversion.maps import replace_module
from phantom_parallel.conversion.stages import first_tensor
from phantom_parallel.nn.linear import PhantomLinear

try:
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError("phantom_parallel.hf needs transformers: pip install 'phantom-parallel[pretrained]'") from error

METHOD = "phantom"

__all__ = ["PhantomConfig", "PhantomQuantizer", "convert", "describe"]


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
    """Replaces linear maps by empty phantom layers before the weights load."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        layers: dict[str, dict[str, Any]] = self.quantization_config.layers  # type: ignore[attr-defined]
        for name, settings in layers.items():
            try:
                layer = PhantomLinear(**settings, device="meta", dtype=next(model.parameters()).dtype)
                replace_module(model, name, layer)
                # Some models initialize the maps inside a module by their weight, which a phantom layer has not.
                for whole in (layer, model.get_submodule(name.rpartition(".")[0])):
                    whole._is_hf_initialized = True  # type: ignore[assignment]
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"the config has a phantom layer {name!r} that cannot be made: {error}") from None

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def convert(model: Any, batches: Sequence[Any], **settings: Any) -> ConversionReport:
    """`phantom_parallel.convert` for a model of ``transformers``, which then knows how to save its phantom layers.

    For language models (``...ForCausalLM``), errors are weighted by the loss of the next token unless ``loss`` is
    given.
    """
    if type(model).__name__.endswith("ForCausalLM"):
        settings.setdefault("loss", _next_token_loss)
    report = convert_maps(model, batches, **settings)
    describe(model)
    return report


def _next_token_loss(model: Any, batch: Any) -> Tensor:
    inputs = batch if isinstance(batch, dict) else {"input_ids": first_tensor(batch)}
    loss: Tensor = model(**inputs | {"labels": inputs["input_ids"]}).loss
    return loss


def describe(model: Any) -> None:
    """Write the phantom layers of a model into its config, for ``save_pretrained``."""
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
    model.config.quantization_config = PhantomConfig(layers)
    model.hf_quantizer = PhantomQuantizer(model.config.quantization_config, pre_quantized=True)
