"""Which package is called apex, found from what is on disk."""

import sys
import types

import pytest

from paramp.base.installed_packages import find_apex

KERNELS = ("fused_layer_norm_cuda.py", "amp_C.py")
NVIDIAS = ("apex/__init__.py", "apex/normalization/__init__.py", "apex/optimizers/__init__.py", "apex/amp/__init__.py")
PYPIS = ("apex/__init__.py", "apex/views.py", "apex/lib/__init__.py")
FOLDERS = ("apex/optimizers/notes.txt", "apex/normalization/notes.txt")
"""Of the names of NVIDIA's packages, but without code."""


@pytest.mark.parametrize(
    ("paths", "version", "kind", "kernels"),
    [
        ((*PYPIS, *FOLDERS), "0.9.10.dev0", "wrong", False),
        (NVIDIAS, "0.1", "real", False),
        ((*NVIDIAS, *KERNELS), None, "real", True),
        ([*(f"apex/{path}" for path in NVIDIAS), "apex/setup.py"], None, "wrong", False),  # a clone in this folder
        (["apex.py"], None, "wrong", False),
    ],
)
def test_an_apex_is_recognised_and_not_imported(tmp_path, monkeypatch, paths, version, kind, kernels):
    """In a folder in front of everything that is installed, on a machine without Apex's kernels."""
    monkeypatch.syspath_prepend(tmp_path)
    names = ("apex", *(path.removesuffix(".py") for path in KERNELS))
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
        if kernels or name == "apex":
            monkeypatch.delitem(sys.modules, name)
    files = dict.fromkeys(paths, "raise AssertionError('imported')\n")
    if version is not None:
        text = f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\n"
        files[f"apex-{version}.dist-info/METADATA"] = text
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    status = find_apex()
    assert (status.kind, status.version) == (kind, version)
    assert (status.fused_norms, status.fused_optimizers) == (kernels, kernels)
    assert str(tmp_path) in status.reason
    assert ("not NVIDIA's" in status.reason) == (kind == "wrong")
    assert ("without the kernels of its norms and optimizers" in status.reason) == (kind == "real" and not kernels)
    assert not any(sys.modules.get(name) for name in names)


@pytest.mark.parametrize(("module", "kind"), [(None, "none"), (types.ModuleType("apex"), "wrong")])
def test_an_apex_that_is_missing_or_loaded_from_no_file(monkeypatch, module, kind):
    monkeypatch.setitem(sys.modules, "apex", module)
    status = find_apex()
    assert (status.kind, status.version, status.fused_norms) == (kind, None, False)
