"""Kills at random moments of a training: nothing stays behind, nothing is lost, and what is resumed is equal.

Every training is killed one to three times, resumed after each, and compared with one that nothing happened to: the
losses of every step, and the model's bytes.
"""

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.campaign.processes import Command, kill, start
from tests.campaign.tally import Bad, Tally

TRAINING = "--width 16 --depth 2 --blocks 2 --ghosts 2 --batch 8 --samples 128 --teacher-blocks 2 --teacher-ghosts 2"
EVERY = "--steps 120 --log-every 1 --eval-every 10 --checkpoint-every 3 --seed 3"
SETTINGS = (*TRAINING.split(), *EVERY.split())
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
AT_ONCE = 2  # trainings: they wait and import more than they compute


@dataclass(frozen=True)
class Reference:
    """A training that nothing happened to."""

    seconds: float
    losses: dict[int, tuple[float, float | None]]
    model: dict[str, bytes]


def run(count: int, seed: int, *, frozen: int | None = None, progress: bool = False) -> Tally:
    """Kill trainings ``count`` times, and freeze a rank ``frozen`` times, by default once for every 20 kills."""
    tally, began, done = Tally(), time.monotonic(), 0
    frozen = max(1, count // 20) if frozen is None else frozen
    command = f"python -m tests.campaign --seed {seed} --inputs 0 --kills {count}"
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        root, trainings = Path(folder), _trainings(count, seed)
        references = {ranks: _reference(root, ranks, pool) for ranks in {one[1] for one in trainings}}
        under_way = {
            pool.submit(_training, root / f"training-{number}", ranks, references[ranks], random, kills): (
                f"{command}  # training {number}"
            )
            for number, (random, ranks, kills) in enumerate(trainings)
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


def _trainings(count: int, seed: int) -> list[tuple[Random, int, int]]:
    """Trainings that are killed ``count`` times together: what each draws from, its ranks, and its kills."""
    drawn: list[tuple[Random, int, int]] = []
    while (left := count - sum(kills for _, _, kills in drawn)) > 0:
        random = Random(f"{seed} kill {len(drawn)}")
        drawn.append((random, random.choice((1, 2, 2, 2)), min(left, random.randint(1, 3))))
    return drawn


Problem = tuple[str, str, str]  # kind, case, detail
Outcome = list[tuple[str, list[Problem]]]  # of each attempt of a group


def _training(folder: Path, ranks: int, reference: Reference, random: Random, kills: int) -> Outcome:
    """One training that is killed ``kills`` times and then finished."""
    folder.mkdir()
    out, resume, outcome = folder / "run", False, Outcome()
    for _ in range(kills):
        how = random.choices(list(HOW), WEIGHTS)[0]
        if ranks == 1 and how == "rank killed":
            how = "launcher killed"
        after = random.uniform(0.0, 1.1) * reference.seconds
        command = _start(folder, out, ranks, resume)
        outcome.append((how, [*_killed(command, how, ranks, after)]))
        resume = (out / "config.json").is_file()
    outcome.append(("resumed", [*_finished(folder, out, ranks, reference)]))
    shutil.rmtree(folder)
    return outcome


def _start(folder: Path, out: Path, ranks: int, resume: bool) -> Command:
    return start(folder, "train", "--out", out, *SETTINGS, "--ranks", ranks, *(["--resume"] if resume else []))


def _killed(command: Command, how: str, ranks: int, after: float) -> Iterator[Problem]:
    """Kill a training after some seconds; what is wrong with how it ended."""
    target, number, codes = HOW[how]
    case = f"{how} after {after:.2f} s on {ranks} ranks"
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
    elif alive and hit and code not in (*codes, 0, *((2,) if "is complete" in command.stderr else ())):
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


def _finished(folder: Path, out: Path, ranks: int, reference: Reference) -> Iterator[Problem]:
    """Resume a training until it is done, and compare it."""
    case = f"resumed on {ranks} ranks"
    command = _start(folder, out, ranks, resume=True)
    code = command.wait()
    if code == 2 and not [*out.glob("checkpoints/step-*")]:  # killed before anything was there
        command = _start(folder, out, ranks, resume=False)
        code = command.wait()
    complete = code == 2 and "is complete" in command.stderr
    if code != 0 and not complete:
        yield "lost", case, f"exit code {code}: {command.stderr[-800:]}"
        return
    if left := command.left_behind():
        yield "orphan", case, f"{len(left)} processes are left after 15 s"
    litter = [path.name for path in out.rglob(".writing-*")]
    if litter:
        yield "lost", case, f"unfinished files are left: {litter}"
    found = _read(out, 0.0)
    if found.losses.keys() != reference.losses.keys():
        yield (
            "lost",
            case,
            f"steps that one has logged and the other not: {found.losses.keys() ^ reference.losses.keys()}",
        )
    for step in found.losses.keys() & reference.losses.keys():
        (loss, held_out), (right, right_held_out) = found.losses[step], reference.losses[step]
        if loss != right or (right_held_out is not None and held_out != right_held_out):  # a signal evaluates once more
            yield "wrong numbers", case, f"step {step}: {loss}, {held_out} and not {right}, {right_held_out}"
            break
    if found.model != reference.model:
        names = [name for name, data in reference.model.items() if found.model.get(name) != data]
        yield "wrong numbers" if found.model else "lost", case, f"the model differs in {names}"


def _reference(folder: Path, ranks: int, pool: ThreadPoolExecutor) -> Reference:
    """The slowest of as many trainings as there are at once later, so that kills come until the end of one."""

    def finished(number: int) -> Reference:
        out, began = folder / f"reference-{ranks}-{number}", time.monotonic()
        command = _start(folder, out, ranks, resume=False)
        code, seconds = command.wait(), time.monotonic() - began
        if code != 0:
            raise RuntimeError(f"the training without a kill ended with {code}: {command.stderr}")
        return _read(out, seconds)

    return max(pool.map(finished, range(AT_ONCE)), key=lambda reference: reference.seconds)


def _read(out: Path, seconds: float) -> Reference:
    """What a finished training has left."""
    losses = {}
    for line in (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else ():
        record = json.loads(line)
        losses[record["step"]] = (record["loss"], record.get("eval_loss"))
    model = {path.name: path.read_bytes() for path in sorted((out / "model").glob("*")) if path.is_file()}
    return Reference(seconds, losses, model)


def _frozen(folder: Path, random: Random) -> Outcome:
    return [("frozen rank", [*_freeze(folder, random)])]


def _freeze(folder: Path, random: Random) -> Iterator[Problem]:
    """Stop one rank: the error must name it, and nothing may stay behind."""
    out, rank = Path(tempfile.mkdtemp(dir=folder)) / "run", random.randrange(2)
    case = f"rank {rank} frozen"
    settings = [*SETTINGS, "--steps", "1000000", "--ranks", 2, "--timeout", 6]
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
    elif f"rank {rank} did not answer" not in command.stderr:
        yield "message", case, f"does not name the rank after {seconds:.0f} s: {command.stderr[-500:]}"
    if "Traceback" in command.stderr:
        yield "traceback", case, command.stderr[-1500:]
