"""Two hosts on one machine: network namespaces, each with its own address, name and table of hosts.

As on Debian, each host's name means ``127.0.1.1`` to itself, so that whoever listens on what the own name resolves to
is not reached from the other.
"""

import os
import shutil
import subprocess
from pathlib import Path

ADDRESSES = {"node1": "10.213.77.1", "node2": "10.213.77.2"}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Hosts:
    """Where the tools are missing, entering raises an OSError; where the user may not, a CalledProcessError."""

    def __init__(self) -> None:
        self._mark = f"paramp{os.getpid()}"

    def __enter__(self) -> "Hosts":
        try:
            for name in ADDRESSES:
                _ip("netns", "add", self._namespace(name))
                folder = Path("/etc/netns", self._namespace(name))
                folder.mkdir(parents=True)
                both = "".join(f"{address} {other}\n" for other, address in ADDRESSES.items())
                (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{both}")
            first, second = (self._namespace(name) for name in ADDRESSES)
            _ip("link", "add", "veth0", "netns", first, "type", "veth", "peer", "name", "veth0", "netns", second)
            for name, address in ADDRESSES.items():
                _ip("-n", self._namespace(name), "addr", "add", f"{address}/24", "dev", "veth0")
                for link in ("lo", "veth0"):
                    _ip("-n", self._namespace(name), "link", "set", link, "up")
            subprocess.run([*self.on("node1"), "true"], check=True, capture_output=True, text=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in ADDRESSES:
            subprocess.run(["ip", "netns", "del", self._namespace(name)], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns", self._namespace(name)), ignore_errors=True)

    def _namespace(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def on(self, name: str) -> list[str]:
        """What to put before a command so that it runs on the host."""
        become = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self._namespace(name), "unshare", "--uts", "sh", "-c", become, name]

    def remote_shell(self, folder: Path) -> Path:
        """A program that does as ssh does, for mpirun: ``program [options] host command``."""
        program = folder / "remote_shell"
        program.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            "host=$1; shift\n"
            f"exec ip netns exec {self._mark}-$host unshare --uts sh -c \"hostname $host; cd '$PWD'; $*\"\n"
        )
        program.chmod(0o755)
        return program
