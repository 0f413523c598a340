"""Which package is called apex, found from what is on disk."""

import sys
import types

import pytest

from paramp.base.optional_packages import find_apex

KERNELS = ("fused_layer_norm_cuda", "amp_C")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in front of everything that is installed, on a machine without Apex's kernels."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    for name in KERNELS:
        monkeypatch.setitem(sys.modules, name, None)
    return tmp_path


def put(site, *paths, text="raise AssertionError('imported')\n"):
    for path in paths:
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def metadata(site, version):
    put(site, f"apex-{version}.dist-info/METADATA", text=f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\n")


NVIDIAS = ("apex/__init__.py", "apex/normalization/__init__.py", "apex/optimizers/__init__.py", "apex/amp/__init__.py")


def test_missing_packages_are_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    status = find_apex()
    assert (status.kind, status.version, status.fused_norms) == ("none", None, False)


def test_pypis_apex_is_recognised_and_not_imported(site):
    put(site, "apex/__init__.py", "apex/views.py", "apex/models.py", "apex/lib/__init__.py")
    put(site, "apex/optimizers/notes.txt", "apex/normalization/notes.txt")  # folders, but no packages
    metadata(site, "0.9.10.dev0")
    status = find_apex()
    assert (status.kind, status.version) == ("wrong", "0.9.10.dev0")
    assert str(site) in status.reason
    assert "not NVIDIA's" in status.reason
    assert (status.fused_norms, status.fused_optimizers) == (False, False)
    assert "apex" not in sys.modules


@pytest.mark.parametrize("kernels", [False, True])
def test_nvidias_apex_is_recognised_with_and_without_kernels(site, monkeypatch, kernels):
    put(site, *NVIDIAS, *(f"{name}.py" for name in KERNELS if kernels))
    for name in KERNELS if kernels else ():
        monkeypatch.delitem(sys.modules, name)
    if not kernels:
        metadata(site, "0.1")
    status = find_apex()
    assert (status.kind, status.version) == ("real", None if kernels else "0.1")
    assert (status.fused_norms, status.fused_optimizers) == (kernels, kernels)
    assert ("without the kernels of its norms and optimizers" in status.reason) == (not kernels)
    assert not any(name in sys.modules for name in ("apex", *(KERNELS if kernels else ())))


@pytest.mark.parametrize("paths", [[*(f"apex/{path}" for path in NVIDIAS), "apex/setup.py"], ["apex.py"]])
def test_a_clone_of_apex_in_the_current_folder_and_a_module_are_no_package(site, monkeypatch, paths):
    put(site, *paths)
    assert find_apex().kind == "wrong"
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    assert find_apex().kind == "wrong"
