"""Kills at random moments of commands: nothing stays behind, nothing is lost, and what is resumed is equal.

Every command is killed one to three times, resumed after each, and compared with one that nothing happened to: a
training by the losses of every step and the model's bytes, see `jobs`.
"""

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign.artefacts import Artefacts, make_artefacts
from tests.campaign.jobs import FFN, OPTIONAL, STEPS, Job, draw, training
from tests.campaign.processes import Command, kill, start
from tests.campaign.tally import Bad, Tally

# What is sent to whom, and the exit codes that are right then. Signals that end a process give shells 128 + number.
HOW: dict[str, tuple[str, signal.Signals, tuple[int, ...]]] = {
    "launcher killed": ("launcher", signal.SIGKILL, (-9,)),
    "rank killed": ("rank", signal.SIGKILL, (1,)),
    "all killed": ("all", signal.SIGKILL, (-9,)),
    "SIGINT": ("launcher", signal.SIGINT, (130, -2)),
    "SIGTERM": ("launcher", signal.SIGTERM, (143, -15)),
    "SIGINT twice": ("twice", signal.SIGINT, (130, -2)),
}
WEIGHTS = (4, 3, 2, 2, 2, 1)
AT_ONCE = 2  # commands: they wait and import more than they compute


@dataclass(frozen=True)
class Reference:
    """A command that nothing happened to: how long it took, and what it left."""

    seconds: float
    left: dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """A command that is killed ``kills`` times."""

    random: Random
    job: Job
    kills: int


def run(count: int, seed: int, *, frozen: int | None = None, others: bool = True, progress: bool = False) -> Tally:
    """Kill commands ``count`` times, and freeze a rank ``frozen`` times, by default once for every 20 kills.

    Args:
        count: Number of kills.
        seed: Seed of the campaign.
        frozen: Number of ranks to freeze.
        others: Whether to kill other commands than trainings of feed-forward networks, too, which need files first.
        progress: Whether to print a line after each command.
    """
    tally, began, done = Tally(), time.monotonic(), 0
    frozen = max(1, count // 20) if frozen is None else frozen
    command = f"python -m tests.campaign --seed {seed} --inputs 0 --kills {count}"
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        root = Path(folder)
        artefacts = make_artefacts(root / "artefacts") if others else None
        attempts = _attempts(count, seed, artefacts)
        references = {
            job.name: _reference(root, job, pool) for job in {one.job.name: one.job for one in attempts}.values()
        }
        under_way = {
            pool.submit(_attempt, root / f"attempt-{number}", one, references[one.job.name]): (
                f"{command}  # attempt {number}"
            )
            for number, one in enumerate(attempts)
        } | {
            pool.submit(_frozen, root, Random(f"{seed} freeze {number}")): f"{command}  # frozen rank {number}"
            for number in range(frozen)
        }
        for future in as_completed(under_way):
            for group, found in future.result():
                tally.add(group, [Bad(group, *one, under_way[future]) for one in found])
                done += group in HOW
            if progress:
                seconds = time.monotonic() - began
                print(f"kills: {done} of {count}, {len(tally.bad)} bad, {seconds:.0f} s", flush=True)
    return tally


def _attempts(count: int, seed: int, artefacts: Artefacts | None) -> list[Attempt]:
    """Commands that are killed ``count`` times together."""
    drawn: list[Attempt] = []
    while (left := count - sum(one.kills for one in drawn)) > 0:
        random = Random(f"{seed} kill {len(drawn)}")
        job = training(random.choice((1, 2, 2, 2))) if artefacts is None else draw(random, artefacts)
        drawn.append(Attempt(random, job, min(left, random.randint(1, 3))))
    return drawn


Problem = tuple[str, str, str]  # kind, case, detail
Outcome = list[tuple[str, list[Problem]]]  # of each attempt of a group


def _attempt(folder: Path, one: Attempt, reference: Reference) -> Outcome:
    """One command that is killed, and then finished."""
    folder.mkdir()
    out, outcome = folder / "run", Outcome()
    for _ in range(one.kills):
        how = one.random.choices(list(HOW), WEIGHTS)[0]
        if one.job.ranks == 1 and how == "rank killed":
            how = "launcher killed"
        after = one.random.uniform(0.0, 1.1) * reference.seconds
        command = _start(folder, out, one.job)
        outcome.append((how, [*_killed(command, how, one.job, after)]))
    outcome.append((f"resumed: {one.job.name}", [*_finished(folder, out, one.job, reference)]))
    shutil.rmtree(folder)
    return outcome


def _start(folder: Path, out: Path, job: Job) -> Command:
    return start(folder, *job.arguments, "--out", out, *(["--resume"] if job.resumes(out) else []))


def _killed(command: Command, how: str, job: Job, after: float) -> Iterator[Problem]:
    """Kill a command after some seconds; what is wrong with how it ended."""
    target, number, codes = HOW[how]
    case = f"{job.name}: {how} after {after:.2f} s"
    time.sleep(after)
    started = command.in_interpreter_start()
    alive = command.process.poll() is None
    hit = _send(command, target, number)
    code = command.wait()
    left = command.left_behind()
    if left:
        yield "orphan", case, f"{len(left)} processes are left after 15 s"
    if code is None:
        yield "hang", case, "the launcher did not end"
    elif alive and hit and code not in (*codes, 0, *((2,) if job.finished in command.stderr else ())):
        yield "exit code", case, f"{code}, expected {codes}: {command.stderr[-500:]}"
    if "Traceback (most recent call last)" in command.stderr and not started:
        yield "traceback", case, command.stderr[-1500:]


def _send(command: Command, target: str, number: signal.Signals) -> bool:
    """Send the signal; whether there was somebody to send it to."""
    if target == "rank":
        ranks = command.ranks()
        for pid in ranks[:1] if int(command.mark, 16) % 2 else ranks[-1:]:
            kill(pid, number)
        return bool(ranks)
    pids = [command.process.pid, *(command.ranks() if target == "all" else ())]
    for pid in pids:
        kill(pid, number)
    if target == "twice":
        time.sleep(0.05)
        kill(command.process.pid, number)
    return True


def _finished(folder: Path, out: Path, job: Job, reference: Reference) -> Iterator[Problem]:
    """Resume a command until it is done, and compare what it left."""
    case = f"{job.name}, resumed"
    command = _start(folder, out, job)
    code = command.wait()
    if code != 0 and not (code == 2 and job.finished in command.stderr):
        yield "lost", case, f"exit code {code}: {command.stderr[-800:]}"
        return
    if left := command.left_behind():
        yield "orphan", case, f"{len(left)} processes are left after 15 s"
    if litter := [path.name for path in folder.rglob(".writing-*")]:
        yield "lost", case, f"unfinished files are left: {litter}"
    found, right = job.read(out), reference.left
    different = [name for name in found if name not in right and not name.startswith(OPTIONAL)]
    if missing := [name for name in right if name not in found]:
        yield "lost", case, f"missing: {missing[:10]}"
    elif different:
        yield "wrong numbers", case, f"more than there should be: {different[:10]}"
    elif wrong := [name for name in right if found[name] != right[name]]:
        shown = "" if isinstance(right[wrong[0]], bytes) else f": {found[wrong[0]]} and not {right[wrong[0]]}"
        yield "wrong numbers", case, f"{', '.join(wrong[:10])}{shown}"


def _reference(folder: Path, job: Job, pool: ThreadPoolExecutor) -> Reference:
    """The slowest of as many runs as there are at once later, so that kills come until the end of one."""

    def finished(number: int) -> Reference:
        out, began = folder / f"reference {job.name} {number}", time.monotonic()
        command = _start(folder, out, job)
        code, seconds = command.wait(), time.monotonic() - began
        if code != 0:
            raise RuntimeError(f"{job.name} without a kill ended with {code}: {command.stderr}")
        return Reference(seconds, job.read(out))

    first, *others = sorted(pool.map(finished, range(AT_ONCE)), key=lambda reference: -reference.seconds)
    for other in others:
        if other.left != first.left:
            raise RuntimeError(f"{job.name} is not the same in two runs")
    return first


def _frozen(folder: Path, random: Random) -> Outcome:
    return [("frozen rank", [*_freeze(folder, random)])]


def _freeze(folder: Path, random: Random) -> Iterator[Problem]:
    """Stop one rank: the error must name it, and nothing may stay behind."""
    out, rank = Path(tempfile.mkdtemp(dir=folder)) / "run", random.randrange(2)
    case = f"rank {rank} frozen"
    settings = [*FFN, *STEPS, "--steps", "1000000", "--ranks", 2, "--timeout", 6]
    command = start(folder, "train", "--out", out, *settings)
    until = time.monotonic() + 300
    while not [*out.glob("checkpoints/step-*")] and time.monotonic() < until and command.process.poll() is None:
        time.sleep(0.05)
    time.sleep(random.uniform(0, 0.5))
    ranks = command.ranks()
    if len(ranks) != 2:
        command.kill_all()
        yield "lost", case, f"there are no two ranks to freeze: {command.stderr[-500:]}"
        return
    kill(ranks[rank], signal.SIGSTOP)
    began = time.monotonic()
    code, seconds = command.wait(300.0), time.monotonic() - began
    if left := command.left_behind():
        yield "orphan", case, f"{len(left)} processes are left after 15 s"
    if code is None:
        yield "hang", case, "no end within 300 s"
    elif code != 1:
        yield "exit code", case, f"{code}, expected 1: {command.stderr[-500:]}"
    elif f"rank {rank} does not run" not in command.stderr:
        yield "message", case, f"does not name the rank after {seconds:.0f} s: {command.stderr[-500:]}"
    if "Traceback" in command.stderr:
        yield "traceback", case, command.stderr[-1500:]
