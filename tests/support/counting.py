"""Counting what a piece of code sends, whoever calls for it: paramp, DTensor, a schedule or autograd."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast", "send", "recv", "barrier")


class Collectives(TorchDispatchMode):
    """``counts``: by kind, how many collectives were started inside; ``elements``: of each all-reduce, in order;
    ``all_to_alls``: the arguments of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.elements: list[int] = []
        self.all_to_alls: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        space, _, name = function._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional"):
            plain = name.replace("all_reduce", "allreduce").replace("all_gather", "allgather").strip("_")
            kind = next((kind for kind in KINDS if plain.startswith(kind)), None)
            if kind is not None:
                self.counts[kind] += 1
            if kind == "alltoall":
                self.all_to_alls.append(args)
            if kind == "allreduce" and isinstance(args[0], list):
                self.elements.append(sum(tensor.numel() for tensor in args[0]))
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """``calls``: each operator that was called inside, and what it has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.calls.append((function, found))
        return found
