"""Listening TCP sockets of processes, and processes that inherited a variable, both from /proc."""

import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK = "PHANTOM_TEST_MARK"  # a variable of processes that a test has started
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
GONE_SECONDS = 15.0  # in which ranks must be gone after their launcher
_LISTEN = "0A"


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """Local addresses that any of these processes listens on."""
    inodes = {inode for pid in pids for inode in _sockets_of(pid)}
    return {address for inode, address in _listening().items() if inode in inodes}


def processes_with(variable: str, value: str) -> list[int]:
    """Processes that have this variable in their environment: it marks those that a test has started."""
    marked, entry = [], f"{variable}={value}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state = (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z" and entry in (path / "environ").read_bytes().split(b"\0"):
                marked.append(int(path.name))
        except OSError:
            continue
    return marked


def left_over(mark: str) -> list[int]:
    """Processes with this mark, but this one, that have not ended after ``GONE_SECONDS``."""
    end = time.monotonic() + GONE_SECONDS
    while (left := [pid for pid in processes_with(MARK, mark) if pid != os.getpid()]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _sockets_of(pid: int) -> set[int]:
    targets = []
    with suppress(OSError):  # the process has ended, or closed one
        targets = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_socket()]
    return {int(target[8:-1]) for target in targets if target.startswith("socket:[")}


def _listening() -> dict[int, str]:
    addresses = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == _LISTEN:
                words = bytes.fromhex(fields[1].split(":")[0])
                address = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))  # little-endian words
                addresses[int(fields[9])] = socket.inet_ntop(family, address)
    return addresses
