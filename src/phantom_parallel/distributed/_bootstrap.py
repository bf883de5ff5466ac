"""First code of a rank, run as a file by `launch`: ties this process to its launcher before anything heavy is imported.

Usage: ``python -P _bootstrap.py LAUNCHER_PID LIFELINE_FD CHANNEL_FD [NETWORK_FD [USER_FD]]``. The last two are the
namespaces of the emulated host that the rank is to run on.
"""

import ctypes
import os
import pickle
import signal
import sys
import threading

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def main() -> None:
    launcher, lifeline, channel, *namespaces = (int(word) for word in sys.argv[1:])
    if namespaces:
        _enter_host(*namespaces)
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


def _enter_host(network: int, user: int | None = None) -> None:
    """Move this process to an emulated host. It must have one thread still, and the signal at its launcher's end is
    requested later: a change of user namespace would undo that.
    """
    library = ctypes.CDLL(None, use_errno=True)
    for descriptor, kind in ((user, CLONE_NEWUSER), (network, CLONE_NEWNET)):
        if descriptor is not None:
            if library.setns(descriptor, kind) != 0:
                sys.exit(f"this rank cannot enter its emulated host: {os.strerror(ctypes.get_errno())}")
            os.close(descriptor)
    library.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # a new user namespace would hide the process from its own user


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
