"""The inventory of private names of torch and of hosts: whole, and right for what is installed."""

import ast
import functools
import re
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import paramp
from paramp.base import replaced_in_torch as replaced
from paramp.base import torch_internals as internals

PACKAGE = Path(paramp.__file__).parent
PATHS = {
    path.relative_to(PACKAGE).as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem != "torch_internals"
}
NAMES = {name for row in internals.INVENTORY for name in row.names.split()}
DOTTED = {f"{row.owner}.{name}" for row in internals.INVENTORY for name in row.names.split()}
PUBLIC = {"_asdict", "_replace", "_fields", "_exit", "_current_frames"}
"""Documented by Python in spite of their underscores."""
GIVEN = {
    *("_amp_state", "_combined_from", "_eager_forward", "_inputs_saturate", "_runs_forward_of_class", "_whole_on_meta")
}
"""Attributes that paramp gives to objects of others by names in constants, beside those that begin with _paramp."""
MODULES = {"dist": "torch.distributed", "c10d": "torch.distributed.distributed_c10d", "nn": "torch.nn"}
"""The short names under which files import torch's modules."""


def is_private(name):
    return any(part.startswith("_") and not part.endswith("__") and part.strip("_") for part in name.split("."))


def defined(tree):
    """The private names that a file defines: functions, classes, variables, attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            yield from (one.value for one in node.args if isinstance(one, ast.Constant))


@functools.cache
def parsed():
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}


@functools.cache
def known():
    return NAMES | PUBLIC | GIVEN | {name for tree in parsed().values() for name in defined(tree)}


def uses(tree):
    """The private names that a file takes from elsewhere, and whether each is in the inventory."""
    texts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.name, False) for one in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((name, name in DOTTED) for name in (f"{node.module}.{one.name}" for one in node.names))
        elif isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in {"torch", *MODULES} and ast.unparse(node).replace(".", "").isidentifier():
                name = ".".join([MODULES.get(first, first), *rest])
                yield name, any(f"{one}.".startswith(f"{name}.") or name.startswith(f"{one}.") for one in DOTTED)
            elif is_private(node.attr):
                yield node.attr, node.attr in known()
        elif isinstance(node, ast.Constant) and id(node) not in texts and re.fullmatch(r"_\w+", str(node.value)):
            yield node.value, node.value in known() or node.value.startswith("_paramp")


@pytest.mark.parametrize("path", PATHS)
def test_every_private_name_that_a_file_takes_is_in_the_inventory(path):
    assert sorted({name for name, is_known in uses(parsed()[path]) if not is_known and is_private(name)}) == []


def rows():
    return [pytest.param(row, id=f"{row.owner}: {row.names.split()[0]}") for row in internals.INVENTORY]


@pytest.mark.filterwarnings("ignore")  # of hosts that are imported
@pytest.mark.parametrize("row", rows())
def test_what_is_installed_has_the_names_of_the_inventory(row):
    pytest.importorskip(row.owner.split(".")[0])
    assert internals.lacks(row) == []


def test_a_missing_name_is_an_error_that_names_it(monkeypatch):
    name = "torch.nn.modules.module._has_any_global_hook"
    monkeypatch.delattr("torch.nn.modules.module._has_any_global_hook")
    internals.take.cache_clear()
    message = rf"torch {re.escape(torch.__version__)} has no {name}, which paramp needs for compiling .* 2.11 to 2.15"
    for check in (internals.take, internals.expect):
        with pytest.raises(RuntimeError, match=message):
            check(name)
    monkeypatch.undo()
    assert internals.take(name) is torch.nn.modules.module._has_any_global_hook


def test_attributes_of_a_class_are_checked_in_the_versions_that_have_them(monkeypatch):
    class Record:
        set_by_a_method: int

        def __init__(self):
            self.value = 1

    rows = (internals.Private("torch.Record", "set_by_a_method value", "a test"),)
    monkeypatch.setattr(torch, "Record", Record, raising=False)
    monkeypatch.setattr(internals, "INVENTORY", (*rows, internals.Private("torch.Record", "_gone", "a test")))
    internals.expect("torch.Record.value")
    with pytest.raises(RuntimeError, match=r"has no torch\.Record\._gone"):
        internals.expect("torch.Record")
    row = internals.Private("torch.nn", "_gone", "a test", since="2.12", until="2.13")
    for version, expected in (("2.11.0", []), ("2.12.1", ["_gone"]), ("2.13.0+cpu", ["_gone"]), ("2.14.0", [])):
        monkeypatch.setattr(torch, "__version__", version)
        assert internals.lacks(row) == expected


def launched():
    paramp.launch_from_torch({}).close()


def over_a_mesh():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        paramp.ParallelContext.from_mesh(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))).close()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("start", [launched, over_a_mesh])
@pytest.mark.parametrize("version", ["2.10.2", "2.16.0a0+git1"])
def test_an_untested_version_warns_once(monkeypatch, version, start):
    internals.warn_if_untested.cache_clear()
    start()  # a warning would be an error: the installed one is tested
    monkeypatch.setattr(torch, "__version__", version)
    gone = internals.Private("torch.nn", "_gone", "a test")
    monkeypatch.setattr(internals, "INVENTORY", (*internals.INVENTORY, gone))
    internals.warn_if_untested.cache_clear()
    tested = r"paramp was tested with torch 2\.11 to 2\.15 only .*; it lacks .*torch\.nn\._gone"
    with pytest.warns(UserWarning, match=rf"torch {re.escape(version)}: {tested}"):
        start()
    launched()  # a second warning would be an error


def test_redispatch_in_python_lets_a_mode_see_what_a_function_calls():
    """Against torch's own, which 2.11 lacks."""

    class Names(torch.overrides.TorchFunctionMode):
        def __init__(self, redispatch):
            super().__init__()
            self.redispatch, self.names = redispatch, []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(func.__name__)
            if isinstance(func, FunctionType):
                with self:
                    return self.redispatch(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))

    def seen(redispatch):
        x = torch.arange(12.0).view(3, 4)
        with Names(redispatch) as mode:
            results = [
                torch.nn.functional.softmax(x, dim=1, dtype=torch.float64),
                torch.nn.functional.max_pool1d(x, 2),
                torch.nn.functional.cosine_embedding_loss(x, x, torch.ones(3)),
                torch.nn.init.normal_(x, generator=torch.Generator().manual_seed(0)),
                torch.einsum("ij,kj->ik", x, x),
                2.0 - x,
            ]
        return mode.names, results

    names, results = seen(replaced._redispatch)
    assert {"softmax", "normal_", "einsum", "__rsub__"} < set(names)
    expected_names, expected = seen(replaced.redispatch_function)
    torch.testing.assert_close(results, expected, atol=0, rtol=0)
    assert names == expected_names
