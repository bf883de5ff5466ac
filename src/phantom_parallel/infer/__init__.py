"""Inference: predictions of a trained model on any ranks, and what a sample costs against tensor parallelism."""
