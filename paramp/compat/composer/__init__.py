"""Composer's interface: ``from paramp.compat.composer import functional, algorithms``."""

from ..foreign_module_advice import add_modules
from ..missing import missing
from . import algorithms, functional

__all__ = ["algorithms", "functional"]

__getattr__ = missing(
    __name__,
    {"Trainer": "write the loop, with paramp.initialize(model, optimizer, criterion, algorithms=[...])"},
    "only functional and algorithms are here; the page docs/from-composer.md names what to use instead",
)

add_modules("composer")
