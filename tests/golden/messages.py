"""``python -m tests.golden.messages``: write down every error message that paceline can raise.

Messages are read in the source, sorted by class and text, a line each: what a change does to
them shows as text in the file's difference. What stands between braces is worked out when the
error is raised. Tests of behaviour assert an error's class, and the key and the value that it
names; its sentences are reviewed here.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
FILE = Path(__file__).parent / "messages.txt"
HOPS = 2
"""How many calls away from the error its text may be made."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Messages:
    """The error messages in all modules of *source*."""

    def __init__(self, source: Path) -> None:
        self._functions: dict[str, list[Function]] = defaultdict(list)
        self._constants: dict[str, ast.expr] = {}
        self._calls: dict[str, list[tuple[ast.Call, Function | None]]]
        self._calls = defaultdict(list)
        bases: dict[str, set[str]] = {}
        for path in sorted(source.rglob("*.py")):
            tree = ast.parse(path.read_text())
            for statement in tree.body:
                if isinstance(statement, ast.Assign):
                    for target in statement.targets:
                        self._constants[_name_of(target)] = statement.value
            for node, scope in _scoped(tree, None):
                if isinstance(node, Function):
                    self._functions[node.name].append(node)
                elif isinstance(node, ast.ClassDef):
                    bases[node.name] = {_name_of(base) for base in node.bases}
                elif isinstance(node, ast.Call):
                    self._calls[_name_of(node.func)].append((node, scope))
        self._classes = {"PacelineError", "ValueError", "TypeError", "RuntimeError"}
        while more := {n for n, of in bases.items() if of & self._classes}:
            if more <= self._classes:
                break
            self._classes |= more

    def all(self) -> list[str]:
        """Each message with its class, sorted."""
        found = {
            f"{name}: {text}"
            for name in self._classes
            for call, scope in self._calls[name]
            for argument in call.args[:1]
            for text in self._texts(argument, scope, HOPS)
        }
        return sorted(found)

    def _texts(
        self, node: ast.expr, scope: Function | None, hops: int
    ) -> Iterator[str]:
        """What an error's text may be; followed to where it is made."""
        if isinstance(node, ast.IfExp):
            yield from self._texts(node.body, scope, hops)
            yield from self._texts(node.orelse, scope, hops)
            return
        sources = list(self._sources(node, scope)) if hops else []
        if not sources:
            yield " ".join(_shown(node).split())
        for source, its_scope in sources:
            yield from self._texts(source, its_scope, hops - 1)

    def _sources(
        self, node: ast.expr, scope: Function | None
    ) -> Iterator[tuple[ast.expr, Function | None]]:
        """The expressions that a name, or a call, stands for."""
        if isinstance(node, ast.Name):
            if scope is not None:
                yield from ((value, scope) for value in _assigned(node.id, scope))
                yield from self._passed(node.id, scope)
            if node.id in self._constants:
                yield self._constants[node.id], None
        elif isinstance(node, ast.Call) and _name_of(node.func) != "str":
            for function in self._functions[_name_of(node.func)]:
                for inner in ast.walk(function):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        yield inner.value, function

    def _passed(
        self, name: str, function: Function
    ) -> Iterator[tuple[ast.expr, Function | None]]:
        """What callers pass as argument *name* of *function*."""
        names = [argument.arg for argument in function.args.args]
        if name not in names:
            return
        place = names.index(name) - (names[0] in ("self", "cls"))
        for call, scope in self._calls[function.name]:
            by_name = [word.value for word in call.keywords if word.arg == name]
            for value in by_name or call.args[place : place + 1]:
                yield value, scope


def _scoped(
    node: ast.AST, scope: Function | None
) -> Iterator[tuple[ast.AST, Function | None]]:
    """Everything below *node*, each with the function that it stands in."""
    yield node, scope
    if isinstance(node, Function):
        scope = node
    for child in ast.iter_child_nodes(node):
        yield from _scoped(child, scope)


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _assigned(name: str, scope: Function) -> Iterator[ast.expr]:
    """What a function assigns to *name*."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and name in map(_name_of, node.targets):
            yield node.value


def _shown(node: ast.expr) -> str:
    """An expression as a message, with braces around what is worked out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_shown, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _shown(node.left) + _shown(node.right)
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    return "{" + ast.unparse(inner) + "}"


def messages() -> list[str]:
    """All messages in which there is a word that is not worked out."""
    outside = re.compile(r"\{[^{}]*\}")
    return [
        m
        for m in Messages(SOURCE).all()
        if re.search("[a-z]", outside.sub("", m.split(": ", 1)[1]))
    ]


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in messages()))
