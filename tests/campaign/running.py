"""One case in this process: how it is run, and what may be wrong with its outcome."""

import contextlib
import io
import json
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.campaign.cases import Case

CPU_SECONDS = 20  # that a case may take
MOST_BYTES = 1 << 30  # that a case may take
ADDRESS_SPACE = 6 << 30  # beyond what is mapped before the first case
MOST_CHARACTERS = 3_000  # of a message
OUTPUT = re.compile(r"\b(?:nan|inf|NaN|Infinity)\b")


class _Accepted(BaseException):
    """The command would start ranks now: its options and files are valid."""


class _OutOfTime(BaseException):
    """The case has used up its processor time."""


def prepare_process() -> None:
    """Import everything once, then limit the memory of this process."""
    import torch

    import phantom_parallel.report.html  # noqa: F401  imports matplotlib
    from phantom_parallel.distributed import launch

    torch.set_num_threads(1)
    global _launch_check
    _launch_check = launch._check_main_is_imported
    signal.signal(signal.SIGPROF, _out_of_time)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def problems(case: Case, folder: Path) -> list[tuple[str, str]]:
    """Run a case; what is wrong with its outcome, as kinds and details."""
    from phantom_parallel.cli import main as program

    out, err, found = io.StringIO(), io.StringIO(), list[tuple[str, str]]()
    code: Any = None
    os.chdir(folder)
    os.environ |= {"PHANTOM_PROFILES": str(folder / "profiles"), "XDG_CACHE_HOME": str(folder / "cache")}
    before = _resident(reset=True)
    with _launching(case.runs), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limited():
        try:
            code = program.main(list(case.arguments))
        except SystemExit as error:
            code = 0 if error.code is None else error.code
        except _Accepted:
            code = "accepted"
        except _OutOfTime:
            return [("hang", f"more than {CPU_SECONDS} s of processor time at {_place(sys.exc_info()[2])}")]
        except MemoryError:
            found.append(("memory", _last_lines(traceback.format_exc())))
        except BaseException:
            found.append(("traceback", _last_lines(traceback.format_exc())))
    os.chdir("/")
    grown = _resident() - before
    if grown > MOST_BYTES:
        found.append(("memory", f"grew by {grown / 2**20:.0f} MiB"))
    return found or [*_outcome(case, code, out.getvalue(), err.getvalue())]


def _outcome(case: Case, code: Any, out: str, err: str) -> Iterator[tuple[str, str]]:
    if "Traceback (most recent call last)" in err + out:
        yield "traceback", _last_lines(err)
    elif code == "accepted":
        return
    elif code == 0:
        if case.must_refuse:
            yield "wrong numbers", "accepted, although the tensors are not those that were written"
        if case.prints_json:
            yield from _not_json(case, out)
        yield from _not_numbers(case, out)
        if case.same_function is not None:
            yield from _other_function(*case.same_function)
    elif code == 1 and case.may_diverge and "loss" in err:
        return
    elif code != 2:
        yield "exit code", f"{code}: {_last_lines(err)}"
    elif not err.strip():
        yield "message", "exit code 2 without a message"
    elif len(err) > MOST_CHARACTERS + 4 * sum(map(len, case.arguments)):  # options are repeated as they were given
        yield "message", f"a message of {len(err):,} characters: {err[:200]}"


def _not_json(case: Case, out: str) -> Iterator[tuple[str, str]]:
    """What is wrong with a report in JSON: it must be valid, and a training must have losses."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    try:
        found = json.loads(out, parse_constant=refuse)
        if case.arguments[0] == "train" and None in (found["loss"], found["eval_loss"]):
            yield "wrong numbers", f"a training without a loss: {out[:200]}"
    except ValueError as error:
        yield "output", f"{error}: {out[:200]}"


def _not_numbers(case: Case, out: str) -> Iterator[tuple[str, str]]:
    """Numbers that are none, in what a reader sees."""
    for path in case.written:
        text = path.read_text() if path.is_file() else ""
        text = re.sub(r"<svg.*?</svg>|<script.*?</script>|<style.*?</style>|data:[^\"']*", "", text, flags=re.DOTALL)
        if shown := OUTPUT.search(text):
            yield "output", f"{path.name} shows {shown[0]}: ...{text[max(0, shown.start() - 60) : shown.end() + 20]}"
    if not case.prints_json and (shown := OUTPUT.search(out)):
        yield "output", f"prints {shown[0]}: ...{out[max(0, shown.start() - 60) : shown.end() + 20]}"


def _other_function(pretrained: Path, imported: Path) -> Iterator[tuple[str, str]]:
    """A difference between the logits of transformers and those of the imported model."""
    import torch

    from phantom_parallel import load_model

    ours = load_model(imported)
    tokens = torch.arange(min(7, ours.config.context))[None]
    try:
        import transformers

        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                pretrained, dtype=torch.float32, trust_remote_code=False
            )
            expected = theirs(tokens).logits
    except Exception:  # it is not installed, or refuses these settings as well: there is no reference
        return
    if not torch.allclose(ours.logits(tokens), expected, atol=1e-4):
        yield "wrong numbers", f"logits differ by {(ours.logits(tokens) - expected).abs().max():.2g}"


@contextlib.contextmanager
def _launching(runs: bool) -> Iterator[None]:
    """Without ``runs``, a command that would start ranks ends there."""
    from phantom_parallel.distributed import launch

    def accepted() -> None:
        raise _Accepted

    launch._check_main_is_imported = _launch_check if runs else accepted
    try:
        yield
    finally:
        launch._check_main_is_imported = _launch_check


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _out_of_time(number: int, frame: Any) -> None:
    raise _OutOfTime


def _resident(*, reset: bool = False) -> int:
    """Most bytes in memory since the last reset; with ``reset``, those in memory now."""
    if reset:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) << 10 if found else 0


def _place(trace: Any) -> str:
    return "; ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(trace)[-6:])


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip().startswith("File ")]
    return " | ".join([*lines[-3:], text.strip().splitlines()[-1][:300] if text.strip() else ""])
