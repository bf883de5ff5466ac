"""Generate with a converted model in vLLM: ``python examples/vllm/generate.py FOLDER RANKS TOKEN TOKEN ...``.

FOLDER was written by ``save_pretrained`` after ``phantom_parallel.convert``. The plug-in `phantom_vllm`
is installed beside vLLM, as requirements.txt says. On CPUs set VLLM_CPU_KVCACHE_SPACE=1 and
VLLM_CPU_OMP_THREADS_BIND=nobind.
``vllm serve FOLDER --tensor-parallel-size 2 --enforce-eager --host 127.0.0.1`` serves it over HTTP.
"""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, ranks, *tokens = sys.argv[1], *map(int, sys.argv[2:])
    llm = LLM(
        folder,
        tensor_parallel_size=ranks,
        enforce_eager=True,  # torch.compile of phantom layers in vLLM has not been tried
        dtype="float32",
        skip_tokenizer_init=True,  # tokens in, tokens out
        distributed_executor_backend="uni" if ranks == 1 else "mp",
    )
    settings = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    [answer] = llm.generate([{"prompt_token_ids": tokens}], settings, use_tqdm=False)
    print("tokens", *answer.outputs[0].token_ids)
