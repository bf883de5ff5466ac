"""Tensors on disk: models, and the sharded folders that training checkpoints are.

``tensor_file`` writes safetensors files one tensor at a time with digests, ``shards`` lets every rank of a process
group write and read its own part through ``torch.distributed.checkpoint``, ``background`` does so while training
continues, and ``model`` has `save_model` and `load_model`.
"""
