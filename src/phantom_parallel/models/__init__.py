"""Whole models, and how they are written to and read from disk."""

from phantom_parallel.models.ffn import FFN, FFNConfig
from phantom_parallel.models.gpt import GPT
from phantom_parallel.models.gpt_config import GPTConfig
from phantom_parallel.models.storage import load_model, save_model

__all__ = ["FFN", "GPT", "FFNConfig", "GPTConfig", "load_model", "save_model"]
