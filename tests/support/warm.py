"""Python processes that start with torch and paramp imported: a test run starts hundreds, and an import costs seconds.

:func:`start` writes a program ``python`` into a folder of the test run's. It takes a command line as Python does, but
has a server that imported torch once fork a process for it, hands over its environment and open files, passes signals
on and ends as that process does. Whatever the process starts with ``sys.executable`` goes the same way.

Two servers take turns by rank, so that the hashes of strings, and with them the order of sets, differ between ranks as
they do otherwise. Command lines with options of the interpreter, those in or with a ``PYTHONPATH`` of another tree, and
all with another ``LD_LIBRARY_PATH`` or with ``PARAMP_TEST_COLD`` set, get an ordinary Python.
``PARAMP_TEST_LIBRARIES`` is an ``LD_LIBRARY_PATH`` that only the launcher of the processes needs.

The workers of pytest-xdist are forked from the servers of the process that started them, and use them.
:func:`bare` is for trees whose package is another one each time: its servers have not imported any, and those of the
tests are forked from it.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import logging
import marshal
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import block_sizes

ROOT = Path(__file__).parents[2]
SHARED = "PARAMP_TEST_SERVERS"
BARE = "PARAMP_TEST_BARE"
SERVERS = 2
AVAILABLE = hasattr(os, "pidfd_open")  # Linux
PRELOADED = ["torch._dynamo", "torch.utils.data", "numpy", "safetensors.torch", "pytest", "tomllib"]
PRELOADED += [f"torch.distributed.{name}" for name in ("tensor.parallel", "pipelining", "checkpoint", "run")]
PRELOADED += [
    f"torch.distributed.elastic.{name}"
    for name in ("agent.server.local_elastic_agent", "rendezvous.c10d_rendezvous_backend", "rendezvous.registry")
]
OPTIONAL = ["rich.live", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2", "peft"]
OPTIONAL += ["torchao.float8", "transformers.trainer", "lightning.pytorch"]
"""Those that several tests import on each of their ranks."""

CLIENT = """#!{python} -IS
import _signal, _socket, marshal, os, sys  # signal and socket take as long to import as Python to start
words = sys.argv[1:]
plain = words[1:] if words[:1] == ["-u"] else words
def cold():
    os.execv({python!r}, [{python!r}, *words])
if not plain or (plain[0][:1] == "-" and plain[0] not in ("-c", "-m")) or "--multiprocessing-fork" in words:
    cold()
def folders(path):
    return {{os.path.realpath(one) for one in path.split(":") if one}}  # Open MPI's mpirun adds its own a second time
known = map(folders, [{libraries!r}, os.environ.get("PARAMP_TEST_LIBRARIES", "")])
if os.environ.get("PARAMP_TEST_COLD") or folders(os.environ.get("LD_LIBRARY_PATH", "")) not in known:
    cold()
for tree in [".", *os.environ.get("PYTHONPATH", "").split(":")] if {package!r} else []:
    if os.path.isdir(f"{{tree}}/paramp") and not os.path.samefile(f"{{tree}}/paramp", {package!r}):
        cold()
rank = os.environ.get("RANK", "")
server = bin(int(rank)).count("1") % {servers} if rank.isdecimal() else 0
files = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd < 3 or os.path.exists(f"/proc/self/fd/{{fd}}")]
connection = _socket.socket(_socket.AF_UNIX)
try:
    connection.connect(os.path.join({folder!r}, str(server)))
except OSError:
    cold()
job = marshal.dumps((words, dict(os.environ), os.getcwd(), os.getpid(), os.getppid(), files))
rights = b"".join(file.to_bytes(4, sys.byteorder) for file in files)
connection.sendmsg([len(job).to_bytes(8, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
connection.sendall(job)
pid = int(connection.recv(20))
def forward(number, _):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2):
    _signal.signal(number, forward)
connection.send(b"+")
status = connection.recv(20)
code = os.waitstatus_to_exitcode(int(status)) if status else 1
if code < 0:
    _signal.signal(-code, _signal.SIG_DFL) if -code not in (_signal.SIGKILL, _signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def _new_folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="paramp-python-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def folder() -> Path:
    """Where the programs are: first on the PATH of the commands that the tests run."""
    shared = Path(os.environ.get(SHARED, os.devnull))  # of the process that started this one, for this tree's package
    return shared if (shared / "root").exists() and os.path.samefile(shared / "root", ROOT) else _new_folder()


def python() -> str:
    """The program to start Python with; :func:`start` makes it."""
    return str(folder() / "python") if AVAILABLE and not os.environ.get("PARAMP_TEST_COLD") else sys.executable


@functools.cache
def start() -> None:
    """Start the servers, for the processes that this one starts too. They are ready when torch is imported; until then
    commands wait for them."""
    if python() != sys.executable and not (folder() / "root").exists():
        (folder() / "root").symlink_to(ROOT)
        _start(folder(), python(), str(ROOT / "paramp"))
        os.environ[SHARED] = str(folder())


def bare() -> str:
    """A program that starts Python with all imported but the package. :func:`start` makes servers with it if the
    environment names it as ``PARAMP_TEST_BARE``."""
    place = _new_folder()
    _start(place, sys.executable, "")
    return str(place / "python")


def _start(place: Path, executable: str, package: str) -> None:
    """Servers of processes with ``package`` imported, whose ``sys.executable`` is ``executable``."""
    listeners = [socket.socket(socket.AF_UNIX) for _ in range(SERVERS)]
    for number, listener in enumerate(listeners):
        listener.bind(str(place / str(number)))
        listener.listen(128)
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", block_sizes.VARIABLE)}
    for number, listener in enumerate(listeners):
        process = subprocess.Popen(
            [os.environ.get(BARE, sys.executable), __file__, str(listener.fileno()), executable, package],
            stdin=subprocess.PIPE,  # whose end tells the server that the tests are over
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            env=kept | {"OMP_NUM_THREADS": "1"} | ({"RANK": str(number)} if BARE in os.environ else {}),
            start_new_session=True,
        )
        listener.close()
        atexit.register(process.communicate)
    libraries = os.environ.get("LD_LIBRARY_PATH", "")
    client = CLIENT.format(
        python=sys.executable, folder=str(place), servers=SERVERS, libraries=libraries, package=package
    )
    modules = {"torchrun": "torch.distributed.run", "paramp": "paramp"}
    scripts = {name: f'#!/bin/sh\nexec "{place / "python"}" -m {module} "$@"\n' for name, module in modules.items()}
    for name, text in {"python": client, **scripts}.items():
        (place / name).write_text(text)
        (place / name).chmod(0o755)


# ----------------------------------------------------------------------------------------------------- the server


class Process(NamedTuple):
    """One that runs a job, the file that tells when it has ended, and the connection to its client."""

    pid: int
    ended: int
    connection: socket.socket


def serve(listener: socket.socket) -> list:
    """Fork a process for every job, and tell its client how it ended. Returns in those processes, with the job."""
    events = select.poll()
    events.register(0, select.POLLIN)
    events.register(listener, select.POLLIN)
    running: list[Process] = []
    while True:
        file, _ = events.poll()[0]
        if file == 0:  # the tests are over
            for process in running:
                os.kill(process.pid, signal.SIGKILL)
            os._exit(0)
        elif file == listener.fileno():
            connection, _ = listener.accept()
            job, files = _receive(connection)
            pid = os.fork() if job else -1  # else the client has ended
            if not pid:
                listener.close()
                for process in running:
                    os.close(process.ended)
                    process.connection.close()
                _take_over(connection, files, job[-1])
                return job
            for received in files:
                os.close(received)
            if job:
                running.append(Process(pid, os.pidfd_open(pid), connection))
                events.register(running[-1].ended, select.POLLIN)
                events.register(connection, 0)  # for its end only: what the client sends is for the process
        else:
            process = next(one for one in running if file in (one.ended, one.connection.fileno()))
            events.unregister(process.ended)
            events.unregister(process.connection)
            running.remove(process)
            _end(process, killed=file != process.ended)


def _end(process: Process, *, killed: bool) -> None:
    """Tell the client how its process has ended; ``killed``: the client was, and the process is to end."""
    if killed:
        os.kill(process.pid, signal.SIGKILL)
    _, status = os.waitpid(process.pid, 0)
    os.close(process.ended)
    with process.connection, contextlib.suppress(OSError):
        process.connection.send(str(status).encode())


def _receive(connection: socket.socket) -> tuple[list, list[int]]:
    """The client's job and its open files; nothing, if it has ended."""
    header, files, _, _ = socket.recv_fds(connection, 8, 250)
    size = int.from_bytes(header, "big")
    with connection.makefile("rb") as stream:
        sent = stream.read(size)
    return (marshal.loads(sent), files) if size and len(sent) == size else ([], files)


def _take_over(connection: socket.socket, files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the client's files the numbers that they have there, once it can pass signals on."""
    with connection:  # closed by its object, which else closes the number when it is freed, by then of another file
        connection.send(str(os.getpid()).encode())
        connection.recv(1)
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, 512) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)


def become(job: list, base: Sequence[str], executable: str) -> None:
    """Run the job's command line as the interpreter would."""
    words, environment, cwd, client, parent, _ = job
    is_unbuffered = words[0] == "-u"
    os.setsid()
    os.sched_setaffinity(0, os.sched_getaffinity(client))  # the server has those of all
    for kind in ("net", "uts", "mnt"):  # of another host, where a test makes some
        if os.readlink(f"/proc/{client}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"):
            with open(f"/proc/{client}/ns/{kind}") as namespace:
                ctypes.CDLL(None).setns(namespace.fileno(), 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    os.getppid = lambda: parent  # type: ignore[assignment]
    sys.executable = executable
    sys.orig_argv = [executable, *words]
    if is_unbuffered or environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    words = words[is_unbuffered:]
    importlib.import_module("numpy").random.seed()  # Python's own does so by itself
    first = {"-c": "", "-m": cwd}.get(words[0], os.path.dirname(os.path.realpath(words[0])))
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *base]
    if environment.get(block_sizes.VARIABLE) == "small":
        block_sizes.use(True)  # imports the package, so from that path
    if words[0] == "-m":
        sys.argv = words[1:]
        if not hasattr(sys.modules.get(words[1]), "__path__"):  # of a package, another module is run
            sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        sys.argv, source, name = ["-c", *words[2:]], words[1], "<string>"
    else:
        sys.argv, source, name = list(words), Path(words[0]).read_bytes(), words[0]
        main.__file__ = name
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


def end_with(function: Callable[..., object], *arguments: object) -> None:
    """Call ``function`` and end the process as Python does, but for taking apart the modules, which takes 0.3 s."""
    code = 0
    try:
        function(*arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def preload(package: bool) -> None:
    """Import :data:`PRELOADED`, what there is of :data:`OPTIONAL`, and this tree's package."""
    sys.path.insert(0, str(ROOT))
    for name in PRELOADED:
        importlib.import_module(name)
    logging.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in OPTIONAL:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    logging.disable(logging.NOTSET)
    if package:
        for module in pkgutil.walk_packages(importlib.import_module("paramp").__path__, "paramp."):
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)
    del sys.path[0]


def use_huge_pages() -> None:
    """Move this process's memory to pages of 2 MiB, of which Linux has far fewer to list anew for each fork."""
    size, collapse = 2**21, 25  # MADV_COLLAPSE, which a kernel before 6.1 refuses
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        if access.startswith("rw") and inode == "0":
            first, last = (int(address, 16) for address in addresses.split("-"))
            first, last = -(-first // size) * size, last // size * size
            if last > first:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), collapse)


if __name__ == "__main__":
    gc.disable()
    preload(package=bool(sys.argv[3]))
    for library in weakref.finalize._registry:  # torch's, which take 0.1 s to be taken apart at the end of each process
        library.atexit = False
    gc.collect()
    gc.freeze()
    gc.enable()
    use_huge_pages()
    base_path, this = sys.path[1:], sys.modules["__main__"]
    end_with(become, serve(socket.socket(fileno=int(sys.argv[1]))), base_path, sys.argv[2])
