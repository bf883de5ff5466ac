"""Request and report of ``phantom generate``, for every family that generates text."""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from phantom_parallel.infer.sampling import Sampling
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.parsing import printable
from phantom_parallel.utils.wire import WireFormat, check_wire

Against = Literal["megatron", "none"]


@dataclass(frozen=True)
class PhaseCost:
    """The cost of prefill or decode. Counts and energies are sums over all ranks, for one token of one row.

    Args:
        seconds: Median time of a prefill, or of one step of decode.
        seconds_p95: The 95th percentile; None if there are fewer than 20 measurements.
        tokens_per_second: Throughput of all rows.
        flops_per_token: FLOPs.
        bytes_per_token: Bytes that ranks send to each other.
        joules_per_token: Energy; None if unavailable.
        provenance: Provenance of the energy: counter, integrated_power, modelled or unavailable.
        blocked_share: Share of all ranks' time that they were blocked in exchanges.
    """

    seconds: float
    seconds_p95: float | None
    tokens_per_second: float
    flops_per_token: float
    bytes_per_token: float
    joules_per_token: float | None
    provenance: str
    blocked_share: float


@dataclass(frozen=True)
class GenerationCost:
    """The cost of one model's generations.

    Args:
        strategy: How the model is parallelised.
        ranks: Number of ranks.
        batch: Number of rows.
        prompt: Tokens of the prompt of a row.
        tokens: Tokens generated for a row.
        turns: Number of generations.
        parameters: Parameters of the whole model.
        prefill: The prompt up to the first token.
        decode: One token after another; None if one token is generated, which prefill produces.
    """

    strategy: str
    ranks: int
    batch: int
    prompt: int
    tokens: int
    turns: int
    parameters: int
    prefill: PhaseCost
    decode: PhaseCost | None

    @property
    def time_to_first_token(self) -> float:
        """Median over turns, in seconds."""
        return self.prefill.seconds

    @property
    def time_per_token(self) -> float | None:
        """Median over steps of decode, in seconds."""
        return None if self.decode is None else self.decode.seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GenerateConfig:
    """What to generate and measure.

    Args:
        model: Folder of the model.
        prompt: The prompt, or several, which may differ in length; or
        prompt_file: a file with the prompt.
        tokens: Number of tokens to generate; by default 128, or as many as fit into the context.
        sampling: How tokens are selected.
        ranks: Number of ranks that share the model.
        batch: Number of texts to generate from each prompt at once.
        against: The baseline to measure as well.
        wire: Format in which features travel between ranks, of both models.
        turns: How often each of two models generates; a single model generates once.
        profile: As for `InferConfig`.
        chat: Whether the prompts were made by a chat template, with its special tokens.
    """

    model: Path
    prompt: str | tuple[str, ...] | None = None
    prompt_file: Path | None = None
    tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    ranks: int = 1
    batch: int = 1
    against: Against = "none"
    wire: WireFormat = "full"
    turns: int = 5
    profile: str | None = None
    chat: bool = False

    @property
    def prompts(self) -> tuple[str, ...]:
        """All prompts that are given as text."""
        if self.prompt is None:
            return ()
        return (self.prompt,) if isinstance(self.prompt, str) else tuple(self.prompt)

    @property
    def rows(self) -> int:
        """Number of texts to generate."""
        return self.batch * max(1, len(self.prompts))

    def __post_init__(self) -> None:
        positive(ranks=self.ranks, batch=self.batch, turns=self.turns)
        check_wire(self.wire)
        if self.tokens is not None:
            positive(tokens=self.tokens)
        for name in ("model", "prompt_file"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(path).absolute())
        if self.against not in ("megatron", "none"):
            raise ValueError(f"against must be megatron or none, got {self.against!r}")


@dataclass(frozen=True)
class GenerateReport:
    """Results of ``phantom generate``.

    Args:
        model: Folder of the model.
        ranks: Number of ranks.
        device: Type of their devices.
        wire: Format in which features travelled between them.
        prompt: The first prompt.
        prompt_tokens: Number of its tokens.
        prompts: All prompts; each has as many rows as the batch, one after the other.
        prompt_lengths: Number of tokens of each prompt.
        texts: Generated text of each row.
        tokens: Generated tokens of each row.
        sampling: How tokens were selected.
        profile: Hardware profile of modelled energy.
        profile_source: Where its watts come from.
        measured: The cost of each model.
    """

    model: str
    ranks: int
    device: str
    wire: WireFormat
    prompt: str
    prompt_tokens: int
    prompts: list[str]
    prompt_lengths: list[int]
    texts: list[str]
    tokens: list[list[int]]
    sampling: Sampling
    profile: str | None
    profile_source: str | None
    measured: dict[str, GenerationCost]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def print_text(text: str) -> None:
    """Write text to stdout and flush it, with a question mark for each character that the encoding lacks. On a terminal
    control characters are escaped.
    """
    text = printable(text) if sys.stdout.isatty() else text
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
