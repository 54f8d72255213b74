"""Which statements of a file hold a line of it."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOOPS = (ast.For, ast.While)


def way_to(tree: ast.AST, line: int, end: tuple[type[ast.AST], ...] = ()) -> list[ast.AST]:
    """Returns the statements that hold a line, from the outside in.

    Args:
        tree: The file.
        line: The line.
        end: Kinds of statements, of which the one that begins at the line is the last.
    """
    way: list[ast.AST] = []
    node: Any = tree
    while node is not None:
        inner = (
            one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt | ast.excepthandler | ast.match_case)
        )
        node = next((one for one in inner if _first(one) <= line <= _last(one)), None)
        if node is not None:
            way.append(node)
            if isinstance(node, end) and getattr(node, "lineno", 0) == line:
                break
    return way


def loops_around(tree: ast.Module, line: int, *, head: bool = False) -> list[int]:
    """Returns the lines at which the loops begin that a line stands in, in its own function, the innermost first.

    Args:
        tree: The file.
        line: The line.
        head: It stands in the head of the loop that is looked for.
    """
    found: list[int] = []
    for node in way_to(tree, line):
        if isinstance(node, SCOPES):
            found = []
        elif isinstance(node, LOOPS) and any(_first(one) <= line <= _last(one) for one in node.body) is not head:
            found.insert(0, node.lineno)
    return found


def is_within(file: str, line: int, loop_file: str, loop: int) -> bool:
    """Does a line stand in a loop, or in what is defined in it?

    Args:
        file: The line's file.
        line: The line.
        loop_file: The loop's file, its links resolved.
        loop: The line at which the loop begins.
    """
    if os.path.realpath(file) != loop_file:
        return False
    return any(isinstance(one, LOOPS) and one.lineno == loop < line for one in _way_in(file, line))


def way_within(file: str, line: int, *, loop: int | None = None) -> list[ast.AST]:
    """Returns the statements around a line within its function, or within the loop that begins at a line.

    Args:
        file: Its file.
        line: The line.
        loop: The line at which the loop begins; None for the whole function.
    """
    way = _way_in(file, line)
    ends = [
        place
        for place, one in enumerate(way)
        if isinstance(one, SCOPES) or (loop is not None and isinstance(one, LOOPS) and one.lineno == loop)
    ]
    return way[ends[-1] :] if ends else way


def _way_in(file: str, line: int) -> list[ast.AST]:
    try:
        return way_to(ast.parse(Path(file).read_bytes()), line)
    except (OSError, SyntaxError, ValueError):
        return []


def _first(node: Any) -> int:
    own = getattr(node, "lineno", None)  # a `case` has none
    decorated = [one.lineno for one in getattr(node, "decorator_list", ())]
    return min(own, *decorated) if decorated else own or min(map(_first, ast.iter_child_nodes(node)), default=1 << 60)


def _last(node: Any) -> int:
    return getattr(node, "end_lineno", None) or max(map(_last, ast.iter_child_nodes(node)), default=-1)
