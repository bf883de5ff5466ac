"""What a conversion of a dense layer keeps, and warnings where it changes more than a user may expect."""

import gc
import sys
import warnings
from math import ceil

from torch import nn

from phantom_parallel.utils.layout import BlockLayout


def warn_about_conversion(linear: nn.Linear, layout: BlockLayout) -> None:
    """Issue a UserWarning if the dense weight is shared with another module, or if the phantom layer is not smaller."""
    if owners := _other_owners(linear):
        warnings.warn(
            f"the conversion to a phantom layer unties a shared weight: the weight of this {type(linear).__name__} is "
            f"also a parameter of {', '.join(owners)}, which keeps the dense weight",
            UserWarning,
            stacklevel=3,
        )
    dense = layout.in_features * layout.out_features
    if layout.weights >= dense:
        warnings.warn(
            f"the phantom layer is not smaller than the dense one: {layout.in_features} -> {layout.out_features} "
            f"features with blocks={layout.blocks} and ghosts={layout.ghosts} have {layout.weights} weights, a dense "
            f"layer has {dense}: use fewer than {ceil(layout.break_even)} ghosts",
            UserWarning,
            stacklevel=3,
        )


def keep_modes(linear: nn.Linear, layer: nn.Module) -> None:
    """Let the layer that was made from ``linear`` train, and require gradients, where that did."""
    layer.train(linear.training)
    for name, parameter in layer.named_parameters():
        like = linear.bias if name == "bias" else linear.weight
        parameter.requires_grad_(like is None or like.requires_grad)


def _other_owners(linear: nn.Linear) -> list[str]:
    """Class names of other modules that have the layer's weight as a parameter.

    A parameter has no list of its modules, so the garbage collector is searched; but only if the reference count shows
    that there may be others, as this visits all objects of the process.
    """
    weight = linear._parameters.get("weight")
    if weight is None:  # computed from others, as of a pruned or normed layer
        return []
    if sys.getrefcount(weight) <= 3:  # the layer's own dictionary, the variable here and the argument
        return []
    holders = {id(found) for found in gc.get_referrers(weight) if type(found) is dict}
    holders.discard(id(linear._parameters))
    if not holders:
        return []
    modules = (found for found in gc.get_objects() if issubclass(type(found), nn.Module))
    return [type(module).__name__ for module in modules if id(module.__dict__.get("_parameters")) in holders]
