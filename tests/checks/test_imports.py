"""What importing paramp, and training without a layout, loads: nothing that a plain loop of torch does not."""

import json
import pkgutil
import re

from commands import COLD, ROOT, python, succeeded

import paramp
from paramp.tools.doctor import PACKAGES

HEAVY = ["torch.distributed.tensor", "torch.distributed.pipelining", "torch._dynamo", "torch._inductor.compile_fx"]
OPTIONAL = {*PACKAGES, "accelerate", "deepspeed", "ray", "sklearn", "torchtitan", "trl"} - {"numpy"}

PLAIN = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.nn.functional.mse_loss(model(torch.ones(1, 2)), torch.ones(1, 2)).backward()
optimizer.step()
"""
PARAMP = """
import paramp
with paramp.launch_from_torch({"precision": "32-true"}):
    engine, *_ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss)
    engine.forward_backward(torch.ones(1, 2), torch.ones(1, 2))
    assert engine.step().stepped
"""


def loaded(*sources):
    """The modules that are loaded after each of ``sources``, which run in turn in a process of their own."""
    show = "import json, sys; print(json.dumps(list(sys.modules)))"
    program = "\n".join(f"{source}\n{show}" for source in sources)
    result = succeeded(python("-c", program, PYTHONPATH=str(ROOT), **COLD))
    return [set(json.loads(line)) for line in result.stdout.splitlines() if line.startswith("[")]


def test_importing_paramp_loads_neither_layouts_nor_compilers_nor_its_own_parts():
    doctor = "from paramp.tools.cli import main; main(['doctor'])"
    imported, used, examined = loaded("import paramp", "[getattr(paramp, name) for name in paramp.__all__]", doctor)
    assert not imported.intersection(HEAVY)
    assert {name for name in imported if name.startswith("paramp.")} == set()
    assert not used.intersection(HEAVY)  # public names load on use
    assert not {name.partition(".")[0] for name in examined}.intersection(OPTIONAL)  # of the doctor


def test_the_package_shows_its_public_names_only():
    assert dir(paramp) == sorted(paramp.__all__)
    assert not [name for name in paramp.__all__ if name.startswith("_") and name != "__version__"]
    imported: dict[str, object] = {}
    exec("from paramp import *", imported)
    assert imported.keys() - {"__builtins__"} == set(paramp.__all__)


def test_a_step_without_a_layout_loads_what_a_plain_loop_does():
    plain, modules = loaded(PLAIN, PARAMP)
    assert not modules.intersection(set(HEAVY) - plain)


def test_names_are_where_the_changelog_says_that_they_have_moved():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("| 0.1.0 | now |\n|---|---|\n")[2]
    seen = []
    for line in text.partition("\n\n")[0].splitlines():
        before, now = line.strip("| ").split(" | ")
        stays = re.findall(r"`(paramp[\w.]+)`", before) if now.startswith("stay") else []
        for name in [*stays, *re.findall(r"`([\w.]+)`", now)]:
            dotted = seen[-1].rpartition(".")[0] + name if name.startswith(".") else name
            seen.append(dotted)
            if dotted.endswith(".FabricPrecision"):  # needs Lightning
                assert "class FabricPrecision" in (ROOT / "paramp/integrations/fabric.py").read_text(encoding="utf-8")
            else:
                assert pkgutil.resolve_name(dotted) is not None
    assert len(seen) > 30
