"""Branches of a forward that is traced: those whose other side only raises are recorded as what has to hold."""

from __future__ import annotations

import dis
import functools
import operator
from collections.abc import Sequence
from types import CodeType, FrameType

from .traced_values import INSIDE

JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
"""The instructions that may go on elsewhere than at the next one."""
COMPARISONS = frozenset(map(str, (operator.lt, operator.le, operator.gt, operator.ge, operator.ne)))
"""Not ``==``: Python asks it of the elements of tuples that it compares."""


@functools.lru_cache(maxsize=2**10)
def asserted(code: CodeType, offset: int) -> bool | None:
    """True if the instruction at ``offset`` is of an ``assert``: what it branches on has to be true. Otherwise None."""
    following = [step.opname for step in dis.get_instructions(code) if step.offset > offset]
    return True if {"LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT"} & {*following[:2]} else None


@functools.lru_cache(maxsize=2**10)
def required(code: CodeType, offset: int, asked: str) -> bool | None:
    """What the value has to be that the instruction at ``offset`` branches on: if it is not, the code only raises.

    None if it is no such branch. ``asked``: the function that gave the value.
    """
    steps = [step for step in dis.get_instructions(code) if step.offset >= offset and step.opname != "EXTENDED_ARG"]
    # Python 3.13 and later make a bool before the jump. The comparison of two tuples there also asks for those of
    # their elements, of whether they are equal.
    is_compared = asked in COMPARISONS and steps[0].argrepr.startswith("bool(")
    if steps[0].opname == "TO_BOOL" or is_compared:
        steps = steps[1:]
    jump, following = steps[0], steps[1:]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps_if = jump.opname.endswith("IF_TRUE")
    if _only_raises(code, following):
        return jumps_if
    if _only_raises(code, [step for step in following if step.offset >= jump.argval]):
        return not jumps_if
    return None


def _only_raises(code: CodeType, steps: Sequence[dis.Instruction]) -> bool:
    """Whether ``steps`` of ``code`` come to a ``raise`` whatever values they have, and nothing there catches it."""
    for step in steps:
        leaves_them = step.opname.startswith(("RETURN", "YIELD", "RERAISE")) or step.opcode in JUMPS
        if leaves_them or _is_guarded(code, step.offset):
            return False
        if step.opname == "RAISE_VARARGS":
            return True
    return False


def _is_guarded(code: CodeType, offset: int) -> bool:
    """Whether the instruction at ``offset`` is in a ``try`` or a ``with``."""
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    return any(entry.start <= offset < entry.end for entry in entries)


def may_be_caught(frame: FrameType, outermost: CodeType) -> bool:
    """Whether what ``frame`` raises may be caught by code that has called it, within ``outermost``."""
    called: FrameType | None = frame
    while called is not None and called.f_code is not outermost:
        code, name = called.f_code, called.f_code.co_name
        if name.startswith("__") and name not in ("__call__", "__init__"):  # code in C catches errors of some of them
            return True
        if called is not frame and not code.co_filename.startswith(INSIDE) and _is_guarded(code, called.f_lasti):
            return True
        called = called.f_back
    return False
