"""The launchers end to end: each trains to the losses that torchrun's four processes reach."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import PYTHON, ROOT, TORCHRUN, run, start, succeeded
from families import family, long
from network_hosts import ADDRESSES, Hosts
from pages import blocks, read

from paramp.distributed.rendezvous import free_port

JOB = ("launch/train.py", "--tp", "2", "--pp", "2", "--precision", "32-true", "--batch-size", "8", "--seq-len", "16")
JOB = (*JOB, "--steps", "3", "--set", "train.eval_sequences=8", "--data", "README.md")
JOB = (*JOB, "--set", "model.num_layers=2")
MEET = [PYTHON, "tests/support/scripts/meet.py"]
ON_THE_PAGE = next(block for block in blocks("docs/launching.md", "text") if "slots" in block)
"""A hostfile."""
SONAMES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}


def losses(command, folder, **variables):
    """Those of a training that writes them into ``folder``."""
    result = succeeded(run([*command, "--log-dir", str(folder)], **variables))
    assert "Warning" not in result.stderr  # of a library
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses under torchrun with four processes."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "4", *JOB]
    found = losses(command, tmp_path_factory.mktemp("torchrun"))
    assert len(found) == 3
    return pytest.approx(found, abs=1e-6)


def mpi_variables(name, warm=False):
    """The environment in which ``mpirun`` is the one called ``name``.

    Ranks that start ``warm`` load its library by its path, as ``LD_LIBRARY_PATH`` is read when a process starts.
    """
    prefix = Path(sys.prefix, "mpi", name)
    if not (prefix / "bin" / "mpirun").exists():
        pytest.skip(f"the {name} wheel is not installed in {prefix}, as make test does")
    path = os.pathsep.join([str(prefix / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    libraries = str(prefix / "lib")
    own = {"PARAMP_TEST_LIBRARIES": libraries, "MPI4PY_LIBMPI": f"{libraries}/{SONAMES[name]}"} if warm else {}
    return {"PATH": path, "LD_LIBRARY_PATH": libraries} | own


def hostfile(folder, text):
    """The name of a file of hosts."""
    (folder / "hosts").write_text(text)
    return str(folder / "hosts")


# One of the two MPIs runs on one host and the other on two, with ranks that import all they need.
def test_mpirun_with_a_hostfile(tmp_path, expected):
    hosts = hostfile(tmp_path, "# this machine\nlocalhost slots=4\n")
    command = ["launch/mpirun.sh", hosts, "python", *JOB]
    assert losses(command, tmp_path, **mpi_variables("openmpi", warm=True)) == expected


def test_a_batch_script_of_slurms(tmp_path, expected):
    """``sbatch`` and ``srun`` are stand-ins that set the variables which Slurm sets."""
    path = os.pathsep.join([str(ROOT / "tests" / "support" / "bin"), os.environ["PATH"]])
    assert losses(["sbatch", "launch/slurm.sbatch", *JOB[5:]], tmp_path, PATH=path, PYTHON=PYTHON) == expected


@family
@long
def test_two_agents_that_start_their_ranks_again(tmp_path):
    """Their store outlives the ranks, and each agent counts its restarts for itself."""
    mark, where = tmp_path / "mark", ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", *where]
    command += ["tests/support/scripts/dies_once.py", str(mark)]
    with start(command) as second:
        assert "met: [0, 1]" in succeeded(run(command)).stdout
        assert second.wait(timeout=120) == 0
    assert mark.exists()


@pytest.fixture(scope="module")
def hosts():
    """Two hosts, or the reason why there are none."""
    try:
        with Hosts() as found:
            yield found
    except FileNotFoundError as error:
        pytest.skip(f"no {error.filename}: network namespaces need iproute2 and util-linux")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")


@family
@long
def test_mpirun_on_two_hosts(hosts, tmp_path, expected):
    """With the page's hostfile, whose two hosts have these names."""
    shell = str(hosts.remote_shell(tmp_path))
    variables = {"PRTE_MCA_plm_ssh_agent": shell, "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": shell}
    command = [*hosts.on("node1"), "launch/mpirun.sh", hostfile(tmp_path, ON_THE_PAGE), "python", *JOB]
    assert losses(command, tmp_path, **mpi_variables("mpich"), **variables) == expected


def test_torchrun_on_two_hosts_that_meet_by_name(hosts, tmp_path, expected):
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "node1:29400", *JOB]
    with start([*hosts.on("node2"), *command]) as second:
        assert losses([*hosts.on("node1"), *command], tmp_path) == expected
        assert second.wait(timeout=120) == 0


def test_launch_on_two_hosts_that_meet_by_address(hosts):
    where = ["2", ADDRESSES["node1"], "29500"]
    with start([*hosts.on("node2"), *MEET, "1", *where]) as second:
        assert "met: [(0, 0), (1, 1)]" in succeeded(run([*hosts.on("node1"), *MEET, "0", *where])).stdout
        assert second.wait(timeout=120) == 0


def test_two_hosts_with_different_data(tmp_path, capfd):
    """Stages would see inputs of one text and targets of another."""
    where = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "localhost", "--master-port", str(free_port()))
    commands = []
    for number in range(2):
        text = tmp_path / f"{number}.txt"
        text.write_text(f"{number} lines of text\n" * 400)
        job = ["launch/train.py", "--pp", "2", "--seq-len", "16", "--data", str(text)]
        commands.append([*TORCHRUN, "--node-rank", str(number), *where, *job])
    with start(commands[1]) as second:
        result = run(commands[0])
        assert result.returncode != 0
        assert second.wait(timeout=120) != 0
    errors = result.stderr + capfd.readouterr().err  # the rank that finds it first tells it
    message = "error: train.data: rank 0 reads data of the hash"
    assert sum(line.startswith(message) for line in errors.splitlines()) == 1, errors


def test_a_port_in_use():
    """Whoever listens there answers nothing that a rank could take for rank 0."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        where = ["2", "localhost", str(taken.getsockname()[1])]
        with start([*MEET, "1", *where], PARAMP_LAUNCH_TIMEOUT="1") as other:
            result = run([*MEET, "0", *where])
            assert result.returncode != 0
            assert f"cannot listen on port {where[2]}" in result.stderr
            assert "choose another port" in result.stderr
            assert other.wait(timeout=120) != 0


def test_the_pages_hostfile_is_the_example():
    assert re.sub("^#.*\n", "", read("hostfile.example"), flags=re.MULTILINE) == ON_THE_PAGE


def test_what_the_hostfiles_lines_mean(tmp_path):
    """A stand-in for mpirun says what it is given."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\n[ "$1" = --version ] && echo HYDRA || echo "$@"\n')
    mpirun.chmod(0o755)
    hosts = hostfile(tmp_path, "# ours\r\nnode1 slots=2\r\n\r\nnode2:3\nnode3 # one\n10.0.0.4 slots = 4 max_slots=8\n")
    result = succeeded(run(["launch/mpirun.sh", hosts, "true"], PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert result.stdout == "-hosts node1:2,node2:3,node3:1,10.0.0.4:4 -n 10 true\n"
    empty = tmp_path / "empty"
    empty.mkdir()
    for tool in ("awk", "tr", "id"):
        (empty / tool).symlink_to(shutil.which(tool))
    result = run(["launch/mpirun.sh", hosts, "true"], PATH=str(empty))
    assert result.returncode == 2
    assert "error: there is no mpirun on the PATH; install Open MPI, which is the package openmpi-bin" in result.stderr
    result = run(["launch/mpirun.sh", hostfile(tmp_path, "# nothing\n"), "true"])
    assert result.returncode == 2
    assert "names no host" in result.stderr
