"""Serve a converted model on ranks: ``torchrun --nproc-per-node 2 examples/serve_hf.py FOLDER``, or in one process.

Rank 0 answers requests on the loopback interface, one after the other, and the other ranks generate with it::

    curl 127.0.0.1:8000 --data '{"prompt": "import torch", "max_new_tokens": 20}'

A folder without a tokenizer, such as that of ``convert_hf.py``, has a model of bytes. For many users at a time, vLLM
serves converted models as well (docs/stacks.md).
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig

import phantom_parallel.hf  # noqa: F401  (registers phantom layers)

folder, port = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8000
ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
plan = DistributedConfig(tp_size=ranks, tp_plan="auto") if ranks > 1 else None
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan).eval()
tokenizer = AutoTokenizer.from_pretrained(folder) if Path(folder, "tokenizer.json").exists() else None


limit = model.config.max_position_embeddings


def share(sizes: list[int], tokens: list[int]) -> list[int]:
    """The tokens that follow those of rank 0, the likeliest at each step. ``sizes`` are the numbers of both."""
    if ranks > 1:
        dist.broadcast(numbers := torch.tensor(sizes, device=model.device), 0)
        sizes = numbers.tolist()
    if sizes[1] == 0:
        return []
    before = torch.tensor([tokens or [0] * sizes[0]], device=model.device)
    if ranks > 1:
        dist.broadcast(before, 0)
    settings = {"max_new_tokens": sizes[1], "do_sample": False, "pad_token_id": 0}
    return model.generate(before, attention_mask=torch.ones_like(before), **settings)[0, sizes[0] :].tolist()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, length = str(request["prompt"]), int(request.get("max_new_tokens", 20))
            tokens = list(prompt.encode()) if tokenizer is None else tokenizer(prompt)["input_ids"]
            if not tokens or length < 1 or len(tokens) + length > limit:
                raise ValueError(
                    f"prompt and max_new_tokens must have at least one token each, at most {limit} together"
                )
        except (ValueError, KeyError, TypeError) as error:
            self.send_error(400, str(error))
            return
        new = share([len(tokens), length], tokens)
        text = bytes(new).decode(errors="replace") if tokenizer is None else tokenizer.decode(new)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"text": text}).encode())


class Server(HTTPServer):
    timeout = 60.0

    def handle_timeout(self) -> None:
        share([0, 0], [])  # ranks that wait for longer than half an hour would stop


server = Server(("127.0.0.1", port), Handler) if rank == 0 else None
if server is not None:
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
while True:
    if server is None:
        share([0, 0], [])
    else:
        server.handle_request()
