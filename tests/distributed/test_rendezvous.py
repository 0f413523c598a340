"""What ranks agree on through the store before the process group exists."""

import contextlib
import dataclasses
import json
import os
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
from torch.distributed import HashStore

import paramp
from paramp.base.errors import LaunchError
from paramp.config.files import load
from paramp.distributed import mpi_rendezvous, network_interfaces, rendezvous
from paramp.distributed.agreed_arguments import agree, agree_on_config, shared_settings
from paramp.distributed.launcher_variables import LauncherRank


class Requests:
    """A store that counts its requests."""

    def __init__(self, store):
        self.store, self.counts = store, Counter()

    def __getattr__(self, name):
        def request(*args):
            self.counts[name] += 1
            return getattr(self.store, name)(*args)

        return request


@pytest.mark.parametrize("rank", [0, 7])
def test_each_rank_asks_the_store_as_often_in_a_world_of_4096_as_in_one_of_8(rank):
    counts = []
    for size in (8, 4096):
        store = Requests(HashStore())
        for other in range(size):
            store.store.set(f"name/{other}", f"value {other}")
        if rank:
            store.store.set("name/agreed", f"value {size - 1}")
        assert agree(store, "name", f"value {rank}", rank, size, lambda values: values[-1]) == f"value {size - 1}"
        counts.append(store.counts)
    assert counts[0] == counts[1]
    assert counts[0]["multi_get"] == (rank == 0)  # which alone reads what others wrote


@pytest.mark.parametrize("rank", [0, 2])
def test_the_rank_that_is_lost_before_an_agreement_is_named(rank):
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    store.set("config/0", "")
    with pytest.raises(LaunchError, match="rank 1 was lost before the ranks had agreed on the config"):
        agree(store, "config", "", rank, 3, "".join)


@pytest.mark.parametrize("host", ["no such host", "rank..0"])
def test_a_host_that_has_no_address_is_named(monkeypatch, host):
    monkeypatch.setenv("PARAMP_LAUNCH_TIMEOUT", "0.05")
    with pytest.raises(LaunchError, match=f"cannot resolve the host '{host}'"):
        rendezvous.join_store(host, 29500)


OF_AN_EARLIER_WORLD = {"paramp/0/call": "old", "old/token/1": "of a process that ended", "old/1": "1", "old/go": "1"}


@pytest.mark.parametrize(
    ("rank", "left"), [(1, {}), (1, OF_AN_EARLIER_WORLD), (0, {"paramp/0/here/1": "of a process that ended"})]
)
def test_ranks_wait_for_those_of_their_own_world(monkeypatch, rank, left):
    """A launcher's store still has an earlier world's call, which all its ranks answered, or the token of one."""
    monkeypatch.setenv("PARAMP_LAUNCH_TIMEOUT", "0.05")
    monkeypatch.setattr(rendezvous, "_num_meetings", 0)
    store = HashStore()
    for key, value in left.items():
        store.set(key, value)
    with pytest.raises(LaunchError, match=f"of 2 ranks, {1 - rank} did not join"):
        rendezvous.meet(store, rank, 2)
    monkeypatch.setenv("PARAMP_LAUNCH_TIMEOUT", "20")  # then these come
    with ThreadPoolExecutor(2) as ranks:
        met = [*ranks.map(lambda rank: rendezvous.meet(store, rank, 2), (0, 1))]
    met[0].set("key", "value")
    assert met[1].get("key") == b"value"


DIFFERENT = {"parallel": {"zero": 1}, "precision": "bf16-mixed", "compile": True, "activation_checkpointing": "full"}
DIFFERENT |= {"masters": "remainder", "grad_dtype": "float32", "reduce_dtype": "float32", "optimizer_state": "bf16"}
DIFFERENT |= {"rounding": "stochastic", "ema": {"decay": 0.9}, "reproducible": True, "emulate_fp16": True, "seed": 1}
DIFFERENT |= {"clip_grad_norm": 1.0, "gradient_accumulation": 2, "max_skipped_in_a_row": 3, "trace_overflow": True}
DIFFERENT |= {"check_replicas_every": 2, "repair_replicas": True, "hang_timeout": 60.0, "hang_end_after": 3}
"""Each key of a configuration, with a value that is not the other rank's."""


def test_every_setting_has_to_be_the_same_on_all_ranks_but_keys_of_users():
    assert DIFFERENT.keys() == {field.name for field in dataclasses.fields(paramp.Config)} - {"user"}
    for key, value in (DIFFERENT | {"OWN": 1, "TABLE": {"inner": object()}}).items():
        config = {"precision": "bf16-true" if key == "rounding" else "bf16-naive", "check_replicas_every": 1}
        store = HashStore()
        store.set("config/1", json.dumps(shared_settings(load(config | {key: value}))))
        refused = pytest.raises(paramp.ConfigError, match=rf"{key}[\w.]*: rank 0 has .*, but rank 1 has ")
        with contextlib.nullcontext() if key.isupper() else refused:
            agree_on_config(store, load(config), 0, 2)


class Broadcast:
    """What ranks that mpirun started have of MPI to meet by: all get what rank 0 passes."""

    def __init__(self):
        self.rank, self.sent = 0, None

    def bcast(self, value, root):
        self.sent = value if self.rank == root else self.sent
        return self.sent


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [(["127.0.1.1", "192.0.2.1", "192.0.2.2"], ["192.0.2.1", "192.0.2.2", "node"]), (None, ["192.0.2.1", "node"])],
)
def test_a_machine_is_reached_at_its_interfaces_and_at_what_its_name_resolves_to(monkeypatch, addresses, expected):
    """But not at loopback. The name may not resolve."""
    monkeypatch.setattr(network_interfaces, "_interfaces", lambda: [("lo", "127.0.0.1"), ("eth0", "192.0.2.1")])
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    found = {"side_effect": socket.gaierror} if addresses is None else {"return_value": map(target, addresses)}
    with mock.patch.object(socket, "getaddrinfo", **found):
        assert network_interfaces.own_hosts() == expected


@pytest.mark.parametrize(
    ("given", "other", "expected"),
    [("", "192.0.2.2", "eth0"), ("eth1", "192.0.2.2", "eth1"), ("", "127.0.0.1", "")],
)
def test_gloo_listens_on_the_route_to_other_machines_unless_the_user_chose(monkeypatch, given, other, expected):
    """Not if all ranks share a machine. Rank 0's own name means loopback to it."""
    monkeypatch.setattr(network_interfaces, "_interfaces", lambda: [("lo", "127.0.0.1"), ("eth0", "192.0.2.1")])
    monkeypatch.setattr(network_interfaces, "_route_to", lambda host: "127.0.0.1" if host == "node" else "192.0.2.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    store = HashStore()
    store.set("address/1", other)
    network_interfaces.choose_interface(store, "node", 0, 2)
    assert os.environ["GLOO_SOCKET_IFNAME"] == expected


def target(address):
    return socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)


def test_ranks_of_mpirun_take_the_first_address_at_which_they_reach_rank_0(monkeypatch):
    addresses = ["240.0.0.1", "127.0.0.2", "127.0.0.1"]  # nobody can have the first one
    monkeypatch.setattr(mpi_rendezvous, "own_hosts", lambda: addresses)
    world = Broadcast()
    host, store = mpi_rendezvous._share_store(world, None, 0)
    assert host == addresses[0]  # rank 0 has the store itself
    assert world.sent[0][:2] == (addresses, store.port)
    world.rank = 1
    host, other = mpi_rendezvous._share_store(world, None, 0)
    assert (host, other.port) == ("127.0.0.2", store.port)
    store.set("name", "value")
    assert other.get("name") == b"value"


@pytest.mark.parametrize(("ranks_here", "host"), [(2, "localhost"), (1, "240.0.0.1")])
def test_ranks_of_mpirun_meet_at_localhost_if_all_are_on_one_machine(monkeypatch, ranks_here, host):
    mpi = mock.MagicMock()
    world = mpi.COMM_WORLD
    world.rank, world.size = 0, 2
    world.bcast.side_effect = lambda value, root: value
    world.allreduce.side_effect = lambda value, _: value  # as many ranks on each machine
    world.Split_type.return_value.size = ranks_here
    monkeypatch.setattr(mpi_rendezvous, "_import_mpi", lambda *_: mpi)
    monkeypatch.setattr(mpi_rendezvous, "own_hosts", lambda: ["240.0.0.1"])
    monkeypatch.setattr(mpi_rendezvous, "_met", None)
    place, store = mpi_rendezvous.meet_by_mpi(LauncherRank("mpi", 0, 2, 0), None, None)
    assert world.bcast.call_args.args[0][0][:2] == ([host], store.port)
    assert (place.host, place.port) == (host, store.port)
    assert store.port > 1023  # a free one, of those that are given to any user
