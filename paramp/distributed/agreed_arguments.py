"""What all ranks have to agree on before their first collective, through the launch's store: arguments and settings."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # missing in torch's stubs only

from ..base.collectives import is_distributed
from ..base.errors import ConfigError, LaunchError
from ..base.torch_internals import expect
from ..config.schema import Config, flatten
from .rendezvous import meet, read_all

expect("torch.distributed.distributed_c10d")

Checked = TypeVar("Checked")


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


class Call(NamedTuple):
    """What a rank calls a public function with, to be compared over the ranks."""

    settings: Mapping[str, Any] = {}
    """The same on every rank; of JSON's types."""
    place: object = None
    """Ranks with an equal place have equal models."""
    model: str = ""
    """Describes this rank's."""


def agreed_call(function: str, check: Callable[[], tuple[Checked, Call]]) -> Checked:
    """What ``check`` makes of this rank's arguments of the public ``function``, once all ranks have compared theirs.

    Every rank of the world calls it before the function's first collective. It uses the store alone, so that a rank
    that calls a function alone, or another one than the others, raises in bounded time.

    Args:
        check: raises an error for wrong arguments.

    Raises:
        Exception: that of ``check``, on this rank.
        ConfigError: another rank has wrong arguments, or ranks have different ones.
        LaunchError: a rank did not call any such function within the launch's time-out.
    """
    checked, call, problem = None, Call(), None
    try:
        checked, call = check()
    except Exception as error:  # whatever it is, the other ranks wait
        problem = error
    different = ""
    if is_distributed() and dist.get_backend() != "fake":  # of which one rank runs
        state = {"function": function, "problem": None if problem is None else str(problem), **call._asdict()}
        rank, world_size = dist.get_rank(), dist.get_world_size()
        try:
            store = meet(dist.distributed_c10d._get_default_store(), rank, world_size)
        except LaunchError as error:
            raise LaunchError(f"{function}: every rank has to call it; {error}") from None
        different = agree(store, "call", json.dumps(state), rank, world_size, _first_problem)
    if problem is not None or different:
        raise problem or ConfigError(different)
    return cast(Checked, checked)


def _first_problem(texts: list[str]) -> str:
    states = [json.loads(text) for text in texts]
    function = states[0]["function"]
    first_at: dict[str, int] = {}
    for rank, state in enumerate(states):
        if state["function"] != function:
            return f"rank 0 calls {function}, but rank {rank} {state['function']}; call the same function on every rank"
        if state["problem"] is not None:
            return f"rank {rank}: {state['problem']}"
        first = first_at.setdefault(str(state["place"]), rank)
        if state["model"] != states[first]["model"]:
            return (
                f"{function}: the parameters of rank {first} ({states[first]['model']}) have other names, shapes or "
                f"dtypes than those of rank {rank} ({state['model']}); pass the same model on every rank"
            )
    different = first_difference([json.dumps(state["settings"]) for state in states])
    return f"{function}: {different}" if different else ""


def agree_on_config(store: Store, config: Config, rank: int, world_size: int) -> None:
    """Raise on every rank if the ranks' configurations differ, which would train wrongly or hang."""
    difference = agree(store, "config", json.dumps(shared_settings(config)), rank, world_size, first_difference)
    if difference:
        raise ConfigError(difference)


def shared_settings(config: Config) -> dict[str, Any]:
    """The settings of ``config`` that are the same on every rank."""
    return {key: value for key, value in flatten(config).items() if key.partition(".")[0] not in config.user}


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
                    "give every rank the same value"
                )
    return ""
