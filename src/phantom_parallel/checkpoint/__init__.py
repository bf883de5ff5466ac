"""Tensors on disk: models, and the sharded folders that training checkpoints are.

Begin with ``model``, which has `save_model` and `load_model`. ``shards`` lets every rank of a process group write and
read its own part of a folder of safetensors files, and ``pretrained`` reads models of Hugging Face.
"""
