"""``python -m tests.campaign``: run the campaign, and count what was tried, clean and bad."""

import argparse
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.campaign import disk, inputs, kills
from tests.campaign.tally import Tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="processes to kill or stop at random moments")
    parser.add_argument("--inputs", type=int, default=10_000, help="malformed inputs to try")
    parser.add_argument("--disks", type=int, default=None, help="full disks to try; by default one for every 10 kills")
    parser.add_argument("--differences", type=int, help="ranks that differ; by default 3 for every kill")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", help="a group of malformed inputs, to try no other")
    parser.add_argument("--out", type=Path, help="JSON file of the counts and every bad case")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background commands ignore it
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # folders are removed
    began, tally = time.monotonic(), Tally()
    if given.inputs:
        tally.join(inputs.run(given.inputs, given.seed, first=given.first, only=given.only, progress=True))
    if given.kills:
        tally.join(kills.run(given.kills, given.seed, progress=True))
    disks = given.kills // 10 if given.disks is None else given.disks
    if disks:
        tally.join(disk.run(disks, given.seed, progress=True))
    differences = 3 * given.kills if given.differences is None else given.differences
    if differences:
        from tests.campaign import disagreement  # imports torch, which would slow every fork before

        tally.join(disagreement.run(differences, given.seed, first=given.first, progress=True))
    seconds = time.monotonic() - began
    print(f"\n{tally.table()}\n\n{seconds:.0f} s, seed {given.seed}")
    if given.out:
        command = " ".join(["python -m tests.campaign", *sys.argv[1:]])
        made = datetime.now(UTC).isoformat(timespec="seconds")
        tally.write(given.out, command=command, made=made, seed=given.seed, seconds=round(seconds))
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
