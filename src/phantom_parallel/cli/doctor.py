"""``phantom doctor``: whether this machine and these ranks compute, exchange, train and fail as they should."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phantom_parallel.cli.exit_codes import FAILED
from phantom_parallel.cli.options import LaunchOptions
from phantom_parallel.distributed.launchers import external_ranks, is_rank_zero, launched_externally
from phantom_parallel.utils.files import read_json, write_json
from phantom_parallel.utils.parsing import choose_from

CHECKS = {  # the functions of these names are in `doctor_checks`
    "facts": "versions, devices, and why these ranks get this device and backend",
    "products": "matrix products of each dtype on every rank's device against the CPU",
    "exchanges": "all-gather, reduce-scatter and all-to-all: exactness, latency, GB/s",
    "overlap": "share of an exchange that a product hides",
    "ffn": "three steps of every strategy of an FFN against one CPU rank",
    "gpt": "three steps of a transformer by phantom and megatron against one CPU rank",
    "blocking": "the steps of ffn with kernels launched one at a time, on accelerators",
    "training": "train, checkpoint, resume to the same weights, and generate",
    "stopped": "a rank is stopped: whether and when it is named",
    "sensors": "energy sensors counted against devices used",
}
SECONDS = 240.0  # after which a check is ended
_OUTPUT = 8_000  # characters of a failed check's output in the file


@dataclass(frozen=True, kw_only=True)
class Options(LaunchOptions):
    """Check this machine: run about ten short checks, each in a process of its own, and print a line for each.

    Run it first on any new machine, and attach the file of --json to a bug report. Under torchrun, srun or mpirun the
    checks run on the ranks that were started, in the current folder, which all of them must see. Checks: facts,
    products, exchanges, overlap, ffn, gpt, blocking, training, stopped, sensors. Exit codes: 0 all passed or were
    skipped, 1 a check failed, 2 invalid option.
    """

    ranks: int | None = None
    """Ranks to check; by default one for each accelerator, 2 without any, or as many as the launcher started."""
    only: str | None = None
    """Run this check alone, in view: with what its ranks print, and without a limit of time."""
    json: Path | None = None
    """File for facts and results, as JSON."""

    def run(self) -> None:
        if self.only is not None and self.only not in CHECKS:
            raise ValueError(f"there is no check {self.only!r}: {choose_from(self.only, CHECKS)}")
        if self.hosts is not None and launched_externally():
            raise ValueError("emulated hosts are for ranks that this command starts itself: leave out --hosts, --link")
        ranks, records = self._ranks(), list[dict[str, Any]]()
        lost = ""  # the check in which ranks of another launcher were lost
        for name in CHECKS if self.only is None else (self.only,):
            started = time.monotonic()
            if lost:
                record: dict[str, Any] = {"status": "skipped", "figure": f"the ranks were lost in {lost}"}
            elif launched_externally() or self.only is not None:
                record = self._check(name, ranks)
                lost = name if "output" in record else ""
            else:
                record = self._in_own_process(name, ranks)
            command = shlex.join(self._command(name, ranks)[3:])
            record = {
                "name": name,
                "seconds": round(time.monotonic() - started, 2),
                "repeat": f"phantom {command}",
            } | record
            records.append(record)
            if is_rank_zero():
                _show(record)
                if self.json is not None:  # after every check: the next may end the process
                    write_json(self.json, _report(records, ranks))
        failed = [record["name"] for record in records if record["status"] == "FAILED"]
        if is_rank_zero() and self.only is None:
            skipped = sum(record["status"] == "skipped" for record in records)
            print(f"{len(failed)} of {len(records)} checks failed, {skipped} skipped", end="\n" if self.json else "; ")
            print("" if self.json else "--json FILE writes what to attach to a report\n", end="")
        if failed:
            raise SystemExit(FAILED)

    def _ranks(self) -> int:
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"ranks must be a positive whole number, got {self.ranks}")
        if self.ranks is not None or launched_externally():
            return self.ranks or external_ranks()
        from phantom_parallel.distributed.process_group import accelerators

        return accelerators()[1] or 2

    def _command(self, name: str, ranks: int) -> list[str]:
        given = {"timeout": 60.0, "device": "auto", "hosts": None, "link": None, "link_delay": "0", "link_loss": "0%"}
        options = {key: getattr(self, key) for key, default in given.items() if getattr(self, key) != default}
        words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        return [
            sys.executable,
            "-m",
            "phantom_parallel.cli.main",
            "doctor",
            "--only",
            name,
            "--ranks",
            str(ranks),
            *words,
        ]

    def _in_own_process(self, name: str, ranks: int) -> dict[str, Any]:
        """The record of a check by a command of its own, which ends with its ranks when its time is up."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "record.json")
            command = [*self._command(name, ranks), "--json", os.fspath(file)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
            try:
                output, _ = process.communicate(timeout=SECONDS)
                reason = f"ended with exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks end with it
                output, _ = process.communicate()
                reason = f"not done after {SECONDS:g} s"
            finally:
                process.kill()
            with suppress(ValueError, OSError):
                record: dict[str, Any] = read_json(file)["checks"][0]
                return record | ({"output": output[-_OUTPUT:]} if record["status"] == "FAILED" else {})
            return {"status": "FAILED", "figure": reason, "output": output[-_OUTPUT:]}

    def _check(self, name: str, ranks: int) -> dict[str, Any]:
        """The record of a check in this process, whose ranks are launched here or are those of another launcher."""
        from phantom_parallel.cli import doctor_checks

        try:
            with self.launching(ranks, announces=False):
                outcome = getattr(doctor_checks, name)(ranks)
        except doctor_checks.Skipped as reason:
            return {"status": "skipped", "figure": str(reason)}
        except Exception as error:
            summary = " ".join(str(error).split()) or type(error).__name__
            return {"status": "FAILED", "figure": summary, "output": traceback.format_exc()[-_OUTPUT:]}
        status = "FAILED" if outcome.problems else "ok"
        return {"status": status, **outcome._asdict()}


def _show(record: dict[str, Any]) -> None:
    """Print a record: a line, and for a failure what is wrong and how to repeat it."""
    figure, problems = record["figure"], record.get("problems", [])
    if record["status"] == "FAILED" and not problems:
        figure, problems = "", [figure]
    print(f"{record['status']:<8}{record['name']:<10}{record['seconds']:6.1f} s  {figure}".rstrip())
    for problem in problems:
        print(f"        {problem}")
    if why := record.get("details", {}).get("why"):
        print(f"        {why}")
    if problems:
        print(f"        repeat it: {record['repeat']}")
    sys.stdout.flush()


def _report(records: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    facts = next((record.get("details") for record in records if record["name"] == "facts"), None)
    return {
        "ranks": ranks,
        "command": ["phantom", *sys.argv[1:]],
        "facts": facts,
        "checks": json.loads(json.dumps(records)),
    }
