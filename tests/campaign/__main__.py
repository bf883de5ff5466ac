"""``python -m tests.campaign``: run the campaign, and count what was tried, clean and bad."""

import argparse
import random
import signal
import sys
import time

from tests.campaign import inputs, kills
from tests.campaign.tally import Tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=25, help="processes to kill or stop at random moments")
    parser.add_argument("--inputs", type=int, default=1_000, help="malformed inputs to try")
    parser.add_argument("--seed", type=int, help="the same seed makes the same cases; random unless given")
    parser.add_argument("--first", type=int, default=0, help="number of the first malformed input")
    options = parser.parse_args()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background commands ignore it
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # folders are removed
    start, tally = time.monotonic(), Tally(progress=True)
    inputs.run(tally, options.inputs, seed, options.first)
    kills.run(tally, options.kills, seed)
    seconds = time.monotonic() - start
    print(f"\n{tally.table()}\n\n{seconds:.0f} s, seed {seed}")
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
