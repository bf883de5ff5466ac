"""Emulated hosts: network namespaces on this machine, joined by links with the rate of a cluster's.

Processes on different hosts reach each other through their links alone; processes on one host through loopback. The
namespaces have no names and belong to the descriptors that a `Hosts` object and its processes hold, so that nothing is
left when they have ended, even by SIGKILL. See `_namespaces` for how they are built.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from phantom_parallel.distributed import _namespaces
from phantom_parallel.utils.network import Network

_SECONDS = 30.0  # for making the namespaces, which takes less than one


class Hosts:
    """The namespaces of a network, until `close`.

    Args:
        network: What to build.

    Raises:
        OSError: If the system does not allow it; the message says what would help.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        if sys.platform != "linux":
            raise OSError(
                f"emulated hosts are network namespaces, which only Linux has, and this is {sys.platform}: "
                "leave out --hosts"
            )
        layout = {name: getattr(network, name) for name in ("hosts", "rate", "inside", "delay", "loss")}
        self._switch, *rest = _build(layout)
        self._namespaces, self._user = rest[: network.hosts], rest[network.hosts :]

    def descriptors(self, host: int) -> tuple[int, ...]:
        """What a process needs to enter a host: its network namespace, and a user namespace to enter before, if any."""
        return (self._namespaces[host], *self._user)

    def unreachable(self) -> list[int]:
        """The hosts that no other host reaches. If no host reaches any other, all of them."""
        arguments = [str(fd) for fd in (*self._namespaces, *self._user)]
        command = [sys.executable, "-P", _namespaces.__file__, "probe", str(len(self._namespaces)), *arguments]
        fds = (*self._namespaces, *self._user)
        try:
            found = subprocess.run(command, pass_fds=fds, capture_output=True, timeout=_SECONDS, check=True)
            return json.loads(found.stdout)
        except (subprocess.SubprocessError, ValueError):
            return []

    def close(self) -> None:
        for descriptor in (self._switch, *self._namespaces, *self._user):
            os.close(descriptor)
        self._namespaces = []

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._namespaces:
            self.close()


def why_unavailable() -> str | None:
    """Why this system cannot emulate hosts, in one line; None if it can."""
    try:
        with Hosts(Network(hosts=1, link="100mbit", rate=1e8)):
            return None
    except OSError as error:
        return str(error)


def _build(layout: dict[str, object]) -> Sequence[int]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-P", _namespaces.__file__, "build", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        theirs.close()
        try:
            ours.settimeout(_SECONDS)
            ours.sendall(json.dumps(layout).encode())
            answer, descriptors, _, _ = socket.recv_fds(ours, 1 << 16, layout_size(layout))
        except OSError as error:
            raise OSError(f"the network namespaces of emulated hosts could not be made: {error}") from None
        finally:
            process.kill()
            process.wait()
    if not answer:
        raise OSError("the network namespaces of emulated hosts could not be made: see the error above")
    if "error" in (found := json.loads(answer)):
        raise OSError(found["error"])
    return descriptors


def layout_size(layout: dict[str, object]) -> int:
    """The largest number of descriptors of a layout: its hosts, the switch and a user namespace."""
    hosts = layout["hosts"]
    assert isinstance(hosts, int)
    return hosts + 2
