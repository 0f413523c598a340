"""What all ranks have to agree on before their first collective, through the launch's store: arguments and settings."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # missing in torch's stubs only

from ..base.errors import ConfigError, LaunchError
from ..base.torch_internals import expect
from ..config.schema import Config, flatten
from .rendezvous import meet, read_all

expect("torch.distributed.distributed_c10d")


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


def agree_on_config(store: Store, config: Config, rank: int, world_size: int) -> None:
    """Raise on every rank if the ranks' configurations differ, which would train wrongly or hang."""
    difference = agree(store, "config", json.dumps(shared_settings(config)), rank, world_size, first_difference)
    if difference:
        raise ConfigError(difference)


def shared_settings(config: Config) -> dict[str, Any]:
    """The settings of ``config`` that are the same on every rank."""
    return {key: value for key, value in flatten(config).items() if key not in config.user}


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
