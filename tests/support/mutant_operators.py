"""Random mutants of the source: each is one change to one line.

The operators are cosmic-ray's. Lines that no test needs to hold have no mutants: texts of
errors, annotations, logs, pictures.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import random
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = Path("src/paceline")
PICTURES = SOURCE / "tools/report/charts.py"
LOGGING = ("log", "print", "warn")
MUTABLE = re.compile(
    r"\d|[-+*/%&|^<>=~@]|\b(and|or|not|if|in|is|for|while|break|continue)\b"
)


@cache
def ignored(path: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans of a file that no test needs to hold: errors, annotations, logs."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        span: ast.AST | None = None
        match node:
            case (
                ast.FunctionDef(name="__repr__")
                | ast.Raise()
                | ast.Expr(value=ast.Constant())
            ):
                span = node
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                span = node
            case ast.FunctionDef():
                span = node.returns
            case ast.arg() | ast.AnnAssign():
                span = node.annotation
            case ast.Assign(
                value=ast.Subscript() | ast.BinOp(op=ast.BitOr()), col_offset=0
            ):
                span = node  # an alias of types
            case ast.Expr(
                value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))
            ):
                span = node if name in LOGGING else None
        if span is not None:
            end = span.end_lineno, span.end_col_offset
            found.append(((span.lineno, span.col_offset), end))
    return found


@cache
def nodes(path: Path) -> list:
    """All nodes of a file as cosmic-ray parses it."""
    from cosmic_ray.ast import ast_nodes, get_ast

    return list(ast_nodes(get_ast(path.read_text())))


@cache
def operators() -> dict[str, Any]:
    """All of cosmic-ray's that need no arguments, by name."""
    from cosmic_ray.plugins import get_operator, operator_names

    names = [name for name in sorted(operator_names()) if "/Variable" not in name]
    return {name.removeprefix("core/"): get_operator(name)() for name in names}


def mutations(
    path: Path, line: int
) -> dict[tuple[int, int], list[tuple[str, int, int]]]:
    """By position on a line: operator, index of the node, index of its mutation."""
    found = defaultdict(list)
    for number, node in enumerate(nodes(path)):
        if node.start_pos[0] <= line <= node.end_pos[0]:
            for name, operator in operators().items():
                for index, (begin, _) in enumerate(operator.mutation_positions(node)):
                    found[begin].append((name, number, index))
    spans = ignored(path)
    return {
        begin: choices
        for begin, choices in found.items()
        if begin[0] == line and not any(a <= begin < b for a, b in spans)
    }


def mutated(path: Path, name: str, number: int, index: int) -> str | None:
    """The text of a file after one mutation; None if it is no other program."""
    node = nodes(path)[number]
    tree = nodes(path)[0]
    nodes.cache_clear()  # its tree is changed here
    others = node.parent.children
    place = next(i for i, child in enumerate(others) if child is node)
    # The * of keyword-only parameters is no product; a dotted exception has no one name.
    with contextlib.suppress(SyntaxError, AttributeError):
        others[place] = operators()[name].mutate(node, index)
        if others[place] is None:
            del others[place]
        text = tree.get_code()
        with warnings.catch_warnings():  # pytest makes `x is 0` an error
            warnings.simplefilter("error")
            compile(text, str(path), "exec")
        if ast.dump(ast.parse(text)) != ast.dump(ast.parse(path.read_text())):
            return text
    return None


def draw(count: int, seed: int) -> Iterator[dict]:
    """Mutants in random order, one a line. Changes elsewhere leave a line its place."""
    order = []
    for path in sorted((ROOT / SOURCE).rglob("*.py")):
        alike: Counter[str] = Counter()
        for line, text in enumerate(path.read_text().splitlines(), 1):
            alike[text] += 1
            name = f"{seed}:{path.relative_to(ROOT)}:{text}:{alike[text]}"
            if MUTABLE.search(text) and path != ROOT / PICTURES:
                order.append(
                    (hashlib.sha256(name.encode()).hexdigest()[:16], path, line)
                )
    for key, path, line in sorted(order):
        if count == 0:
            return
        choice = random.Random(key)
        if positions := mutations(path, line):
            name, *place = choice.choice(positions[choice.choice(sorted(positions))])
            if text := mutated(path, name, *place):
                count -= 1
                pairs = zip(
                    path.read_text().splitlines(), text.splitlines(), strict=False
                )
                before, after = next(pair for pair in pairs if pair[0] != pair[1])
                yield {
                    "key": key,
                    "file": path.relative_to(ROOT).as_posix(),
                    "line": line,
                    "operator": name,
                    "before": before.strip(),
                    "after": after.strip(),
                    "text": text,
                }
