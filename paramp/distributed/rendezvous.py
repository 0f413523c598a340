"""How ranks find each other: the store that rank 0 or the launcher hosts, and a meeting of all ranks in it."""

import contextlib
import os
import queue
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs only

from ..base.errors import LaunchError
from ..base.torch_internals import expect

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
    except (OSError, UnicodeError) as error:  # UnicodeError: a part between two dots is empty or too long
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(
            f"launch: {socket.gethostname()} cannot resolve the host {host!r} ({reason}); "
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


def meet(store: Store, rank: int, world_size: int) -> Store:
    """A part of ``store`` that only this world's ranks share.

    A launcher's store outlives the processes that it restarts, and their entries must not be taken for this world's.
    So each rank writes a random token. Rank 0 publishes the tokens that it finds, under a new name each time one has
    changed, until every rank has confirmed that its token is among them. Raises LaunchError if a rank does not join
    in time. A world of one rank meets nobody, and is not counted: other ranks of this process's next world do not know
    of it.
    """
    global _num_meetings
    if world_size == 1:
        return PrefixStore(f"paramp/alone/{secrets.token_hex(8)}", store)
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
