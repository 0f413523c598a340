"""Rendezvous: the store through which ranks find each other, and the network interface for gloo.

gloo listens on the address that the machine's own name resolves to. If that is loopback, as on Debian
(``127.0.1.1``), or if the name does not resolve, other machines cannot reach it. :func:`choose_interface` selects the
interface on the route to the other ranks instead. On one machine nothing has to be selected.
"""

import contextlib
import ipaddress
import json
import os
import queue
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs only

from ..base.errors import ConfigError, LaunchError
from ..base.torch_internals import expect
from ..config.schema import Config, flatten

expect("torch.distributed.distributed_c10d")

PASSWORD = "paramp/password"
"""The key of a random text by which ranks recognise the store of their own rank 0."""


def launch_timeout() -> timedelta:
    """How long ranks wait for each other at launch: five minutes, or ``PARAMP_LAUNCH_TIMEOUT`` seconds."""
    text = os.environ.get("PARAMP_LAUNCH_TIMEOUT") or "300"
    try:
        timeout = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        timeout = timedelta(0)
    if timeout <= timedelta(0):
        raise LaunchError(f"launch: PARAMP_LAUNCH_TIMEOUT is {text!r}, expected seconds above 0")
    return timeout


def host_store(port: int) -> TCPStore:
    """Listen on ``port`` (0: a free one) of every address of this machine. Raises LaunchError if it is in use."""
    try:
        return TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=launch_timeout())
    except (DistError, RuntimeError) as error:
        raise LaunchError(
            f"launch: cannot listen on port {port} of {socket.gethostname()}, probably because it is in use; "
            f"choose another port, such as {free_port()}"
        ) from error


def join_store(host: str, port: int) -> TCPStore:
    """Connect to the store that listens at ``host:port``. Raises LaunchError if it does not answer in time."""
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise LaunchError(
            f"launch: {socket.gethostname()} cannot resolve the host {host!r} ({error.strerror}); "
            "pass the name or address at which all machines reach rank 0's"
        ) from None
    timeout = launch_timeout()
    try:
        return _connect(host, port, timeout)
    except (DistError, RuntimeError, TimeoutError) as error:
        raise LaunchError(
            f"launch: no rank 0 answered at {host}:{port} within {timeout.total_seconds():g} s; check that it runs "
            f"there and that no firewall blocks {socket.gethostname()}, or raise PARAMP_LAUNCH_TIMEOUT (seconds)"
        ) from error


def _connect(host: str, port: int, timeout: timedelta) -> TCPStore:
    """The store at ``host:port``. In a thread, because torch waits forever if another program listens there."""
    outcome: queue.SimpleQueue[TCPStore | Exception] = queue.SimpleQueue()

    def connect() -> None:
        try:
            outcome.put(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))
        except Exception as error:
            outcome.put(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        found = outcome.get(timeout=timeout.total_seconds() + 1.0)
    except queue.Empty:
        raise TimeoutError(f"{host}:{port} does not answer") from None
    if isinstance(found, Exception):
        raise found
    return found


def find_store(hosts: Sequence[str], port: int, password: bytes) -> tuple[str, TCPStore]:
    """The first of ``hosts`` at which a store with ``password`` listens, and that store.

    Several machines may have the same address, for example of a container bridge; the password identifies the right
    one. Raises LaunchError if none of them answers.
    """
    deadline = time.monotonic() + launch_timeout().total_seconds()
    patience = min(launch_timeout(), timedelta(seconds=10))
    while True:
        for host in hosts:
            with contextlib.suppress(OSError, DistError, RuntimeError):
                socket.create_connection((host, port), timeout=3.0).close()
                store = _connect(host, port, patience)
                if store.get(PASSWORD) == password:
                    store.set_timeout(launch_timeout())
                    return host, store
        if time.monotonic() > deadline:
            raise LaunchError(
                f"launch: rank 0 listens on port {port} of {', '.join(hosts)}, but {socket.gethostname()} cannot reach "
                "any of them; pass launch_from_openmpi the host at which all machines reach rank 0"
            )
        time.sleep(0.2)


def free_port() -> int:
    """A free TCP port that the system will not assign to an outgoing connection before it is used.

    The system assigns the ports of outgoing connections, of which a job makes hundreds, from one range; if that range
    is known (Linux), this port is outside of it.
    """
    first, last = _ports_of_connections()
    ports = [*range(4096, first), *range(last + 1, 65536)]
    for port in [*random.SystemRandom().sample(ports, min(100, len(ports))), 0]:  # 0: the system chooses
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise LaunchError("launch: this machine has no free TCP port")


def _ports_of_connections() -> tuple[int, int]:
    """The first and last port that the system assigns to connections; all ports if the range is not known."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 0, 65535
    return int(first), int(last)


def own_hosts() -> list[str]:
    """The addresses, except loopback, at which other machines may reach this one, and its host name."""
    addresses = [address for _, address in _interfaces()]
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        addresses += [str(target[0]) for *_, target in found]
    reachable = [address for address in dict.fromkeys(addresses) if not _is_loopback(address)]
    return [*reachable, socket.gethostname()] if reachable else []


def meet(store: Store, rank: int, world_size: int) -> Store:
    """A part of ``store`` that only this world's ranks share.

    A launcher's store outlives the processes that it restarts, and their entries must not be taken for this world's.
    So each rank writes a random token. Rank 0 publishes the tokens that it finds, under a new name each time one has
    changed, until every rank has confirmed that its token is among them. Raises LaunchError if a rank does not join
    in time.
    """
    global _num_meetings
    prefix, token = f"paramp/{_num_meetings}", secrets.token_hex(8)
    store.set(f"{prefix}/here/{rank}", token)
    found = _call(store, prefix, world_size) if rank == 0 else _answer(store, prefix, rank, token, world_size)
    _num_meetings += 1  # only now: ranks that have waited for others in vain meet them at the next call
    return PrefixStore(found, store)


def _call(store: Store, prefix: str, world_size: int) -> str:
    """Rank 0's part of :func:`meet`: the name under which it called all ranks."""
    here = [f"{prefix}/here/{other}" for other in range(world_size)]
    name, tokens = "", [""]
    for _ in _polls(world_size):
        if store.check(here) and (found := read_all(store, here)) != tokens:
            name, tokens = f"{prefix}/{secrets.token_hex(8)}", found
            for other, token in enumerate(tokens):
                store.set(f"{name}/token/{other}", token)
            store.set(f"{prefix}/call", name)
        answers = [f"{name}/{other}" for other in range(1, world_size)]
        if name and (not answers or store.check(answers)):
            store.set(f"{name}/go", "1")
            return name
    missing = [other for other in range(1, world_size) if not store.check([f"{name or prefix + '/here'}/{other}"])]
    raise _not_joined(missing, world_size)


def _answer(store: Store, prefix: str, rank: int, token: str, world_size: int) -> str:
    """The other ranks' part of :func:`meet`: the name under which rank 0 called them."""
    answered = ""
    for _ in _polls(world_size):
        name = _look(store, f"{prefix}/call")
        if name and name != answered and _look(store, f"{name}/token/{rank}") == token:
            store.set(f"{name}/{rank}", "1")
            answered = name
        if name and name == answered and store.check([f"{name}/go"]):
            return name
    raise _not_joined([0], world_size)


def _polls(world_size: int) -> Iterator[None]:
    """Yields until the launch's time-out, with a pause: without it, thousands of ranks would keep the store busy."""
    deadline = time.monotonic() + launch_timeout().total_seconds()
    while time.monotonic() < deadline:
        yield
        time.sleep(0.005 + 2e-5 * world_size)


def _not_joined(missing: list[int], world_size: int) -> LaunchError:
    return LaunchError(
        f"launch: of {world_size} ranks, {', '.join(map(str, missing))} did not join within "
        f"{launch_timeout().total_seconds():g} s; check that they started, or raise PARAMP_LAUNCH_TIMEOUT"
    )


_num_meetings = 0


def _look(store: Store, key: str) -> str:
    """The value at ``key``, empty if the key does not exist yet."""
    return store.get(key).decode() if store.check([key]) else ""


def read_all(store: Store, keys: Sequence[str]) -> list[str]:
    """The values at ``keys``, as soon as all exist; one request, if the store can."""
    values = store.multi_get(list(keys)) if store.has_extended_api() else map(store.get, keys)  # type: ignore[attr-defined]
    return [value.decode() for value in values]


def agree(store: Store, name: str, value: str, rank: int, world_size: int, decide: Callable[[list[str]], str]) -> str:
    """The result of ``decide`` for the ``value`` of every rank, by rank. Every rank calls it, once for each ``name``.

    Rank 0 calls ``decide``; the other ranks read its result only, so that the store is not asked for the square of
    thousands of values.
    """
    keys = [f"{name}/{other}" for other in range(world_size)]
    store.set(keys[rank], value)
    try:
        if rank == 0:
            store.set(f"{name}/agreed", decide(read_all(store, keys)))
        return store.get(f"{name}/agreed").decode()
    except (DistError, RuntimeError) as error:
        lost = _first_missing(store, keys)
        raise LaunchError(
            f"launch: rank {lost} was lost before the ranks had agreed on the {name}; see its error message"
        ) from error


def _first_missing(store: Store, keys: Sequence[str]) -> int:
    """The index of the first of ``keys`` that the store does not have; 0 if it has all, or does not answer."""
    with contextlib.suppress(DistError, RuntimeError):
        return next((index for index, key in enumerate(keys) if not store.check([key])), 0)
    return 0


def agree_on_call(
    function: str, problem: str | None, settings: Mapping[str, Any], place: object = None, model: str = ""
) -> str:
    """What is wrong on some rank with the call of ``function``, or different between ranks; empty if nothing is.

    Every rank of the world calls it before the function's first collective. It uses the store alone, so that a rank
    that calls a function alone, or another one than the others, raises in bounded time.

    Args:
        problem: with this rank's arguments; None: there is none.
        settings: the same on every rank; of JSON's types.
        place: ranks with an equal place have equal models.
        model: describes this rank's.

    Raises:
        LaunchError: a rank did not call any such function within the launch's time-out.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if dist.get_backend() == "fake":  # only this rank runs
        return problem or ""
    state = {"function": function, "problem": problem, "settings": dict(settings), "place": str(place), "model": model}
    try:
        store = meet(dist.distributed_c10d._get_default_store(), rank, world_size)
    except LaunchError as error:
        raise LaunchError(f"{function}: every rank has to call it; {error}") from None
    return agree(store, "call", json.dumps(state), rank, world_size, _first_problem_of_call)


def _first_problem_of_call(texts: list[str]) -> str:
    states = [json.loads(text) for text in texts]
    function = states[0]["function"]
    first_at: dict[str, int] = {}
    for rank, state in enumerate(states):
        if state["function"] != function:
            return f"rank 0 calls {function}, but rank {rank} {state['function']}; call the same function on every rank"
        if state["problem"] is not None:
            return f"rank {rank}: {state['problem']}" if len(states) > 1 else str(state["problem"])
        first = first_at.setdefault(state["place"], rank)
        if state["model"] != states[first]["model"]:
            return (
                f"{function}: the parameters of rank {first} ({states[first]['model']}) have other names, shapes or "
                f"dtypes than those of rank {rank} ({state['model']}); pass the same model on every rank"
            )
    different = first_difference([json.dumps(state["settings"]) for state in states])
    return f"{function}: {different}" if different else ""


OWN_SETTINGS = (
    *("train.data", "train.validation_data", "train.tokenizer"),
    *("train.log_dir", "train.checkpoint_dir", "train.resume"),
)
"""Paths, which may differ from machine to machine."""


def agree_on_config(store: Store, config: Config, rank: int, world_size: int) -> None:
    """Raise on every rank if the ranks' configurations differ, which would train wrongly or hang."""
    difference = agree(store, "config", json.dumps(shared_settings(config)), rank, world_size, first_difference)
    if difference:
        raise ConfigError(difference)


def shared_settings(config: Config) -> dict[str, Any]:
    """The settings of ``config`` that are the same on every rank."""
    return {key: value for key, value in flatten(config).items() if key not in OWN_SETTINGS and key not in config.user}


def first_difference(texts: list[str]) -> str:
    """The first setting that a rank has different from rank 0, as a message; empty if there is none."""
    first = json.loads(texts[0])
    for other, text in enumerate(texts):
        if text == texts[0]:
            continue
        theirs = json.loads(text)
        for key in first | theirs:
            if first.get(key) != theirs.get(key):
                return (
                    f"{key}: rank 0 has {first.get(key)!r}, but rank {other} has {theirs.get(key)!r}; "
                    "give every rank the same configuration"
                )
    return ""


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
