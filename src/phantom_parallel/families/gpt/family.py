"""The family ``gpt``: decoder-only transformers."""

from phantom_parallel.families.base import Family
from phantom_parallel.families.gpt.config import GPTConfig, GPTTrainConfig
from phantom_parallel.families.gpt.conversion import GPTConverter
from phantom_parallel.families.gpt.cost import GPTShape
from phantom_parallel.families.gpt.generation import measure_inference
from phantom_parallel.families.gpt.generation_run import converse, run
from phantom_parallel.families.gpt.heal_config import HealConfig
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.pretrained import export_model, import_model
from phantom_parallel.families.gpt.step import build_step, step_shapes
from phantom_parallel.families.gpt.task import GPTTask

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
    shown_settings=("dim", "layers", "heads", "context"),
    imports=("llama", "mistral", "qwen2"),
    converter=GPTConverter,
    heal_config=HealConfig,
    text_generation=(run, converse),
    import_model=import_model,
    export_model=export_model,
    measure_inference=measure_inference,
)
