"""Whole models, and how they are written to and read from disk."""

from phantom_parallel.models.ffn import FFN, FFNConfig
from phantom_parallel.models.storage import load_model, save_model

__all__ = ["FFN", "FFNConfig", "load_model", "save_model"]
