"""Rewrites a loop in the user's file: its body becomes a function of one item, with the loop's own variables.

    for TARGET in ITEMS:            def items(): return ITEMS
        BODY                        def body(item):
                                        nonlocal names that BODY binds
                                        for TARGET in (item,):
                                            BODY
                                    loop(items, body)

The draws, the bound variables and the line numbers stay the same. A loop over the single item keeps `continue` and
`break` valid.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ampdoctor.errors import FactoryError
from ampdoctor.replay.scripts.loop_hooks import LoopHooks
from ampdoctor.replay.user_files import is_users_file

# -- names that code binds in its function or module --

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SUSPENDING = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)


class BoundNames:
    """The names that code binds or deletes, by Python's own rules of scope."""

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        self.bound: dict[str, None] = {}  # in the order of the code
        self.declared: set[str] = set()  # in a `global` statement
        self.outer: set[str] = set()  # in a `nonlocal` statement
        self.suspends = self.everything = False  # has a `yield` or `await` of its own; has an `import *`
        self.by_text: set[str] = set()  # functions that it calls and that read variables by name
        for node in nodes:
            self._look_at(node)

    def _look_at(self, node: ast.AST) -> None:
        self._name(node)
        if isinstance(node, _COMPREHENSIONS):
            self._comprehension(node)
            return
        self.suspends |= isinstance(node, _SUSPENDING)
        inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, FUNCTIONS):  # the rest is a scope of its own
            defaults = (one for one in (*node.args.defaults, *node.args.kw_defaults) if one is not None)
            inner = (*getattr(node, "decorator_list", ()), *defaults)
        elif isinstance(node, ast.ClassDef):
            inner = (*node.decorator_list, *node.bases, *node.keywords)
        for one in inner:
            self._look_at(one)

    def _name(self, node: ast.AST) -> None:
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
            case ast.Call(func=ast.Name(id="locals" | "eval" | "exec" | "vars" | "dir" as name), args=args):
                self.by_text |= {name} if name not in ("vars", "dir") or not args else set()
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
        """Record a comprehension, where only a walrus binds a name outside."""
        for one in ast.walk(node):
            if isinstance(one, ast.NamedExpr):
                self._bind(one.target.id)
            self.suspends |= isinstance(one, ast.Await) or (isinstance(one, ast.comprehension) and bool(one.is_async))


# -- statements around a line --

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOOPS = (ast.For, ast.While)


def way_to(tree: ast.AST, line: int, end: tuple[type[ast.AST], ...] = ()) -> list[ast.AST]:
    """Returns the statements around a line, from the outside in, down to one of kind `end` that starts at the line."""
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
    """Returns the first lines of the loops around a line in its function, the innermost first."""
    found: list[int] = []
    for node in way_to(tree, line):
        if isinstance(node, SCOPES):
            found = []
        elif isinstance(node, LOOPS) and any(_first(one) <= line <= _last(one) for one in node.body) is not head:
            found.insert(0, node.lineno)
    return found


def is_within(file: str, line: int, loop_file: str, loop: int) -> bool:
    """Is a line in a loop or in a function defined in it? `loop_file` is a resolved path, `loop` its first line."""
    if os.path.realpath(file) != loop_file:
        return False
    return any(isinstance(one, LOOPS) and one.lineno == loop < line for one in _way_in(file, line))


def way_within(file: str, line: int, *, loop: int | None = None) -> list[ast.AST]:
    """Returns the statements around a line in its function, or in the loop that starts at line `loop`."""
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


SEAM = "__ampdoctor__"
"""The name, in a rewritten file's globals, of the `LoopHooks` that its rewritten parts call."""
_BODY, _ITEMS, _ITEM, _END = "__ampdoctor_body__", "__ampdoctor_items__", "__ampdoctor_item__", "__ampdoctor_end__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """The changes in one file."""

    loop: int | None = None  # the loop's first line; None if it is in another file
    calls: frozenset[int] = frozenset()  # lines that lead to the loop: `with` and `try` around them stay open
    everywhere: bool = False  # all `with` and `try` stay open, because these lines are not known yet


def rewritten(source: bytes | str, file: str, edits: Edits) -> CodeType:
    """Compiles a file, which keeps its name, with its edits."""
    try:
        tree = ast.parse(source, file)
    except (SyntaxError, ValueError) as error:
        if isinstance(error, SyntaxError) and error.filename:
            raise
        raise SyntaxError(str(error), (file, None, None, None)) from None  # for a NUL byte Python gives no place
    ways = [way_to(tree, line) for line in sorted(edits.calls)]
    loop, function = None, None
    if edits.loop is not None:
        *way, loop = way_to(tree, edits.loop, LOOPS)
        function = next((node for node in reversed(way) if isinstance(node, SCOPES)), None)
        ways.append(way)
    kept = (id(node) for one in ways for node in one if isinstance(node, ast.With | ast.Try))
    tree = _Rewriting(file, loop, function, None if edits.everywhere else set(kept)).visit(tree)
    return _renamed(compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True))


def _renamed(code: CodeType, of: CodeType | None = None) -> CodeType:
    """Gives the code of body and items the name of the function around them."""
    if of is not None and code.co_name in (_BODY, _ITEMS):
        code = code.replace(co_name=of.co_name, co_qualname=of.co_qualname)
    return code.replace(
        co_consts=tuple(_renamed(one, code) if isinstance(one, CodeType) else one for one in code.co_consts)
    )


class _Rewriting(ast.NodeTransformer):
    """Rewrites the loop, and `with` and `try` around it."""

    def __init__(self, file: str, loop: ast.AST | None, function: Any, kept: set[int] | None) -> None:
        self._file, self._loop, self._function, self._kept = file, loop, function, kept
        self._scope: Any = None

    def visit(self, node: ast.AST) -> Any:
        if node is self._loop:
            return self._parted(node)
        around, self._scope = self._scope, node if isinstance(node, SCOPES) else self._scope
        self.generic_visit(node)
        self._scope = around
        if self._kept is None or id(node) in self._kept:
            if isinstance(node, ast.With):
                _keep_contexts(node, self._scope, once=self._kept is None)
            elif isinstance(node, ast.Try):
                _keep_from_ending(node)
        return node

    def _parted(self, loop: Any) -> list[ast.AST]:
        """Returns the loop's replacement: functions for items and body, and code that uses them."""
        items = loop.iter if isinstance(loop, ast.For) else None
        head = [loop.test] if items is None else [loop.target, items]
        names = BoundNames([*head, *loop.body])
        self._check(loop, names)
        scope = BoundNames([] if self._function is None else _inside(self._function))
        of_module = self._function is None
        shared = [name for name in names.bound if of_module or name in scope.declared]
        own = [name for name in names.bound if name not in shared]
        body = _OfBody(self._function)
        made: list[ast.AST] = [_function(_BODY, [_ITEM], [*_declared(shared, own), *_one_round(loop, body)])]
        if items is not None:
            in_head = BoundNames([items]).bound
            declared = _declared([n for n in shared if n in in_head], [n for n in own if n in in_head])
            made.append(_function(_ITEMS, [], [*declared, ast.Return(body.visit(items))]))
        made.append(_bind(_END, _ask("loop", ast.Constant(None) if items is None else _load(_ITEMS), _load(_BODY))))
        if body.returns:
            value = ast.Subscript(_of_end("value"), ast.Constant(0), ast.Load())
            made.append(_if(ast.Compare(_of_end("value"), [ast.IsNot()], [ast.Constant(None)]), ast.Return(value)))
        if loop.orelse:
            made.append(_if(ast.UnaryOp(ast.Not(), _of_end("broken")), *(self.visit(one) for one in loop.orelse)))
        bound_here = [name for name in own if name not in scope.outer]
        if bound_here:  # never run: it makes the names local to the function, as the loop did
            made.append(_if(ast.Constant(0), *(_bind(name, ast.Constant(None)) for name in bound_here)))
        return [ast.copy_location(one, loop) for one in made]

    def _check(self, loop: Any, names: BoundNames) -> None:
        why = None
        if isinstance(self._function, ast.ClassDef):
            why = "stands in the body of a class"
        elif names.suspends:
            why = "has a yield or an await in it"
        elif names.everything:
            why = "has an `import *` in it"
        elif names.by_text - ({"eval"} if self._function is None else set()):  # of a module, all names are globals
            why = f"reads names by text, with {min(names.by_text)}()"
        if why is not None:
            raise FactoryError(f"the training loop at {self._file}:{loop.lineno} {why}: its body is no step of its own")


class _OfBody(ast.NodeTransformer):
    """Changes code for a function of its own: `return`, `global`, annotations, `super()`."""

    def __init__(self, function: Any) -> None:
        self.returns = False
        arguments = [*function.args.posonlyargs, *function.args.args] if isinstance(function, FUNCTIONS) else []
        self._first = arguments[0].arg if arguments else None

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (*SCOPES, ast.Lambda)):
            return node
        self.generic_visit(node)
        match node:
            case ast.Return():
                self.returns = True
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


def _one_round(loop: Any, of_body: _OfBody) -> list[ast.stmt]:
    body = [of_body.visit(one) for one in loop.body]
    target: ast.expr = ast.Name(_ITEM, ast.Store())
    if isinstance(loop, ast.For):
        target = loop.target
    elif not (isinstance(loop.test, ast.Constant) and loop.test.value):
        test = of_body.visit(loop.test)
        body.insert(0, ast.copy_location(_if(ast.UnaryOp(ast.Not(), test), ast.Return(_attribute("OVER"))), loop))
    once = ast.Tuple([_load(_ITEM)], ast.Load())
    return [ast.For(target, once, body, [ast.Return(ast.Constant(None))]), ast.Return(_attribute("BROKEN"))]


def _keep_contexts(node: ast.With, scope: Any, *, once: bool) -> None:
    """Let the seam make, enter and leave each context; with `once` the script makes it."""
    for item in node.items:
        names = BoundNames([item.context_expr])
        asked = _ask("kept_as_made", item.context_expr)
        # a function in the body of a class does not see the names of that body
        if not (once or names.bound or names.suspends or isinstance(scope, ast.ClassDef)):
            bare = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
            asked = _ask("kept", ast.Lambda(bare, _OfBody(scope).visit(item.context_expr)))
        item.context_expr = ast.copy_location(asked, item.context_expr)


def _keep_from_ending(node: ast.Try) -> None:
    if node.handlers:
        passed = ast.ExceptHandler(type=_attribute("StopScript"), name=None, body=[ast.Raise()])
        node.handlers.insert(0, ast.copy_location(passed, node))
    if node.finalbody:
        stays = _if(ast.UnaryOp(ast.Not(), _ask("leaving")), *node.finalbody)
        node.finalbody = [ast.copy_location(stays, node.finalbody[0])]


def _inside(function: Any) -> Sequence[ast.AST]:
    taken = function.args
    parameters = (*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg)
    return [*(ast.Name(one.arg, ast.Store()) for one in parameters if one is not None), *function.body]


def _declared(of_module: list[str], of_function: list[str]) -> list[ast.stmt]:
    made = [ast.Global(of_module)] if of_module else []
    return [*made, ast.Nonlocal(of_function)] if of_function else [*made]


def _function(name: str, arguments: Sequence[str], body: list[ast.stmt]) -> ast.FunctionDef:
    taken = [ast.arg(one) for one in arguments]
    made: dict[str, Any] = {
        "name": name,
        "args": ast.arguments(posonlyargs=[], args=taken, kwonlyargs=[], kw_defaults=[], defaults=[]),
        "body": body,
        "decorator_list": [],
        "type_params": [],  # from Python 3.12 on
    }
    return ast.FunctionDef(**{key: value for key, value in made.items() if key in ast.FunctionDef._fields})


def _if(test: ast.expr, *body: ast.stmt) -> ast.If:
    return ast.If(test, list(body), [])


def _bind(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _of_end(name: str) -> ast.Attribute:
    return ast.Attribute(_load(_END), name, ast.Load())


def _attribute(name: str) -> ast.Attribute:
    return ast.Attribute(_load(SEAM), name, ast.Load())


def _ask(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_attribute(name), list(arguments), [])


# -- the script as `__main__`, with modules of its own --

_MAIN = "__main__"


class MainModule:
    """One run of a script, without modules of its folder that an earlier run or the caller has loaded."""

    def __init__(
        self,
        file: Path,
        edits: Mapping[str, Edits],
        seam: LoopHooks,
        package: str | None,
        otherwise: Edits | None = None,
    ) -> None:
        self._file, self._seam = file, seam
        self._edits, self._otherwise = dict(edits), otherwise
        self._module = ModuleType(_MAIN)
        loader = SourceFileLoader(_MAIN, str(file))
        vars(self._module).update(
            {"__file__": str(file), "__cached__": None, "__loader__": loader, "__package__": package}
        )
        self._own: dict[str, ModuleType] = {_MAIN: self._module}
        self._others: dict[str, ModuleType] = {}
        self._inside = False

    def run(self) -> None:
        """Run the script to its end, or until it is left; raises SyntaxError if it is no Python."""
        namespace = vars(self._module)
        namespace[SEAM] = self._seam
        edits = self._edits.get(str(self._file), self._otherwise or Edits())
        code = rewritten(self._file.read_bytes(), str(self._file), edits)
        with self.in_place():
            exec(code, namespace)  # noqa: S102 the user's own script, as they asked

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, `sys.modules` holds this run's user modules; at exit it is restored."""
        if self._inside:
            yield
            return
        before = sys.modules.copy()
        unknown = [(name, module) for name, module in before.items() if self._others.get(name) is not module]
        hidden = [name for name, module in unknown if self._hides(name, module)]
        finder = _Finder(self._edits, self._otherwise, self._seam)
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(self._own)
        sys.meta_path.insert(0, finder)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            sys.meta_path.remove(finder)
            for name, module in sys.modules.copy().items():  # a finalizer may import meanwhile
                if before.get(name) is not module and (name == _MAIN or _is_users(module)):
                    self._own[name] = sys.modules.pop(name)
            sys.modules.update({name: before[name] for name in (*hidden, *self._own) if name in before})

    def _hides(self, name: str, module: Any) -> bool:
        """Would the script load this module anew, or another one with its name?"""
        if name == _MAIN:
            return False
        if not _is_users(module):
            self._others[name] = module  # cached: there are thousands, and each step comes here
            return False
        folder = str(self._file.parent) + os.sep
        top = folder + name.partition(".")[0]
        return module.__file__.startswith(folder) or Path(f"{top}.py").is_file() or Path(top, "__init__.py").is_file()


def _is_users(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_users_file(file)


class _Finder(MetaPathFinder):
    """Finds user files by the other finders, and loads them rewritten."""

    def __init__(self, edits: Mapping[str, Edits], otherwise: Edits | None, seam: LoopHooks) -> None:
        self._edits, self._otherwise, self._seam = edits, otherwise, seam

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                file = str(Path(spec.origin).resolve()) if spec.has_location and spec.origin else ""
                of_source = isinstance(spec.loader, SourceFileLoader) and is_users_file(file)
                edits = self._edits.get(file, self._otherwise if of_source else None)
                if edits is None:
                    return None  # the next finder finds it again
                spec.loader = _Loader(name, file, edits, self._seam)
                return spec
        return None


class _Loader(SourceFileLoader):
    def __init__(self, name: str, file: str, edits: Edits, seam: LoopHooks) -> None:
        super().__init__(name, file)
        self._file, self._edits, self._seam = file, edits, seam

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - the base's signature
        return rewritten(self.get_data(self._file), self._file, self._edits)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[SEAM] = self._seam
        super().exec_module(module)
