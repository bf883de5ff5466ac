"""Emulated hosts: network namespaces on this machine, joined by links with the rate of a cluster's.

Processes on different hosts reach each other through their links alone; processes on one host through loopback. The
namespaces have no names and belong to the descriptors that a `Hosts` object and its processes hold, so that nothing is
left when they have ended, even by SIGKILL.

Only a process with a single thread may enter a user namespace, so this file also runs as a script: ``hosts.py FD
NETWORK`` makes the namespaces and sends their descriptors through the socket FD.
"""

import ctypes
import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phantom_parallel.utils.network import Network

INTERFACE = "eth0"
_SECONDS = 30.0  # for making the namespaces, which takes less than one
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_ROOT = 0x10000  # handle of the queue that limits the rate
# What may pass at once after a pause, as time of the link; at least one packet. Timers are late by a tenth of a
# millisecond or more, and what a link has not sent by then beyond the burst is lost for its rate.
_BURST_SECONDS = 5e-4
_QUEUE_BYTES = 1 << 26  # before a packet is dropped: networks of clusters do not drop, they make senders wait
_MARGIN = 100  # bytes of a frame around its packet, and for rounding: a frame larger than the burst is dropped
# Connections keep their windows between steps, and queue no more than a few packets before the link: an answer that
# waits behind a megabyte of the other direction would slow both down, which cards of clusters avoid.
_TCP = {"tcp_slow_start_after_idle": 0, "tcp_limit_output_bytes": 1 << 16}
_FAST = 5e8  # bits a second; from here on, packets of 9,000 bytes, as clusters have them


class Hosts:
    """The namespaces of a network, as a context; OSError says what would help if the system does not allow them."""

    def __init__(self, network: "Network") -> None:
        if sys.platform != "linux":
            raise OSError(f"emulated hosts are network namespaces of Linux, and this is {sys.platform}: omit --hosts")
        self.network = network
        self._switch, *rest = _request_namespaces(network)
        self._namespaces, self._user = rest[: network.hosts], rest[network.hosts :]

    def descriptors(self, host: int) -> tuple[int, ...]:
        """What a process needs to enter a host: its network namespace, and a user namespace to enter before, if any."""
        return (self._namespaces[host], *self._user)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in (self._switch, *self._namespaces, *self._user):
            os.close(descriptor)


def why_unavailable() -> str | None:
    """Why this system cannot emulate hosts, in one line; None if it can."""
    from phantom_parallel.utils.network import Network

    try:
        with Hosts(Network(hosts=1, link="100mbit", rate=1e8)):
            return None
    except OSError as error:
        return str(error)


def _request_namespaces(network: "Network") -> list[int]:
    """Descriptors of the switch, the hosts, and a user namespace if this process is not privileged."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        layout = json.dumps({name: getattr(network, name) for name in ("hosts", "rate", "inside")})
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), layout]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        theirs.close()
        try:
            ours.settimeout(_SECONDS)
            answer, descriptors, _, _ = socket.recv_fds(ours, 1 << 16, network.hosts + 2)
        except OSError as error:
            raise OSError(f"the network namespaces of emulated hosts could not be made: {error}") from None
        finally:
            process.kill()
            process.wait()
    if answer != b"ok":
        raise OSError(answer.decode() or "the network namespaces of emulated hosts could not be made: see the error")
    return descriptors


def _main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            descriptors = build(json.loads(sys.argv[2]))
        except OSError as error:
            channel.sendall(str(error).encode())
        else:
            socket.send_fds(channel, [b"ok"], descriptors)


def build(network: dict[str, Any]) -> list[int]:
    """Make the namespaces and their links: descriptors of the switch, the hosts, and a user namespace if need be."""
    try:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError
    except ImportError:
        raise OSError("emulated hosts need the package pyroute2: pip install 'phantom-parallel[hosts]'") from None
    user = _become_privileged()
    namespaces = []
    for _ in range(network["hosts"] + 1):
        _call("unshare", _CLONE_NEWNET)
        namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
    switch, *hosts = namespaces
    try:
        enter_namespace(switch, _CLONE_NEWNET)
        with IPRoute() as ip:
            _make_bridge(ip, hosts, network["rate"])
        for index, host in enumerate(hosts):
            enter_namespace(host, _CLONE_NEWNET)
            with IPRoute() as ip:
                _configure_host(ip, index, network)
    except NetlinkError as error:
        raise OSError(f"this kernel lacks what emulated hosts need (veth, bridge and sch_tbf): {error}") from None
    return [switch, *hosts, *user]


def enter_namespace(descriptor: int, kind: int = 0) -> None:
    """Move this thread into a namespace."""
    _call("setns", descriptor, kind)


def _become_privileged() -> list[int]:
    """Enter a new user namespace if this process may not make network namespaces. Returns its descriptor, if so."""
    try:
        _call("unshare", _CLONE_NEWNET)
        return []
    except OSError as error:
        if error.errno != errno.EPERM:
            raise OSError(f"this system cannot make network namespaces ({error.strerror})") from None
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", _CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        _call("unshare", _CLONE_NEWNET)
    except OSError as error:
        raise OSError(
            f"this system does not allow network namespaces for this user ({error.strerror}): run as root, allow user "
            "namespaces, or give the container SYS_ADMIN and NET_ADMIN (docs/cluster.md); or leave out --hosts"
        ) from None
    return [os.open("/proc/self/ns/user", os.O_RDONLY)]


def _make_bridge(ip: Any, hosts: list[int], rate: float | None) -> None:
    """In the switch's namespace: a bridge, and a pair of interfaces for each host."""
    ip.link("add", ifname="bridge", kind="bridge")
    bridge = ip.link_lookup(ifname="bridge")[0]
    ip.link("set", index=bridge, state="up", mtu=_mtu(rate))
    for index, host in enumerate(hosts):
        ip.link("add", ifname=f"host{index}", kind="veth", peer={"ifname": INTERFACE, "net_ns_fd": host})
        port = ip.link_lookup(ifname=f"host{index}")[0]
        ip.link("set", index=port, master=bridge, state="up", mtu=_mtu(rate))
        _limit(ip, port, rate, _mtu(rate))


def _configure_host(ip: Any, index: int, network: dict[str, Any]) -> None:
    """In a host's namespace: its address, and the limits of its link and of its loopback interface."""
    for name, value in _TCP.items():
        Path(f"/proc/sys/net/ipv4/{name}").write_text(str(value))
    rate, inside = network["rate"], network["inside"]
    loopback, link = ip.link_lookup(ifname="lo")[0], ip.link_lookup(ifname=INTERFACE)[0]
    ip.link("set", index=loopback, state="up", **({"mtu": 9000} if inside else {}))
    ip.addr("add", index=link, address=address(index), prefixlen=16)
    ip.link("set", index=link, state="up", mtu=_mtu(rate))
    _limit(ip, loopback, inside, 9000)
    _limit(ip, link, rate, _mtu(rate))


def address(host: int) -> str:
    """The address of a host, inside the namespaces only."""
    return f"10.78.{host // 250}.{host % 250 + 1}"


def _limit(ip: Any, interface: int, rate: float | None, mtu: int) -> None:
    """Limit what leaves an interface, if there is a rate, in bits a second."""
    if rate is not None:
        settings = {"rate": round(rate / 8), "burst": burst_bytes(rate, mtu), "limit": _QUEUE_BYTES}
        ip.tc("add", "tbf", index=interface, handle=_ROOT, **settings)


def burst_bytes(rate: float, mtu: int | None = None) -> int:
    """Bytes that pass at once through an idle link of so many bits a second."""
    return max((mtu or _mtu(rate)) + _MARGIN, round(rate / 8 * _BURST_SECONDS))


def _mtu(rate: float | None) -> int:
    return 1500 if rate is not None and rate < _FAST else 9000


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library that Python 3.11 does not have."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    _main()
