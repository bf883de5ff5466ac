"""What ``phantom generate`` is given and what it reports, for every family that generates text."""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from phantom_parallel.infer.sampling import Sampling
from phantom_parallel.utils.layout import positive

Against = Literal["megatron", "none"]


@dataclass(frozen=True)
class PhaseCost:
    """Prefill or decode. Counts and energies are those of all ranks together, for one token of one row."""

    seconds: float  # of the prompt, or of a step: the median
    seconds_p95: float
    tokens_per_second: float  # over all rows
    flops_per_token: float
    bytes_per_token: float  # that ranks send each other
    joules_per_token: float | None
    provenance: str  # of the joules: counter, integrated_power, modelled or unavailable
    blocked_share: float  # of all ranks' time


@dataclass(frozen=True)
class GenerationCost:
    """One model's generations. ``decode`` is None where one token was asked for, which prefill gives."""

    strategy: str
    ranks: int
    batch: int
    prompt: int  # tokens of a row
    tokens: int  # generated for a row
    turns: int
    parameters: int  # of the whole model
    prefill: PhaseCost
    decode: PhaseCost | None

    @property
    def time_to_first_token(self) -> float:
        """Seconds, the median over turns."""
        return self.prefill.seconds

    @property
    def time_per_token(self) -> float | None:
        """Seconds from a token to the next, the median over steps."""
        return None if self.decode is None else self.decode.seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GenerateConfig:
    """What to go on from, how, and what to measure. ``profile`` is as for `InferConfig`; ``tokens`` are by default 128,
    or as many as the context has room for. With ``against`` both models generate ``turns`` times; alone, once.
    """

    model: Path
    prompt: str | None = None
    prompt_file: Path | None = None
    tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    ranks: int = 1
    batch: int = 1
    against: Against = "none"
    turns: int = 5
    profile: str | None = None

    def __post_init__(self) -> None:
        positive(ranks=self.ranks, batch=self.batch, turns=self.turns)
        if self.tokens is not None:
            positive(tokens=self.tokens)
        for name in ("model", "prompt_file"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(path).absolute())
        if self.against not in ("megatron", "none"):
            raise ValueError(f"against must be megatron or none, got {self.against!r}")


@dataclass(frozen=True)
class GenerateReport:
    """What came out, and what it cost."""

    model: str
    ranks: int
    device: str
    prompt: str
    prompt_tokens: int
    texts: list[str]  # of each row
    tokens: list[list[int]]  # of each row
    sampling: Sampling
    profile: str | None  # whose watts modelled energy takes
    profile_source: str | None
    measured: dict[str, GenerationCost]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def print_text(text: str) -> None:
    """Write text to stdout at once, with a question mark for each character that the terminal does not have."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
