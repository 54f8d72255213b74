"""A loop whose body is a function does what it did: each snippet is run as it is written, and rewritten."""

from __future__ import annotations

import ast
import textwrap
import traceback

import pytest
import torch

from ampdoctor.errors import FactoryError
from ampdoctor.replay.scripts.loop_hooks import LoopHooks, StopScript, entered
from ampdoctor.replay.scripts.rewriting import SEAM, Edits, loops_around, rewritten

LOOP = "# the loop"
IN_FUNCTIONS = {
    "break, and what is bound at it": """
        def f(xs):
            for i, x in enumerate(xs):  # the loop
                if x == 3:
                    break
            else:
                i = None
            return i, x
        """,
    "else in a loop around it": """
        def f(xs):
            seen = []
            for rows in (xs, xs[:2], xs):
                for x in rows:  # the loop
                    if x == 3:
                        break
                else:
                    continue
                seen.append(x)
            return seen
        """,
    "return out of nested loops": """
        def f(xs):
            for x in xs:  # the loop
                for y in xs:
                    if y == x + 1:
                        break
                    if x * y == 6:
                        return x, y
        """,
    "a walrus in a comprehension": """
        def f(xs):
            for x in xs:  # the loop
                ys = [last := y for y in range(x)]
            return last, ys
        """,
    "except as": """
        def f(xs):
            failed = []
            for x in xs:  # the loop
                try:
                    1 / (x - 2)
                except ZeroDivisionError as error:
                    failed.append(str(error))
                else:
                    fine = x
                finally:
                    last = x
            return failed, fine, last
        """,
    "del": """
        def f(xs):
            for x in xs:  # the loop
                y = x
                del y
            try:
                return y
            except UnboundLocalError:
                return "gone"
        """,
    "a function in the body": """
        def f(xs):
            made = []
            for x in xs:  # the loop
                def g(k, d=x):
                    return x * k + d
                made.append(g)
            return [g(2) for g in made], x
        """,
    "an annotation": """
        def f(xs):
            for x in xs:  # the loop
                y: int = x
                z: float
                z = y / 2
            return y, z
        """,
    "a match": """
        def f(xs):
            for x in [{"k": 1, "more": 2}, [1, 2, 3], (4,), "text"]:  # the loop
                match x:
                    case {"k": k, **rest}:
                        pass
                    case [first, *tail] as whole if len(tail) == 2:
                        pass
                    case str() as text:
                        pass
            return k, rest, first, tail, whole, text
        """,
    "global within the body": """
        count = 0
        def f(xs):
            for x in xs:  # the loop
                global count
                count += x
            return count, x
        """,
    "nonlocal within the body": """
        def f(xs):
            count = 0
            def g():
                for x in xs:  # the loop
                    nonlocal count
                    count += x
            g()
            return count
        """,
    "a method, private names, super": """
        class Base:
            def add(self, x):
                self.__total = getattr(self, "_Base__total", 0) + x
                return self.__total
        class Mine(Base):
            def add(self, x):
                return -super().add(x)
            def run(self, xs):
                __last = None
                for x in xs:  # the loop
                    __last = super().add(x)
                    self.__mine = __last
                return __last, self._Mine__mine
        def f(xs):
            return Mine().run(xs)
        """,
    "a while that is left by break": """
        def f(xs):
            i = 0
            while True:  # the loop
                i += 1
                if i < 3:
                    continue
                if i > 5:
                    break
            else:
                i = None
            return i
        """,
    "an unbound name": """
        def f(xs):
            for x in xs:  # the loop
                try:
                    late
                except NameError:
                    found = None
                if x == 3:
                    late = x
            return found, late
        """,
    "a loop in a with and a try": """
        import contextlib
        def f(xs):
            log = []
            @contextlib.contextmanager
            def noted(name):
                log.append(name)
                yield name
                log.append(f"/{name}")
            with noted("a") as a, noted("b"):
                try:
                    for x in xs:  # the loop
                        log.append(x)
                        if x == 3:
                            raise ValueError
                except ValueError:
                    log.append("caught")
                finally:
                    log.append("finally")
            return log, a
        """,
    "super() in the head of a with": """
        import contextlib
        class A:
            def held(self): return contextlib.nullcontext(2)
        class B(A):
            def g(self, xs):
                with super().held() as two:
                    for x in xs:  # the loop
                        two += x
                return two
        f = lambda xs: B().g(xs)
        """,
    "super() in the head of the loop": """
        class A:
            def left(self, xs): return xs[1:]
        class B(A):
            def g(self, xs):
                total = 0
                while super().left(xs):  # the loop
                    total += xs.pop()
                return total
            def h(self, xs): return [x for x in super(B, self).left(xs)]
        f = lambda xs: (B().h(xs), B().g(xs))
        """,
    "a with in a class": """
        import contextlib
        class A:
            held = contextlib.nullcontext(2)
            with held as two:
                def g(xs):
                    for x in xs:  # the loop
                        y = x
                    return y
                last = g([1, 2])
        f = lambda xs: A.last
        """,
}
AT_THE_TOP = {
    "names of the module": """
        total = 0
        for x in [1, 2, 3]:  # the loop
            y: int = x
            total += y
            def helper(k): return total + k
            if x == 2: continue
            squares = [z * z for z in range(x)]
        f = lambda xs: (total, x, y, helper(1), squares)
        """,
    "a future import and a docstring": '''
        """The docstring."""
        from __future__ import annotations
        def g(x: Undefined) -> Missing: return x
        for x in (1, 2):  # the loop
            def h(x: AlsoUndefined): return x
            del h
        f = lambda xs: (x, g(2), __doc__, g.__annotations__)
        ''',
}


def ran(code, name):
    """What `f` gives: its result, or the error with the user's lines."""
    space = {"__name__": "snippet", SEAM: LoopHooks(lambda *_: None)}
    try:
        exec(code, space)
        return repr(space["f"]([1, 2, 3, 4, 5]))
    except Exception as error:  # noqa: BLE001 - whatever the snippet raises is what it does
        lines = [(one.lineno, one.name) for one in traceback.extract_tb(error.__traceback__) if one.filename == name]
        return type(error), str(error), list(dict.fromkeys(lines))


def line_of(source):
    return next(number for number, line in enumerate(source.split("\n"), 1) if LOOP in line)


@pytest.mark.parametrize("snippet", [*IN_FUNCTIONS.values(), *AT_THE_TOP.values()], ids=[*IN_FUNCTIONS, *AT_THE_TOP])
def test_a_rewritten_loop_does_what_it_did(snippet):
    source = textwrap.dedent(snippet).lstrip("\n")
    line = line_of(source)
    edits = Edits(loop=line, calls=frozenset({line}))
    assert ran(rewritten(source, "snippet.py", edits), "snippet.py") == ran(
        compile(source, "snippet.py", "exec"), "snippet.py"
    )
    with pytest.raises((StopScript, FactoryError)):
        exec(
            rewritten(source + "\nf([1, 2, 3])\n", "snippet.py", edits), {SEAM: LoopHooks(stop), "__name__": "snippet"}
        )


def stop(items, body, frame):
    raise StopScript


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("yield x", "has a yield or an await in it"),
        ("y = [z async for z in x]", "has a yield or an await in it"),
        ("y = locals()['x']", r"reads names by text, with locals\(\)"),
    ],
)
def test_what_suspends_its_function_is_refused(body, why):
    source = f"async def f(xs):\n    for x in xs:\n        {body}\n"
    with pytest.raises(FactoryError, match=f"the training loop at train.py:2 {why}"):
        rewritten(source, "train.py", Edits(loop=2))


def test_what_stands_around_the_loop_is_not_left_with_it():
    source = textwrap.dedent("""
        import contextlib, io, torch
        log = []
        @contextlib.contextmanager
        def noted(name):
            log.append(name)
            try:
                yield
            finally:
                log.append(f"/{name}")
        def train():
            with noted("inner"), torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                for x in range(3):
                    log.append(x)
        def main():
            try:
                with noted("outer"):
                    train()
            except:
                log.append("saved in a hurry")
            finally:
                log.append("closed")
        main()
    """)
    calls = frozenset(n for n, line in enumerate(source.split("\n"), 1) if line.strip() in ("train()", "main()"))
    loop = next(n for n, line in enumerate(source.split("\n"), 1) if "range(3)" in line)
    seam = LoopHooks(stop)
    space = {SEAM: seam, "__name__": "snippet"}
    with pytest.raises(StopScript):
        exec(rewritten(source, "snippet.py", Edits(loop=loop, calls=calls)), space)
    assert space["log"] == ["inner", "outer"][::-1]
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (True, False)
    with entered(seam.around):
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (False, True)
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (True, False)
    assert len(seam.held) == 2


@pytest.mark.parametrize(("line", "found"), [(3, [2]), (5, [4, 2]), (7, []), (8, [2]), (10, []), (12, [11]), (1, [])])
def test_the_loops_around_a_line(line, found):
    source = "x = 0\nfor a in b:\n    y\n    while c:\n        z\n    def g():\n        h\n    k\nelse:\n    m\n"
    source += "for a in b:\n    n\n"
    assert loops_around(ast.parse(source), line) == found
