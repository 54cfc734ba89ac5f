"""Whether a script may add rows to paceline's registries: told from its text, without running it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

REGISTRIES = frozenset({"METHODS", "COMPRESSORS", "COLLECTIVES"})
APART = frozenset({"paceline", "torch", *sys.stdlib_module_names})
"""Packages that register nothing."""


def may_register(script: Path) -> bool:
    """Whether *script*, or a module that it imports, names a registry. Of modules that do not lie beside the
    script, their first file counts, as soon as it names paceline."""
    folder = script.resolve().parent
    left, seen = [script.resolve()], set[Path]()
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        tree = _tree(file)
        if any(_name(node) in REGISTRIES for node in ast.walk(tree)):
            return True
        for module in _imports(tree):
            beside = _beside(folder, module)
            if beside:
                left += beside
            elif _names_paceline(module.partition(".")[0]):
                return True
    return False


def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # whoever runs it says so
        return ast.Module([], [])


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.name if isinstance(node, ast.alias) else ""


def _imports(tree: ast.Module) -> Iterator[str]:
    """Modules by their full names, and what may be modules in a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield module
            yield from (f"{module}.{one.name}".strip(".") for one in node.names)


def _beside(folder: Path, module: str) -> list[Path]:
    """Files of a module in the script's folder: its own, and of the packages that it is in."""
    found: list[Path] = []
    at = folder
    for part in module.split(".") if module else []:
        files = (at / f"{part}.py", at / part / "__init__.py")
        found += [file for file in files if file.is_file()]
        at /= part
    return found


def _names_paceline(package: str) -> bool:
    if not package or package in APART:
        return False
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    tree = _tree(Path(spec.origin))
    return any(name.partition(".")[0] == "paceline" for name in _imports(tree))
