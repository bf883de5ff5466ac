"""Makes the network namespaces of emulated hosts, run as a file by `hosts`, and hands them over as file descriptors.

``python -P _namespaces.py build SOCKET_FD`` reads one JSON message from the socket: hosts, rate, inside, delay, loss.
Its answer is a JSON message with the descriptors of the namespaces: the switch, the hosts, and a user namespace if this
process is not privileged. Namespaces have no names: the kernel removes each, with its interfaces, when the last
descriptor is closed and the last process in it has ended, in whatever way that happens.

``python -P _namespaces.py probe HOSTS FD ...`` prints the hosts that no other host reaches, as JSON.

A process of its own is needed because only one with a single thread may enter a user namespace.
"""

import ctypes
import errno
import fcntl
import json
import os
import selectors
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

_SIOCGIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8913, 0x1, 0x40
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
INTERFACE = "eth0"
ADDRESS = "10.78.{}.{}"  # of a host, inside the namespaces only
_ROOT = 0x10000  # handle of the queue that limits the rate; a queue that delays is its child
# What may pass at once after a pause, as time of the link; at least one packet. Timers are late by a tenth of a
# millisecond or more, and what a link has not sent by then beyond the burst is lost for its rate.
_BURST_SECONDS = 5e-4
_QUEUE_BYTES = 1 << 26  # before a packet is dropped: networks of clusters do not drop, they make senders wait
_MARGIN = 100  # bytes of a frame around its packet, and for rounding: a frame larger than the burst is dropped
# Connections keep their windows between steps, and queue no more than a few packets before the link: an answer that
# waits behind a megabyte of the other direction would slow both down, which cards of clusters avoid.
_TCP = {"tcp_slow_start_after_idle": 0, "tcp_limit_output_bytes": 1 << 16}
_FAST = 5e8  # bits a second; from here on, packets of 9,000 bytes, as clusters have them


class Forbidden(Exception):
    """The system does not allow or support something. The message says what, and what would help."""


def main() -> None:
    if sys.argv[1] == "probe":
        count, *descriptors = (int(word) for word in sys.argv[2:])
        print(json.dumps(unreachable(descriptors[:count], descriptors[count:])))
        return
    with socket.socket(fileno=int(sys.argv[2])) as channel:
        try:
            descriptors = build(json.loads(channel.recv(1 << 16)))
        except Forbidden as error:
            channel.sendall(json.dumps({"error": str(error)}).encode())
        else:
            socket.send_fds(channel, [json.dumps({}).encode()], descriptors)


def build(network: dict[str, Any]) -> list[int]:
    """Make the namespaces and their links. Returns the descriptors of the switch, the hosts, and the user namespace."""
    try:
        import pyroute2  # noqa: F401
    except ImportError:
        raise Forbidden("emulated hosts need the package pyroute2: pip install 'phantom-parallel[hosts]'") from None
    user = _become_privileged()
    switch = _new_namespace()
    hosts = [_new_namespace() for _ in range(network["hosts"])]
    enter(switch, CLONE_NEWNET)
    _make_bridge(hosts, network)
    for index, host in enumerate(hosts):
        enter(host, CLONE_NEWNET)
        _configure_host(index, network)
    return [switch, *hosts, *user]


def unreachable(hosts: list[int], user: list[int], seconds: float = 2.0) -> list[int]:
    """The hosts whose links are down; if none is, those that no other host can connect to."""
    for descriptor in user:
        enter(descriptor, CLONE_NEWUSER)
    servers, waiting, reached, down = [], {}, set(), []
    for index, host in enumerate(hosts):
        enter(host, CLONE_NEWNET)
        servers.append(socket.create_server((address(index), 0)))
        if not _link_is_up(servers[-1]):
            down.append(index)
    if down:
        return down
    with selectors.DefaultSelector() as selector:
        for index, host in enumerate(hosts):
            enter(host, CLONE_NEWNET)
            for other, server in enumerate(servers):
                if other != index:
                    client = socket.socket()
                    client.setblocking(False)
                    if client.connect_ex(server.getsockname()) in (0, errno.EINPROGRESS):
                        selector.register(client, selectors.EVENT_WRITE, other)
                        waiting[client] = other
        end = time.monotonic() + seconds
        while waiting and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                connected = key.fileobj
                assert isinstance(connected, socket.socket)
                selector.unregister(connected)
                del waiting[connected]
                if connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    reached.add(key.data)
    return [index for index in range(len(hosts)) if index not in reached]


def _link_is_up(any_socket: socket.socket) -> bool:
    """Whether the link of the namespace of a socket is up, with a carrier."""
    request = struct.pack("16sH14x", INTERFACE.encode(), 0)
    _, flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
    return flags & (_IFF_UP | _IFF_RUNNING) == _IFF_UP | _IFF_RUNNING


def enter(descriptor: int, kind: int) -> None:
    """Move this thread into a namespace."""
    _call("setns", descriptor, kind)


def _become_privileged() -> list[int]:
    """Enter a new user namespace if this process may not make network namespaces. Returns its descriptor, if so."""
    try:
        _call("unshare", CLONE_NEWNET)
        return []
    except OSError as error:
        if error.errno != errno.EPERM:
            raise Forbidden(f"this system cannot make network namespaces ({error.strerror})") from None
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        _call("unshare", CLONE_NEWNET)
    except OSError as error:
        raise Forbidden(
            f"this system does not allow network namespaces for this user ({error.strerror}): run as root, or allow "
            "user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0), or start the container with --cap-add SYS_ADMIN and "
            "--cap-add NET_ADMIN; without --hosts, ranks run on loopback"
        ) from None
    return [os.open("/proc/self/ns/user", os.O_RDONLY)]


def _new_namespace() -> int:
    try:
        _call("unshare", CLONE_NEWNET)
    except OSError as error:
        raise Forbidden(f"this system cannot make another network namespace ({error.strerror})") from None
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _make_bridge(hosts: list[int], network: dict[str, Any]) -> None:
    """In the switch's namespace: a bridge, and a pair of interfaces for each host."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        _link(ip, "add", ifname="bridge", kind="bridge")
        bridge = ip.link_lookup(ifname="bridge")[0]
        _link(ip, "set", index=bridge, state="up", mtu=_mtu(network["rate"]))
        for index, host in enumerate(hosts):
            _link(ip, "add", ifname=f"host{index}", kind="veth", peer={"ifname": INTERFACE, "net_ns_fd": host})
            port = ip.link_lookup(ifname=f"host{index}")[0]
            _link(ip, "set", index=port, master=bridge, state="up", mtu=_mtu(network["rate"]))
            _limit(ip, port, network["rate"], _mtu(network["rate"]))


def _configure_host(index: int, network: dict[str, Any]) -> None:
    """In a host's namespace: its address, and the limits of its link and of its loopback interface."""
    from pyroute2 import IPRoute

    for name, value in _TCP.items():
        Path(f"/proc/sys/net/ipv4/{name}").write_text(str(value))
    with IPRoute() as ip:
        loopback, link = ip.link_lookup(ifname="lo")[0], ip.link_lookup(ifname=INTERFACE)[0]
        ip.link("set", index=loopback, state="up", **({"mtu": 9000} if network["inside"] else {}))
        ip.addr("add", index=link, address=address(index), prefixlen=16)
        ip.link("set", index=link, state="up", mtu=_mtu(network["rate"]))
        _limit(ip, loopback, network["inside"], 9000)
        _limit(ip, link, network["rate"], _mtu(network["rate"]))
        if network["delay"] or network["loss"]:
            options = {"delay": round(network["delay"] * 1e6), "loss": 100 * network["loss"], "limit": 100_000}
            parent = {"parent": _ROOT + 1} if network["rate"] else {}
            _queue(ip, "netem", link, handle=2 * _ROOT, **parent, **options)


def address(host: int) -> str:
    """The address of a host in the emulated network."""
    return ADDRESS.format(host // 250, host % 250 + 1)


def _limit(ip: Any, interface: int, rate: float | None, mtu: int) -> None:
    """Limit what leaves an interface, if there is a rate, in bits a second."""
    if rate is not None:
        burst = max(mtu + _MARGIN, round(rate / 8 * _BURST_SECONDS))
        _queue(ip, "tbf", interface, handle=_ROOT, rate=round(rate / 8), burst=burst, limit=_QUEUE_BYTES)


def _mtu(rate: float | None) -> int:
    return 1500 if rate is not None and rate < _FAST else 9000


def _link(ip: Any, command: str, **options: Any) -> None:
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        ip.link(command, **options)
    except NetlinkError as error:
        kind = options.get("kind", "network interfaces")
        raise Forbidden(f"this kernel cannot make the interface ({kind}) that emulated hosts need: {error}") from None


def _queue(ip: Any, kind: str, interface: int, **options: Any) -> None:
    from pyroute2.netlink.exceptions import NetlinkError

    what = "limits the rate of a link" if kind == "tbf" else "delays and loses packets"
    instead = "use --link none" if kind == "tbf" else "leave out --link-delay and --link-loss"
    try:
        ip.tc("add", kind, index=interface, **options)
    except NetlinkError as error:
        raise Forbidden(
            f"this kernel does not have the queueing discipline {kind}, which {what} ({error}): "
            f"load the module sch_{kind}, or {instead}"
        ) from None


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library that Python 3.11 does not have."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
