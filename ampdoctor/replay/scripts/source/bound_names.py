"""Which names a piece of code binds in the function, or the module, that it stands in."""

from __future__ import annotations

import ast
from collections.abc import Iterable

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SUSPENDING = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)


class BoundNames:
    """The names that code binds or deletes, as Python's own rules of scope have it.

    Args:
        nodes: The code.

    Attributes:
        bound: In the order in which they are met.
        declared: Those that a `global` statement in the code names.
        outer: Those that a `nonlocal` statement in the code names.
        suspends: The code has a `yield` or `await` of its own.
        everything: It imports `*`, so that what it binds is not known.
    """

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        self.bound: dict[str, None] = {}
        self.declared: set[str] = set()
        self.outer: set[str] = set()
        self.suspends = self.everything = False
        for node in nodes:
            self._look_at(node)

    def _look_at(self, node: ast.AST) -> None:
        self._name(node)
        if isinstance(node, _COMPREHENSIONS):
            self._comprehension(node)
            return
        self.suspends |= isinstance(node, _SUSPENDING)
        inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, FUNCTIONS):  # the rest of it is a scope of its own
            defaults = (one for one in (*node.args.defaults, *node.args.kw_defaults) if one is not None)
            inner = (*getattr(node, "decorator_list", ()), *defaults)
        elif isinstance(node, ast.ClassDef):
            inner = (*node.decorator_list, *node.bases, *node.keywords)
        for one in inner:
            self._look_at(one)

    def _name(self, node: ast.AST) -> None:
        """Note what a node itself binds."""
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                self._bind(name)
            case ast.MatchMapping(rest=str(name)):
                self._bind(name)
            case ast.Import(names=names):  # `import a.b` binds a
                self.bound |= {alias.asname or alias.name.partition(".")[0]: None for alias in names}
            case ast.ImportFrom(names=names):
                self.everything |= names[0].name == "*"
                self.bound |= {alias.asname or alias.name: None for alias in names}
            case ast.Global(names=declared):
                self.declared |= set(declared)
            case ast.Nonlocal(names=declared):
                self.outer |= set(declared)
            case ast.stmt() | ast.ExceptHandler() | ast.pattern():  # def, class; except as; case as
                self._bind(getattr(node, "name", None))

    def _bind(self, name: str | None) -> None:
        if name is not None:
            self.bound[name] = None

    def _comprehension(self, node: ast.AST) -> None:
        """Only a walrus in it binds outside of it."""
        for one in ast.walk(node):
            if isinstance(one, ast.NamedExpr):
                self._bind(one.target.id)
            self.suspends |= isinstance(one, ast.Await) or (isinstance(one, ast.comprehension) and bool(one.is_async))
