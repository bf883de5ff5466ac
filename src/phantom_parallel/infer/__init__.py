"""Inference: a trained model on any ranks, and what a sample or a token costs against tensor parallelism.

`run` is the whole of it for feed-forward networks, as ``phantom infer`` calls it, and `generate_text` for transformers,
as ``phantom generate`` does. On ranks that exist already, `predict` and `generate` give what a model says, and
`measure` and `measure_generation` time models beside each other.
"""

from phantom_parallel.infer.baseline import as_tensor
from phantom_parallel.infer.gen_launch import GenerateConfig, GenerateReport
from phantom_parallel.infer.gen_launch import run as generate_text
from phantom_parallel.infer.gen_measure import GenerationCost, measure_generation
from phantom_parallel.infer.generate import Generation, generate
from phantom_parallel.infer.inputs import Inputs, open_inputs
from phantom_parallel.infer.launch import InferConfig, Report, run
from phantom_parallel.infer.measure import Inference, measure
from phantom_parallel.infer.predict import predict
from phantom_parallel.infer.sampling import Sampling

__all__ = [
    "GenerateConfig",
    "GenerateReport",
    "Generation",
    "GenerationCost",
    "InferConfig",
    "Inference",
    "Inputs",
    "Report",
    "Sampling",
    "as_tensor",
    "generate",
    "generate_text",
    "measure",
    "measure_generation",
    "open_inputs",
    "predict",
    "run",
]
