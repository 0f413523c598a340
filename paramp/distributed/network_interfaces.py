"""The network interfaces of this machine, and the one that gloo listens on.

gloo listens on the address that the machine's own name resolves to. If that is loopback, as on Debian
(``127.0.1.1``), or if the name does not resolve, other machines cannot reach it. :func:`choose_interface` selects the
interface on the route to the other ranks instead. On one machine nothing has to be selected.
"""

import contextlib
import ipaddress
import os
import socket
import struct

from torch.distributed import Store  # type: ignore[attr-defined]  # missing in torch's stubs only

from .agreed_arguments import agree


def own_hosts() -> list[str]:
    """The addresses, except loopback, at which other machines may reach this one, and its host name."""
    addresses = [address for _, address in _interfaces()]
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        addresses += [str(target[0]) for *_, target in found]
    reachable = [address for address in dict.fromkeys(addresses) if not _is_loopback(address)]
    return [*reachable, socket.gethostname()] if reachable else []


def choose_interface(store: Store, host: str, rank: int, world_size: int) -> None:
    """Make gloo listen where the ranks of other machines reach this one; no action if all ranks share a machine.

    Sets ``GLOO_SOCKET_IFNAME``, unless it is set. Every rank calls it with the ``host`` at which it reached the store.
    """
    mine = _route_to(host)
    elsewhere = agree(store, "address", mine, rank, world_size, _first_elsewhere)
    if not elsewhere or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    if _is_loopback(mine):  # rank 0's machine, whose name means loopback to itself
        mine = _route_to(elsewhere)
    name = next((name for name, address in _interfaces() if address == mine), None)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _first_elsewhere(addresses: list[str]) -> str:
    """The first of ``addresses`` that other machines can reach; empty if there is none."""
    return next((address for address in addresses if not _is_loopback(address)), "")


def _route_to(host: str) -> str:
    """This machine's address on the route to ``host``, loopback if there is none; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interfaces() -> list[tuple[str, str]]:
    """Names and addresses of this machine's network interfaces that are up; empty on systems other than Linux."""
    found: list[tuple[str, str]] = []
    try:
        import fcntl
    except ImportError:  # pragma: no cover
        return found
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as lines:
        for line in lines:
            digits, _, _, scope, _, name = line.split()
            if scope == "00":  # global; a link-local address is not valid on another machine
                found.append((name, str(ipaddress.ip_address(bytes.fromhex(digits)))))
    return found
