"""Which optional packages are installed, found without importing them.

Two unrelated packages are called ``apex``. NVIDIA's, built from source, has fused CUDA kernels. The one on PyPI
(``pip install apex``) is a login toolkit for web applications; importing it may fail or import a web framework. So the
files are inspected: NVIDIA's has the subpackages ``apex.normalization`` and ``apex.optimizers``, and its kernels are
compiled modules beside it (``fused_layer_norm_cuda``, ``amp_C``).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from typing import Literal

from .errors import ConfigError

SUBPACKAGES = ("normalization", "optimizers")
"""Subpackages of NVIDIA's Apex that the package on PyPI lacks."""


@dataclass(frozen=True, kw_only=True)
class ApexStatus:
    """The result of :func:`find_apex`."""

    kind: Literal["real", "wrong", "none"]
    """``real``: NVIDIA's. ``wrong``: something else of that name. ``none``: nothing."""
    version: str | None = None
    """As the installed distribution says; None where there is none, or it has no metadata."""
    reason: str = ""
    """A message for the user: what was found where, and the consequence."""
    fused_norms: bool = False
    """Its kernels for layer and RMS norms were compiled (``--cuda_ext``)."""
    fused_optimizers: bool = False
    """Its multi-tensor kernels were compiled (``--cuda_ext``)."""


def find_apex() -> ApexStatus:
    """What ``import apex`` would find here, without importing it. Needs no GPU and no process group."""
    try:
        spec = importlib.util.find_spec("apex")
    except ValueError:  # something put a module without a spec into sys.modules
        return ApexStatus(kind="wrong", reason="a module called apex is loaded that came from no file; it is not used")
    if spec is None:
        return ApexStatus(kind="none", reason="no package apex is installed; torch's own fused kernels are used")
    where = spec.origin or ", ".join(spec.submodule_search_locations or ())
    version = installed_version("apex")
    if not all(_has(spec, name) for name in SUBPACKAGES):
        return ApexStatus(
            kind="wrong",
            version=version,
            reason=f"the package apex at {where} is not NVIDIA's (the one on PyPI has only the name in common); it is "
            "not used. NVIDIA's is built from github.com/NVIDIA/apex",
        )
    norms, optimizers = _is_there("fused_layer_norm_cuda"), _is_there("amp_C")
    missing = [what for what, there in (("norms", norms), ("optimizers", optimizers)) if not there]
    without = f", built without the kernels of its {' and '.join(missing)} (--cuda_ext)" if missing else ""
    reason = f"NVIDIA's Apex at {where}{without}"
    return ApexStatus(kind="real", version=version, reason=reason, fused_norms=norms, fused_optimizers=optimizers)


@dataclass(frozen=True, kw_only=True)
class PackageStatus:
    """Whether an optional package is installed, and a sentence for the user."""

    found: bool
    version: str | None = None
    """As the installed distribution says; None where there is none, or it has no metadata."""
    reason: str


def find_torchao() -> PackageStatus:
    """Whether torchao is installed, which multiplies in float8, without importing it."""
    return _find("torchao", 'it is installed by pip install "paramp[fp8]"')


def find_transformer_engine() -> PackageStatus:
    """Whether NVIDIA's Transformer Engine is installed with its part for torch, without importing it."""
    how = "it is installed by pip install --no-build-isolation transformer_engine[pytorch], and needs CUDA"
    status = _find("transformer_engine", how)
    spec = importlib.util.find_spec("transformer_engine") if status.found else None
    if spec is not None and not _has(spec, "pytorch"):
        return PackageStatus(found=False, reason=f"transformer_engine lacks its part for torch; {how}")
    return status


def _find(name: str, how: str) -> PackageStatus:
    if not _is_there(name):
        return PackageStatus(found=False, reason=f"no package {name} is installed; {how}")
    version = installed_version(name)
    return PackageStatus(found=True, version=version, reason=f"{name} {version or 'of an unknown version'}")


def _has(package: ModuleSpec, name: str) -> bool:
    """Whether ``package`` has a submodule ``name``; unlike ``importlib.util.find_spec`` this imports no package."""
    locations = package.submodule_search_locations
    # By its last name only: for a full one, a folder without Python in it asks for the package to be imported.
    found = None if locations is None else PathFinder.find_spec(name, list(locations))
    return found is not None and found.origin is not None  # such a folder has no origin


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # loaded without a spec
        return False


def check_installed(name: str, extra: str, option: str, otherwise: str = "") -> None:
    """Raise a ConfigError if the package ``name``, which ``option`` needs and ``extra`` installs, is not there."""
    if not _is_there(name):
        raise ConfigError(f'{option}: {name} is not installed; run pip install "paramp[{extra}]"{otherwise}')


def installed_version(name: str) -> str | None:
    """The version of the package ``name``, as pip knows it; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
