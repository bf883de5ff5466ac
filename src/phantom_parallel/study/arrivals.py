"""Requests that arrive one by one at a server, by times that were measured: the arrivals are simulated, the times of a
prompt and of a token are not.

The server takes those that wait, in the order of their arrival and up to a batch of them, and answers them together
before it takes the next. A batch that is not full takes as long as a full one, and a prompt time by its length.
"""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phantom_parallel.utils.files import read_text

COLUMNS = ("seconds", "prompt_tokens", "output_tokens")


class Request(NamedTuple):
    """When a request arrives, the tokens of its prompt, and those of its answer."""

    seconds: float
    prompt: int
    tokens: int


class Phase(NamedTuple):
    """Measured seconds of a prompt or of a token of a whole batch, and joules of all ranks."""

    seconds: float
    joules: float


def poisson(rate: float, count: int, prompt: int, tokens: int, seed: int) -> list[Request]:
    """``count`` equal requests that arrive at random, ``rate`` a second in the mean."""
    times = np.random.default_rng(seed).exponential(1 / rate, count).cumsum()
    return [Request(float(seconds), prompt, tokens) for seconds in times]


def read_trace(path: Path) -> list[Request]:
    """Requests of a CSV file with the columns of `COLUMNS`, in the order of their seconds."""
    try:
        rows = csv.DictReader(read_text(path).splitlines())
        requests = [Request(float(row["seconds"]), *(int(row[name]) for name in COLUMNS[1:])) for row in rows]
    except OSError as error:
        raise ValueError(f"the trace {path} is not readable: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a CSV file with the columns {', '.join(COLUMNS)}: {error!r}") from None
    if not requests or min(min(request) for request in requests) < 0 or min(each.tokens for each in requests) < 1:
        raise ValueError(f"{path} must have at least one request, times from 0 on, and answers of at least one token")
    return sorted(requests)


def serve(
    requests: Sequence[Request], batch: int, prompt: int, prefill: Phase, token: Phase, idle_watts: float
) -> dict[str, Any]:
    """Fields of `results.Run`: latencies, the share of time without a request until the last answer, and the energy of
    a token with that of the idle time. ``prefill`` is that of ``prompt`` tokens.
    """
    clock = busy = joules = 0.0
    first: list[float] = []
    whole: list[float] = []
    while len(whole) < len(requests):
        start = max(clock, requests[len(whole)].seconds)
        taken = [each for each in requests[len(whole) : len(whole) + batch] if each.seconds <= start]
        length, steps = max(each.prompt for each in taken) / prompt, max(each.tokens for each in taken) - 1
        ready = start + length * prefill.seconds
        first += [ready - each.seconds for each in taken]
        whole += [ready + (each.tokens - 1) * token.seconds - each.seconds for each in taken]
        clock = ready + steps * token.seconds
        busy += clock - start
        joules += length * prefill.joules + steps * token.joules
    idle = clock - busy
    percentiles = {f"latency_p{each}": float(np.percentile(whole, each)) for each in (50, 95, 99)}
    return percentiles | {
        "first_token_p95": float(np.percentile(first, 95)),
        "idle_share": idle / clock if clock else math.nan,
        "served_joules_per_token": (joules + idle_watts * idle) / sum(each.tokens for each in requests),
    }
