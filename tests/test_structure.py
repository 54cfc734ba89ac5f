"""The house rules that a machine can check: who may import whom, and what."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "paceline"

# Low to high: a module imports its own level's package and what is below.
LEVELS = [
    {"errors"},
    {"clipping", "units"},
    {"hooks", "launchers", "options", "ring_sum", "spec", "torch_private"},
    {"instruments", "lifelines", "messages", "tensors", "network"},
    {"interfaces"},
    {"context", "fusion", "pieces", "profiling", "stopwatch"},
    {"sampler", "planning", "stand_ins"},
    {"methods", "settings", "updater", "weights"},
    {"server"},
    {"collectives", "loading"},
    {"report", "startup", "exchange", "guards", "sent", "same_data"},
    {"worlds"},
    {"training", "probe"},
    {"optimizer"},
    {"distributing", "checkpoint"},
    {"api"},
    {"testing", "cli"},
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
METHODS_MAY_IMPORT = {
    *("errors", "spec", "messages", "interfaces", "tensors", "fusion", "methods"),
}
FILES = sorted(SOURCE.rglob("*.py"))


def part_of(path):
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def imports_of(path):
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def paceline_parts(path):
    for name in imports_of(path):
        words = name.split(".")
        if words[0] == "paceline" and len(words) > 1 and words[1] in LEVEL_OF:
            yield words[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_downwards(path):
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    for imported in paceline_parts(path):
        assert imported == part or LEVEL_OF[imported] < LEVEL_OF[part], (
            f"{part} (level {LEVEL_OF[part]}) imports {imported}"
        )


@pytest.mark.parametrize("path", sorted((SOURCE / "methods").rglob("*.py")), ids=str)
def test_methods_see_their_comm_and_nothing_else(path):
    assert set(paceline_parts(path)) <= METHODS_MAY_IMPORT
    forbidden = {"torch.distributed", "socket", "time", "os", "random", "threading"}
    assert forbidden.isdisjoint(imports_of(path))


def test_private_names_of_torch_live_in_one_file():
    for path in FILES:
        if path.name == "torch_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            private = isinstance(node, ast.Attribute) and node.attr.startswith("_")
            if private and not node.attr.endswith("__"):  # __file__ is everybody's
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                is_torch = isinstance(root, ast.Name) and root.id in ("torch", "dist")
                assert not is_torch, f"{path}:{node.lineno} uses torch's {node.attr}"
        assert not any(".torch._" in f".{name}" for name in imports_of(path)), path


def test_nothing_is_unpickled_from_a_network():
    """torch's object collectives pickle what they send."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                pickles = node.attr.endswith(("_object", "_object_list"))
                assert not pickles, f"{path}:{node.lineno} uses {node.attr}"


def test_every_part_has_a_level():
    parts = {part_of(path) for path in FILES} - {"__init__", "__main__"}
    assert parts == set(LEVEL_OF)
