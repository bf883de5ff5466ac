"""LoRA of PEFT on phantom layers. After this import, ``get_peft_model`` adapts them as it adapts ``nn.Linear``."""

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import check_adapters_to_merge

from phantom_parallel.nn.linear import PhantomLinear


class PhantomLora(Linear):  # type: ignore[misc, unused-ignore]
    """LoRA on a `PhantomLinear` in one process: W x + s B A x.

    Merging is exact and adds r ghosts: C_j becomes [C_j; A_j], D_ij [D_ij, s B_i], and L_i becomes L_i + s B_i A_i.
    Ghosts and r together are at most a block's input features. Unmerging removes the ghosts again.
    """

    lora_variants = property(lambda self: {(): None})  # others, such as DoRA, need a dense weight

    def _get_in_out_features(self, module: PhantomLinear) -> tuple[int, int]:
        if module.mesh is not None:
            raise ValueError("LoRA on phantom layers trains in one process, got a layer on a mesh: load it without one")
        return module.in_features, module.out_features

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters, by default the active ones. ``safe_merge`` is not needed: nothing changes in place."""
        for name in check_adapters_to_merge(self, adapter_names):
            if name in self.lora_A:
                self.base_layer = self._changed(name, 1)
                self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Remove all merged adapters from the phantom layer."""
        while self.merged_adapters:
            self.base_layer = self._changed(self.merged_adapters.pop(), -1)

    @torch.no_grad()
    def _changed(self, name: str, sign: int) -> PhantomLinear:
        """The phantom layer with an adapter added, or with the one that was added last subtracted."""
        base, p, r = self.base_layer, self.base_layer.blocks, self.r[name]
        a = self.lora_A[name].weight.to(base.local).unflatten(1, (p, -1)).transpose(0, 1)  # (p, r, m_in)
        b = self.scaling[name] * self.lora_B[name].weight.to(base.local).unflatten(0, (p, -1))  # (p, m_out, r)
        local, compress = (weight.unflatten(0, (p, -1)) for weight in (base.local, base.compress))
        decompress = base.decompress.unflatten(0, (p, -1)).unflatten(2, (p - 1, -1))  # (p, m_out, p - 1, k)
        if sign > 0:
            compress = torch.cat([compress, a], 1)
            decompress = torch.cat([decompress, b.unsqueeze(2).expand(-1, -1, p - 1, -1)], 3)
        else:
            compress, decompress = compress[:, :-r], decompress[..., :-r]
        bias = base.bias
        if self.lora_bias[name]:
            bias = bias + sign * self.scaling[name] * self.lora_B[name].bias
        local, compress, decompress = (
            weight.flatten(0, 1) for weight in (local + sign * b @ a, compress, decompress.flatten(2))
        )
        layer = PhantomLinear.from_weights(local, compress, decompress, bias, blocks=p)
        return layer.requires_grad_(base.local.requires_grad)


_initialize = LoraConfig.__post_init__


def _register(config: Any) -> None:
    """``LoraConfig.__post_init__`` that registers phantom layers as well, which PEFT takes config by config."""
    _initialize(config)
    config._register_custom_module({PhantomLinear: PhantomLora})


LoraConfig.__post_init__ = _register
