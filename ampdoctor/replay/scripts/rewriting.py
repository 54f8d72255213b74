"""Rewrites a loop of the user's file: its body becomes a function of one item, over the loop's own variables.

    for TARGET in ITEMS:            def items(): return ITEMS
        BODY                        def body(item):
                                        nonlocal what BODY binds
                                        for TARGET in (item,):
                                            BODY
                                    loop(items, body)

What is drawn and when, which variables are bound and what the lines are called stays as it was. A loop over the one
item keeps `continue` and `break` what they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from ampdoctor.errors import FactoryError
from ampdoctor.replay.scripts.bound_names import FUNCTIONS, BoundNames

SEAM = "__ampdoctor__"
"""The name, among a rewritten file's globals, of the object that its rewritten parts ask: a `Seam`."""
_BODY, _ITEMS, _ITEM, _END = "__ampdoctor_body__", "__ampdoctor_items__", "__ampdoctor_item__", "__ampdoctor_end__"
_SCOPES = (*FUNCTIONS, ast.ClassDef)
LOOPS = (ast.For, ast.While)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """What is rewritten in one file.

    Attributes:
        loop: The line at which the loop begins; None where the loop stands in another file.
        calls: Lines that lead to the loop: the contexts and `try` statements around them are not left with it.
    """

    loop: int | None = None
    calls: frozenset[int] = frozenset()


def loops_around(tree: ast.Module, line: int, *, head: bool = False) -> list[int]:
    """Returns the lines at which the loops begin that a line stands in, in its own function, the innermost first.

    Args:
        tree: The file.
        line: The line.
        head: It stands in the head of the loop that is looked for.
    """
    found: list[int] = []
    for node in _way_to(tree, line):
        if isinstance(node, _SCOPES):
            found = []
        elif isinstance(node, LOOPS) and _in_body(node, line) is not head:
            found.insert(0, node.lineno)
    return found


def rewritten(source: bytes | str, file: str, edits: Edits) -> CodeType:
    """Compiles a file with its edits.

    Args:
        source: The file's contents.
        file: Its name, which its code keeps.
        edits: What is rewritten.

    Raises:
        SyntaxError: It is no Python.
        FactoryError: The loop's body cannot be a function.
    """
    tree = ast.parse(source, file)
    ways = [_way_to(tree, line) for line in sorted(edits.calls)]
    loop, way = None, list[ast.AST]()
    if edits.loop is not None:
        way = _way_to(tree, edits.loop, LOOPS)
        loop = way.pop()
        ways.append(way)
    kept = {id(node) for one in ways for node in one if isinstance(node, ast.With | ast.Try)}
    tree = _Rewriting(file, loop, way, kept).visit(tree)
    return _renamed(compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True))


def _way_to(tree: ast.AST, line: int, end: tuple[type[ast.AST], ...] = ()) -> list[ast.AST]:
    """Returns the statements that hold a line, from the outside in; with `end`, up to the one that begins there."""
    way: list[ast.AST] = []
    node: ast.AST | None = tree
    while node is not None:
        node = next((child for child in _statements(node) if _first(child) <= line <= _last(child)), None)
        if node is not None:
            way.append(node)
            if isinstance(node, end) and node.lineno == line:  # type: ignore[attr-defined]
                break
    return way


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what stands inside, and may hold statements."""
    return (one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt | ast.ExceptHandler | ast.match_case))


def _first(node: Any) -> int:
    decorators = getattr(node, "decorator_list", ())
    starts = [getattr(one, "lineno", 0) for one in (*decorators, node)] if hasattr(node, "lineno") else []
    return min(starts) if starts else min(map(_first, ast.iter_child_nodes(node)), default=1 << 60)


def _last(node: Any) -> int:
    own = getattr(node, "end_lineno", None)
    return own if own is not None else max(map(_last, ast.iter_child_nodes(node)), default=-1)


def _in_body(loop: Any, line: int) -> bool:
    """Does a line stand in what a loop repeats, rather than in its head or its `else`?"""
    return any(_first(one) <= line <= _last(one) for one in loop.body)


class _Rewriting(ast.NodeTransformer):
    """Rewrites the loop, and what stands around it.

    Args:
        file: For an error's sentence.
        loop: The loop.
        way: The statements that hold it, from the outside in.
        kept: Ids of the `with` and `try` statements that are not left with the loop.
    """

    def __init__(self, file: str, loop: ast.AST | None, way: Sequence[ast.AST], kept: Iterable[int]) -> None:
        self._file, self._loop, self._kept = file, loop, set(kept)
        self._function: Any = next((node for node in reversed(way) if isinstance(node, _SCOPES)), None)

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        if id(node) in self._kept:
            for item in node.items:
                names = BoundNames([item.context_expr])
                if names.bound or names.suspends:
                    continue
                made = ast.copy_location(_lambda(item.context_expr), item.context_expr)
                item.context_expr = ast.copy_location(_ask("kept", made), item.context_expr)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        self.generic_visit(node)
        if id(node) not in self._kept:
            return node
        if node.handlers:
            passed = ast.ExceptHandler(type=_attribute("Left"), name=None, body=[ast.Raise()])
            node.handlers.insert(0, ast.copy_location(passed, node))
        if node.finalbody:
            stays = ast.If(test=ast.UnaryOp(ast.Not(), _ask("leaving")), body=node.finalbody, orelse=[])
            node.finalbody = [ast.copy_location(stays, node.finalbody[0])]
        return node

    def visit_For(self, node: ast.For) -> Any:
        if node is not self._loop:
            return self.generic_visit(node)
        inner = ast.For(target=node.target, iter=ast.Tuple([_load(_ITEM)], ast.Load()), body=node.body, orelse=[])
        return self._replaced(node, node.iter, inner, [node.target, *node.body])

    def visit_While(self, node: ast.While) -> Any:
        if node is not self._loop:
            return self.generic_visit(node)
        over = ast.If(test=ast.UnaryOp(ast.Not(), node.test), body=[ast.Return(_attribute("OVER"))], orelse=[])
        endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        body = node.body if endless else [ast.copy_location(over, node), *node.body]
        inner = ast.For(
            target=ast.Name(_ITEM, ast.Store()), iter=ast.Tuple([_load(_ITEM)], ast.Load()), body=body, orelse=[]
        )
        return self._replaced(node, None, inner, [node.test, *node.body])

    def _replaced(self, node: Any, items: ast.expr | None, inner: ast.For, binding: Sequence[ast.AST]) -> list[ast.AST]:
        function = self._function
        if isinstance(function, ast.ClassDef):
            raise self._refused(node, "stands in the body of a class")
        names = BoundNames([*binding, *([] if items is None else [items])])
        if names.suspends:
            raise self._refused(node, "has a yield or an await in it")
        if names.everything:
            raise self._refused(node, "has an `import *` in it")
        scope = None if function is None else BoundNames(_inside(function))
        globals_, locals_ = _shared(names, scope)
        returns = _OfBody(function)
        inner.body = [returns.visit(one) for one in inner.body]
        inner.orelse = [ast.Return(ast.Constant(None))]
        shared = _declared(globals_, locals_)
        body = _function(_BODY, [_ITEM], [*shared, inner, ast.Return(_attribute("BROKEN"))])
        drawn: ast.expr = ast.Constant(None)
        made: list[ast.AST] = [body]
        if items is not None:
            bound = BoundNames([items])
            own = _declared([n for n in globals_ if n in bound.bound], [n for n in locals_ if n in bound.bound])
            made.append(_function(_ITEMS, [], [*own, ast.Return(items)]))
            drawn = _load(_ITEMS)
        end = ast.Assign([ast.Name(_END, ast.Store())], _ask("loop", drawn, _load(_BODY)))
        made.append(end)
        if returns.found:
            left = _compared(_attribute("value", of=_load(_END)), ast.IsNot(), _attribute("NOTHING"))
            back = ast.Return(ast.Subscript(_attribute("value", of=_load(_END)), ast.Constant(0), ast.Load()))
            made.append(ast.If(test=left, body=[back], orelse=[]))
        if node.orelse:
            whole = ast.UnaryOp(ast.Not(), _attribute("broken", of=_load(_END)))
            made.append(ast.If(test=whole, body=[self.visit(one) for one in node.orelse], orelse=[]))
        if function is not None and locals_ and scope is not None:
            own_names: list[ast.expr] = [ast.Name(name, ast.Store()) for name in locals_ if name not in scope.outer]
            if own_names:  # never run: it makes them the function's, as the loop did
                made.append(ast.If(test=ast.Constant(0), body=[ast.Assign(own_names, ast.Constant(None))], orelse=[]))
        return [ast.copy_location(one, node) for one in made]

    def _refused(self, node: Any, why: str) -> FactoryError:
        return FactoryError(f"the training loop at {self._file}:{node.lineno} {why}: its body cannot be replayed alone")


class _OfBody(ast.NodeTransformer):
    """What reads otherwise in a function of its own: `return`, `global`, an annotation, `super()`.

    Args:
        function: The one that the loop stands in; None at the top of a module.
    """

    def __init__(self, function: Any) -> None:
        self.found = False
        arguments = [] if function is None else [*function.args.posonlyargs, *function.args.args]
        self._first = arguments[0].arg if arguments else None

    def visit(self, node: ast.AST) -> Any:
        """Returns what stands in a node's place."""
        if isinstance(node, _SCOPES):
            return node
        self.generic_visit(node)
        match node:
            case ast.Return():
                self.found = True
                value = node.value if node.value is not None else ast.Constant(None)
                node.value = ast.copy_location(_ask("returned", value), node)
            case ast.Global() | ast.Nonlocal():
                return ast.copy_location(ast.Pass(), node)
            case ast.AnnAssign(target=ast.Name()):
                plain = ast.Pass() if node.value is None else ast.Assign([node.target], node.value)
                return ast.copy_location(plain, node)
            case ast.Call(func=ast.Name(id="super"), args=[], keywords=[]) if self._first is not None:
                node.args = [ast.copy_location(_load(name), node) for name in ("__class__", self._first)]
        return node


def _inside(function: Any) -> list[ast.AST]:
    if isinstance(function.body, list):
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        return [*(ast.Name(one.arg, ast.Store()) for one in named if one is not None), *function.body]
    return [function.body]


def _shared(names: BoundNames, scope: BoundNames | None) -> tuple[list[str], list[str]]:
    """Returns the names that the body binds, those of the module and those of the function that it stands in."""
    if scope is None:
        return list(names.bound), []
    declared = scope.declared
    return [n for n in names.bound if n in declared], [n for n in names.bound if n not in declared]


def _declared(globals_: list[str], locals_: list[str]) -> list[ast.stmt]:
    made: list[ast.stmt] = []
    if globals_:
        made.append(ast.Global(globals_))
    if locals_:
        made.append(ast.Nonlocal(locals_))
    return made


def _function(name: str, arguments: Sequence[str], body: list[ast.stmt]) -> ast.FunctionDef:
    taken = ast.arguments(
        posonlyargs=[], args=[ast.arg(one) for one in arguments], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    made: dict[str, Any] = {"name": name, "args": taken, "body": body, "decorator_list": []}
    if "type_params" in ast.FunctionDef._fields:
        made["type_params"] = []
    return ast.FunctionDef(**made)


def _lambda(value: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]), value)


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _attribute(name: str, of: ast.expr | None = None) -> ast.Attribute:
    return ast.Attribute(_load(SEAM) if of is None else of, name, ast.Load())


def _ask(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_attribute(name), list(arguments), [])


def _compared(left: ast.expr, how: ast.cmpop, right: ast.expr) -> ast.Compare:
    return ast.Compare(left, [how], [right])


def _renamed(code: CodeType, of: CodeType | None = None) -> CodeType:
    """Gives the code of the body, and of the items, the name of the function that it stands in."""
    if of is not None and code.co_name in (_BODY, _ITEMS):
        code = code.replace(co_name=of.co_name, co_qualname=of.co_qualname)
    inner = tuple(_renamed(one, code) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_consts=inner)
