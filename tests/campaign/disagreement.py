"""Ranks of which one builds another model, by one random setting: every rank must raise, and name that rank.

Without the check such ranks abort, hang, or go on with wrong numbers.
"""

from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import FFN, GPT, FFNConfig, GPTConfig, RanksDisagree
from tests.campaign.tally import Problem, Tally
from tests.pool import Pool, RankFailed

GROUP = "ranks that differ"
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ffn": (FFN, FFNConfig, {"width": 48, "depth": 3, "ghosts": 2}),
    "gpt": (
        GPT,
        GPTConfig,
        {"vocab": 48, "dim": 48, "layers": 2, "heads": 12, "hidden": 96, "context": 8, "ghosts": 2},
    ),
}
# Values that the odd rank has instead: sizes that fit as well, so that nothing else refuses them.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "ffn": {"width": 96, "depth": 2, "ghosts": 3, "wire": "bf16", "dtype": torch.float64},
    "gpt": {"vocab": 96, "dim": 96, "layers": 3, "hidden": 48, "ghosts": 3, "wire": "int8", "dtype": torch.bfloat16},
}


class Case(NamedTuple):
    """A case, the same on every rank."""

    family: str
    ranks: int
    odd: int
    difference: str


def run(tally: Tally, count: int, seed: int, first: int = 0) -> None:
    """Try ``count`` cases from ``first`` on."""
    pools = dict[int, Pool]()
    for number in range(first, first + count):
        random = Random(f"{seed} differ {number}")
        family, ranks = random.choice(("ffn", "gpt")), random.choice((2, 3, 4))
        case = Case(family, ranks, random.randrange(ranks), random.choice(list(DIFFERENCES[family])))
        if ranks not in pools or pools[ranks].closed:
            pools[ranks] = Pool(ranks)
        again = f"python -m tests.campaign --seed {seed} --inputs 0 --kills 0"
        tally.add(GROUP, str(case), _problems(pools[ranks], case), f"{again} --differences 1 --first {number}")
    for pool in pools.values():
        pool.close()


def _problems(pool: Pool, case: Case) -> list[Problem]:
    try:
        messages = pool(_build, case)
    except RankFailed as error:
        return [("hang" if "hangs" in str(error) else "traceback", str(error)[-1500:])]
    problems: list[Problem] = []
    for rank, message in enumerate(messages):
        if not message:
            problems.append(("wrong numbers", f"rank {rank} noticed nothing"))
        elif f"rank {case.odd} " not in message:
            problems.append(("message", f"rank {rank} does not name rank {case.odd}: {message}"))
    return problems


def _build(case: Case) -> str:
    """The error of this rank when it builds the model."""
    model, config, sizes = MODELS[case.family]
    mesh, options = init_device_mesh("cpu", (case.ranks,)), dict[str, Any]()
    if dist.get_rank() == case.odd:
        value = DIFFERENCES[case.family][case.difference]
        target = options if case.difference in ("wire", "dtype") else (sizes := dict(sizes))
        target[case.difference] = value
    try:
        model(config(**sizes, blocks=case.ranks), mesh=mesh, **options)
    except RanksDisagree as error:
        return str(error)
    return ""
