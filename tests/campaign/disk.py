"""Full disks: a training stops with the path and the last good checkpoint, and continues once there is space again."""

import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.campaign.jobs import FFN
from tests.campaign.kills import Problem
from tests.campaign.processes import start
from tests.campaign.tally import Bad, Tally

EVERY = "--log-every 5 --eval-every 50 --checkpoint-every 5 --seed 3"
SETTINGS = (*FFN, "--width", "64", *EVERY.split())
EXIT_CODE = 2  # as for every other thing that is wrong with files
ROOM = 4 << 20  # bytes of the small disk
STEPS = 4_000  # takes longer than it takes to fill the disk


def run(count: int, seed: int, *, progress: bool = False) -> Tally:
    """Fill the disk of ``count`` trainings."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder, _small_disk(Path(folder)) as disk:
        for number in range(count):
            random = Random(f"{seed} disk {number}")
            ranks = 1 + number % 2
            again = f"python -m tests.campaign --seed {seed} --inputs 0 --kills 0 --disks {count}  # disk {number}"
            attempt = _full_disk if disk is not None else _small_files
            found = [*attempt(Path(folder), disk or Path(folder), ranks, random)]
            tally.add("full disk", [Bad("full disk", *one, again) for one in found])
            if progress:
                print(f"disks: {number + 1} of {count}, {len(tally.bad)} bad", flush=True)
    return tally


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of a few megabytes, where this user may mount one."""
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(disk)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield disk if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def _full_disk(folder: Path, disk: Path, ranks: int, random: Random) -> Iterator[Problem]:
    """Fill the disk while a training runs."""
    out, ballast = disk / f"run-{random.randrange(10**9)}", disk / "ballast"
    case = f"{ranks} ranks, disk full"
    command = start(folder, "train", "--out", out, *SETTINGS, "--ranks", ranks, "--steps", STEPS)
    until = time.monotonic() + 300
    while not [*out.glob("checkpoints/step-*")] and time.monotonic() < until and command.process.poll() is None:
        time.sleep(0.02)
    time.sleep(random.uniform(0, 1.0))
    left = random.choice((0, 4096, 20_000, 100_000))
    _fill(ballast, left)
    code = command.wait()
    yield from _stopped(case, code, command.stderr, out)
    ballast.unlink(missing_ok=True)
    yield from _continues(folder, case, out, ranks)
    shutil.rmtree(out, ignore_errors=True)


def _small_files(folder: Path, disk: Path, ranks: int, random: Random) -> Iterator[Problem]:
    """Without a small disk: no file may become larger than a checkpoint needs, after the first checkpoints."""
    out = folder / f"run-{random.randrange(10**9)}"
    case = f"{ranks} ranks, no file above a limit"
    first = start(folder, "train", "--out", out, *SETTINGS, "--ranks", ranks, "--steps", 10)
    if first.wait() != 0:
        yield "lost", case, f"the training ended with {first.process.returncode}: {first.stderr[-500:]}"
        return

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))

    arguments = ["train", "--out", out, *SETTINGS, "--ranks", ranks, "--steps", 40, "--resume"]
    command = start(folder, *arguments, limit=limit)
    yield from _stopped(case, command.wait(), command.stderr, out)
    yield from _continues(folder, case, out, ranks, steps=40)


def _fill(ballast: Path, left: int) -> None:
    """Write to a file until ``left`` bytes are free."""
    free = os.statvfs(ballast.parent)
    size = max(0, free.f_bavail * free.f_frsize - left)
    try:
        with open(ballast, "wb") as file:
            for _ in range(size // 4096 + 1):
                file.write(bytes(4096))
    except OSError:
        pass  # it is full


def _stopped(case: str, code: int | None, stderr: str, out: Path) -> Iterator[Problem]:
    if code is None:
        yield "hang", case, "the training did not end"
    elif code != EXIT_CODE:
        yield "exit code", case, f"{code}, expected {EXIT_CODE}: {stderr[-800:]}"
    if "Traceback (most recent call last)" in stderr:
        yield "traceback", case, stderr[-1500:]
    elif str(out) not in stderr or "checkpoints/step-" not in stderr:
        yield "message", case, f"does not name the path and the last checkpoint: {stderr[-800:]}"


def _continues(folder: Path, case: str, out: Path, ranks: int, steps: int | None = None) -> Iterator[Problem]:
    found = sorted(int(path.name[5:]) for path in out.glob("checkpoints/step-*"))
    last = found[-1] if found else 0
    command = start(
        folder, "train", "--out", out, *SETTINGS, "--ranks", ranks, "--resume", "--steps", steps or last + 10
    )
    if (code := command.wait()) != 0:
        yield "lost", case, f"with space again, exit code {code}: {command.stderr[-800:]}"
    elif litter := [path.name for path in out.rglob(".writing-*")]:
        yield "lost", case, f"unfinished files are left: {litter}"
    elif not (out / "model" / "config.json").is_file():
        yield "lost", case, "there is no model"
