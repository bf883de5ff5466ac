"""First code of a rank, run as a file by `launch`: ties this process to its launcher before anything heavy is imported.

Usage: ``python -P _bootstrap.py LAUNCHER_PID LIFELINE_FD CHANNEL_FD``. Whatever must happen to a rank before its
imports (limits, namespaces, bindings to cores) belongs into `main`, after `_end_with_launcher`.
"""

import ctypes
import os
import pickle
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, lifeline, channel = (int(word) for word in sys.argv[1:4])
    _end_with_launcher(launcher, lifeline)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the work handles it, a signal ends the rank without a word
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    from multiprocessing.connection import Connection

    connection = Connection(channel)
    try:
        sys.path = pickle.loads(connection.recv_bytes())  # from the launcher, through a socket pair that we inherited
    except EOFError:
        os._exit(1)
    from phantom_parallel.distributed._worker import run

    run(connection)


def _end_with_launcher(launcher: int, lifeline: int) -> None:
    """End this process when the launcher does, however that ends and whatever this process is doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(1)
    threading.Thread(target=_watch, args=(lifeline,), name="lifeline", daemon=True).start()


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: this returns when the launcher's end is closed
    os._exit(1)


if __name__ == "__main__":
    main()
