"""Selection of the next token: the most likely one, or a sample; and the settings of ``phantom generate``.

A sample maps one uniform number per row to a token by the cumulative probabilities in the order of the vocabulary. All
ranks hold the same logits and draw the same numbers, so that they select the same token without a collective.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from phantom_parallel.infer.measure import RunConfig
from phantom_parallel.utils.settings import NonNegativeFloat, PositiveInt, validate

MAX_SEED = (1 << 63) - 1  # of a torch generator


@dataclass(frozen=True)
class Sampling:
    """How tokens are selected."""

    temperature: NonNegativeFloat = 0.0
    """0 selects the most likely token. Above 0, logits are divided by it and a token is sampled."""
    top_k: PositiveInt | None = None
    """Sample from this number of the most likely tokens only."""
    top_p: Annotated[float, Meta(gt=0, le=1, description="above 0 and at most 1")] | None = None
    """Sample from the smallest set of most likely tokens with at least this probability together, after top-k."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED, description=f"from 0 to {MAX_SEED}")] = 0
    """Seed of the sampling, which is the same on any number of ranks."""

    def __post_init__(self) -> None:
        validate(self)
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p restrict the sampling, but temperature=0 does not sample: raise it")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Sampling, RunConfig):
    """What to generate, and whether to measure it, by ``phantom generate``."""

    chat: bool = False
    """The prompt is a message, which the model's chat template puts into its place. Without a prompt, messages are read
    from stdin, a line each."""
    tokens: PositiveInt | None = None
    """Tokens to generate at most; by default 128, with --chat as many as fit into the model's context."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation, besides the model's own stop tokens."""
    batch: PositiveInt = 1
    """Number of texts to generate from each prompt at once; the first is shown as it is generated, the others at the
    end."""
    measure: bool = False
    """Measure the cost of a token after the text: time, FLOPs, bytes and energy of prefill and decode."""
    against: Literal["megatron", "none"] = "none"
    """Measure a tensor-parallel model of the same sizes with random weights as well."""

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        Sampling.__post_init__(self)
        if "" in self.stop:
            raise ValueError("a text to stop at must not be empty")
        object.__setattr__(self, "measure", self.measure or self.against != "none")

    @property
    def sampling(self) -> Sampling:
        """How tokens are selected."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


class Sampler:
    """Selects one token after another. Two samplers with the same settings select the same from the same logits."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)  # on the CPU: the same numbers for any device

    def __call__(self, logits: Tensor) -> Tensor:
        """Select tokens: (batch, vocab) -> (batch,)."""
        if self._sampling.temperature == 0:
            return logits.argmax(-1)
        drawn = torch.rand(logits.shape[0], generator=self._generator, dtype=torch.float64)
        return draw(probabilities(logits, self._sampling), drawn.to(logits.device))


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return (batch, vocab) probabilities in float64, 0 for excluded tokens. They need not sum to 1."""
    logits = logits.double()
    scaled = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is None and sampling.top_p is None:
        return scaled.softmax(-1)
    highest, tokens = scaled.topk(min(sampling.top_k or scaled.shape[-1], scaled.shape[-1]))
    candidates = highest.softmax(-1)
    if sampling.top_p is not None:
        before = candidates.cumsum(-1) - candidates  # of the more likely tokens: the first one is always included
        candidates = candidates.where(before < sampling.top_p, 0.0)
    return torch.zeros_like(scaled).scatter(-1, tokens, candidates)


def draw(probabilities: Tensor, drawn: Tensor) -> Tensor:
    """Return the token of each row at which the cumulative probability exceeds ``drawn``, a number in [0, 1)."""
    sums = probabilities.cumsum(-1)
    total = sums[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # so that rounding does not exceed the last token
    return torch.searchsorted(sums, torch.minimum(drawn[:, None] * total, below), right=True).squeeze(-1)
