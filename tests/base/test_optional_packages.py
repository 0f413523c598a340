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
    assert status.kind == "none"
    assert status.version is None
    assert not status.fused_norms


def test_pypis_apex_is_recognised_and_not_imported(site):
    put(site, "apex/__init__.py", "apex/views.py", "apex/models.py", "apex/lib/__init__.py")
    put(site, "apex/optimizers/notes.txt", "apex/normalization/notes.txt")  # folders, but no packages
    metadata(site, "0.9.10.dev0")
    status = find_apex()
    assert (status.kind, status.version) == ("wrong", "0.9.10.dev0")
    assert str(site) in status.reason
    assert "not NVIDIA's" in status.reason
    assert not status.fused_norms
    assert not status.fused_optimizers
    assert "apex" not in sys.modules


def test_nvidias_apex_without_kernels_is_recognised(site):
    put(site, *NVIDIAS)
    metadata(site, "0.1")
    status = find_apex()
    assert (status.kind, status.version) == ("real", "0.1")
    assert "without the kernels of its norms and optimizers" in status.reason
    assert not status.fused_norms


def test_nvidias_apex_with_kernels_is_recognised(site, monkeypatch):
    put(site, *NVIDIAS, *(f"{name}.py" for name in KERNELS))
    for name in KERNELS:
        monkeypatch.delitem(sys.modules, name)
    status = find_apex()
    assert (status.kind, status.version) == ("real", None)
    assert status.fused_norms
    assert status.fused_optimizers
    assert "without" not in status.reason
    assert not any(name in sys.modules for name in ("apex", *KERNELS))


def test_a_clone_of_apex_in_the_current_folder_is_not_a_package(site):
    put(site, *(f"apex/{path}" for path in NVIDIAS), "apex/setup.py")
    assert find_apex().kind == "wrong"


def test_other_modules_named_apex_are_not_used(site, monkeypatch):
    put(site, "apex.py")
    assert find_apex().kind == "wrong"
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    assert find_apex().kind == "wrong"
