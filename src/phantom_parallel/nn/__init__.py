"""Layers: the operators with parameters, on one process or cut over a device mesh."""

from phantom_parallel.nn.agreement import RanksDisagree
from phantom_parallel.nn.groups import parameter_groups
from phantom_parallel.nn.linear import PhantomLinear, TensorLinear
from phantom_parallel.nn.style import PhantomParallel

__all__ = ["PhantomLinear", "PhantomParallel", "RanksDisagree", "TensorLinear", "parameter_groups"]
