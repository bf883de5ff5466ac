"""Ranks of which one differs at random, in a random layer: every rank must raise, and name that rank.

Models, sizes, the odd rank and what it does otherwise are drawn from the number of a case. Without the check such ranks
abort, hang, or go on with wrong numbers.
"""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import FFN, GPT, FFNConfig, GPTConfig, RanksDisagree, check_ranks
from phantom_parallel.distributed.errors import PeerFailed
from tests.campaign.tally import Bad, Tally
from tests.pool import Pool, RankFailed

GROUP = "ranks that differ"


class Skipped(nn.Module):
    """In the place of a layer that a rank does not run."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x


class Drawn(NamedTuple):
    """A case, the same on every rank."""

    family: str
    ranks: int
    odd: int
    difference: str
    layer: int
    seed: int


# What the odd rank does otherwise, and whether it is about a layer.
OF_BOTH = (
    "batch",
    "dtype",
    "autocast",
    "frozen layer",
    "frozen parameter",
    "no_grad",
    "no backward",
    "raises",
    "twice",
)
OF_FFN = ("skipped layer", "swapped layers")
OF_GPT = ("tokens", "targets", "logits instead of a loss", "skipped layer", "checkpointing")


def draw(number: int, seed: int) -> Drawn:
    """The case of a number."""
    random = Random(f"{seed} differ {number}")
    family, ranks = random.choice(("FFN", "GPT")), random.choice((2, 3, 4))
    kinds = OF_BOTH + (OF_FFN if family == "FFN" else OF_GPT)
    return Drawn(
        family, ranks, random.randrange(ranks), random.choice(kinds), random.randrange(3), random.randrange(9**9)
    )


def run(count: int, seed: int, *, first: int = 0, progress: bool = False) -> Tally:
    """Try ``count`` cases from ``first`` on."""
    tally, pools = Tally(), dict[int, Pool]()
    try:
        for number in range(first, first + count):
            case = draw(number, seed)
            if case.ranks not in pools or pools[case.ranks].closed or pools[case.ranks].worn:
                pools[case.ranks] = Pool(case.ranks)
            again = f"python -m tests.campaign --seed {seed} --inputs 0 --kills 0 --differences 1 --first {number}"
            found = [*_problems(pools[case.ranks], case)]
            tally.add(GROUP, [Bad(GROUP, kind, str(case), detail, again) for kind, detail in found])
            if progress and number % 50 == 49:
                print(f"ranks that differ: {number + 1 - first} of {count}, {len(tally.bad)} bad", flush=True)
    finally:
        for pool in pools.values():
            pool.close()
    return tally


def _problems(pool: Pool, case: Drawn) -> list[tuple[str, str]]:
    try:
        outcomes = pool(on_rank, case)
    except RankFailed as error:
        return [("hang" if "hangs" in str(error) else "traceback", str(error)[-1500:])]
    found: list[tuple[str, str]] = []
    for rank, (kind, message) in enumerate(outcomes):
        if not kind:
            found.append(("wrong numbers", f"rank {rank} noticed nothing"))
        elif case.difference == "raises" and rank == case.odd:
            continue
        elif f"rank {case.odd} " not in message:
            found.append(("message", f"rank {rank} does not name rank {case.odd}: {message}"))
    messages = {
        message for rank, (_, message) in enumerate(outcomes) if case.difference != "raises" or rank != case.odd
    }
    if len(messages) > 1:
        found.append(("message", f"ranks have different messages: {messages}"))
    return found


def on_rank(case: Drawn) -> tuple[str, str]:
    """The error of this rank, by its kind and message."""
    torch.manual_seed(case.seed)
    mesh = init_device_mesh("cpu", (case.ranks,))
    odd = dist.get_rank() == case.odd
    step = (_ffn_step if case.family == "FFN" else _gpt_step)(case, mesh, odd)
    try:
        with check_ranks():
            step()
            if odd and case.difference == "twice":
                step()
    except (RanksDisagree, PeerFailed, ArithmeticError) as error:
        return type(error).__name__, str(error)
    return "", ""


def _ffn_step(case: Drawn, mesh: Any, odd: bool) -> Callable[[], None]:
    config = FFNConfig(width=8 * case.ranks, depth=3, blocks=case.ranks, ghosts=2, activation="tanh")
    model = FFN(config, mesh=mesh)
    rows = 5 if odd and case.difference == "batch" else 6
    x = torch.randn(rows, 8)
    if odd and case.difference == "skipped layer":
        model.layers[case.layer] = Skipped()
    if odd and case.difference == "swapped layers":
        model.layers = nn.ModuleList([model.layers[(index + 1 + case.layer % 2) % 3] for index in range(3)])
    return lambda: _step(model, case, odd, lambda like: model(x.to(like)).square().mean())


def _gpt_step(case: Drawn, mesh: Any, odd: bool) -> Callable[[], None]:
    sizes = {"vocab": 4 * case.ranks, "dim": 8 * case.ranks, "layers": 3, "heads": 2 * case.ranks, "context": 8}
    hidden, tied = 8 * case.ranks, bool(case.seed % 2)
    config = GPTConfig(**sizes, hidden=hidden, blocks=case.ranks, ghosts=2, tie_embeddings=tied)
    model = GPT(config, mesh=mesh)
    rows = 3 if odd and case.difference == "batch" else 4
    tokens, targets = torch.randint(config.vocab, (2, rows, 6))
    if odd and case.difference in ("tokens", "targets"):
        changed = tokens if case.difference == "tokens" else targets
        changed[0, case.layer] = (changed[0, case.layer] + 1) % config.vocab
    if odd and case.difference == "checkpointing":
        model.activation_checkpointing = True
    if odd and case.difference == "skipped layer":
        model.layers[case.layer] = Skipped()

    def loss(like: torch.dtype) -> Tensor:
        if odd and case.difference == "logits instead of a loss":
            return model.logits(tokens).square().mean()
        return model.loss(tokens, targets)

    return lambda: _step(model, case, odd, loss)


def _step(model: nn.Module, case: Drawn, odd: bool, loss_of: Callable[[torch.dtype], Tensor]) -> None:
    """One step, in which the odd rank does something else."""
    difference = case.difference if odd else ""
    if difference == "raises":
        raise ArithmeticError("this rank cannot count")
    layer = model.layers[min(case.layer, len(model.layers) - 1)]
    if difference == "frozen layer":
        layer.requires_grad_(False)
    if difference == "frozen parameter":
        next(p for name, p in layer.named_parameters() if name.endswith(("compress", "local"))).requires_grad_(False)
    if difference == "dtype":
        model = model.double()
    like = next(model.parameters()).dtype
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=difference == "autocast"),
        torch.set_grad_enabled(difference != "no_grad"),
    ):
        loss = loss_of(like)
    if difference not in ("no backward", "no_grad"):
        loss.backward()
