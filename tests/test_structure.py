"""The house rules that a machine can check: who may import whom, and what.

`LAYERS` is the only list of layers; the table in docs/design.md is made from it.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from paceline.methods import METHODS

SOURCE = Path(__file__).parent.parent / "src" / "paceline"
DESIGN = SOURCE.parent.parent / "docs" / "design.md"

# Top to bottom: a module imports its own part, and what is below it.
LAYERS = [
    (
        "cli integrations testing",
        "verbs without logic; others' trainers; the conformance kit",
    ),
    ("api", "what scripts call beside `distribute`"),
    ("doctor", "what slows a training down, by name"),
    ("distributing", "`distribute`"),
    ("auto", "a training that changes its method"),
    ("plan", "which method a network and a model want, predicted in virtual time"),
    ("beginning checkpoint", "a training begins; what is saved of it"),
    ("optimizer", "what `distribute` gives back"),
    ("training probe", "hooks; what a network can do, measured"),
    ("worlds", "where workers live"),
    (
        "report sinks startup exchange guards sent same_data chosen",
        "results; equal starts; mistakes that would be silent; what a spec chooses",
    ),
    ("collectives loading", "schedules as data; the `Comm`s; loads"),
    ("aggregator", "sums formed beside a switch: state machines, sockets"),
    ("server", "the parameter server: state machine, parts, transport"),
    (
        "methods settings updater weights",
        "when workers agree; what users choose; the optimizer, bucket by bucket",
    ),
    (
        "planning profiling sampler stand_ins",
        "buckets found while training; times, measured; data dealt out; models that stand for others",
    ),
    (
        "compression context fusion pieces stopwatch",
        "what is sent; whose world this is; in which pieces gradients travel; what times",
    ),
    ("interfaces", "the seams"),
    (
        "instruments job lifelines messages network tensors watched",
        "what is counted; a script's trainings; whose process has ended; clusters and links; buckets; tensors that tell of their use",
    ),
    (
        "hooks launchers mesh_messages options python_private ring_sum spec torch_private",
        "small parts, each for itself",
    ),
    (
        "clipping patient_store timeouts units",
        "numbers; a store that nobody waits in; how long is waited",
    ),
    ("errors", "what is raised"),
]
LEVELS = [names.split() for names, _ in reversed(LAYERS)]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
METHODS_MAY_IMPORT = {
    *("errors", "spec", "messages", "interfaces", "tensors", "fusion", "methods"),
    "network",
    "units",
}
COMPRESSORS_MAY_IMPORT = {"errors", "spec", "interfaces", "compression"}
FORBIDDEN_TO_METHODS = {
    *("torch.distributed", "socket", "time", "os", "random", "threading"),
}
PRIVATE_NAMES_LIVE_IN = (
    *("torch_private.py", "python_private.py"),
    *("accelerate_private.py", "ray_private.py"),
)
PUBLIC = ("_exit", "_getframe", "_replace")
"""Python documents these."""
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports_of(path):
    """Every module that a file imports, anywhere in it."""
    names = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def part_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def paceline_parts(path):
    for name in imports_of(path):
        words = name.split(".")
        if words[0] == "paceline" and len(words) > 1 and words[1] in LEVEL_OF:
            yield words[1]


def test_every_part_has_a_layer():
    parts = {part_of(path) for path in FILES} - {"__init__", "__main__"}
    assert parts == set(LEVEL_OF)


def test_imports_point_downwards():
    upwards = [
        f"{path}: {part_of(path)} imports {imported}, which is no layer below it"
        for path in FILES
        if part_of(path) not in ("__init__", "__main__")
        for imported in paceline_parts(path)
        if imported != part_of(path) and LEVEL_OF[imported] >= LEVEL_OF[part_of(path)]
    ]
    assert not upwards


def test_the_design_shows_these_layers():
    table = ["| modules | what |", "|---|---|"]
    for names, what in LAYERS:
        table.append(f"| {', '.join(f'`{name}`' for name in names.split())} | {what} |")
    assert "\n".join(table) in DESIGN.read_text()


def test_methods_see_their_comm_and_nothing_else():
    for path in (path for path in FILES if part_of(path) == "methods"):
        assert set(paceline_parts(path)) <= METHODS_MAY_IMPORT, path
        assert FORBIDDEN_TO_METHODS.isdisjoint(imports_of(path)), path


def test_compressors_see_tensors_and_nothing_else():
    for path in (path for path in FILES if part_of(path) == "compression"):
        assert set(paceline_parts(path)) <= COMPRESSORS_MAY_IMPORT, path
        assert FORBIDDEN_TO_METHODS.isdisjoint(imports_of(path)), path


@cache
def foreign_names(path):
    """What a file calls the modules and objects that it has from elsewhere than here."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name).partition(".")[0] for a in node.names}
        elif (
            isinstance(node, ast.ImportFrom) and node.module.split(".")[0] != "paceline"
        ):
            names |= {alias.asname or alias.name for alias in node.names}
    return names - {"paceline"}


def root_of(node):
    """Where a chain of attributes and calls begins."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_private_names_of_torch_and_of_python_live_in_their_files():
    """Also at the end of a chain: ``torchrun.get_args_parser()._actions``."""
    found = [
        f"{path}:{node.lineno} uses {node.attr} of {root_of(node)}"
        for path in FILES
        if path.name not in PRIVATE_NAMES_LIVE_IN
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")  # __file__ is everybody's
        and node.attr not in PUBLIC
        and root_of(node) in foreign_names(path)
    ]
    found += [
        f"{path} imports {name}"
        for path in FILES
        if path.name not in PRIVATE_NAMES_LIVE_IN
        for name in imports_of(path)
        if ".torch._" in f".{name}"
    ]
    assert not found


def test_nothing_is_unpickled_from_a_network():
    """torch's object collectives pickle what they send."""
    found = [
        f"{path}:{node.lineno} uses {node.attr}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and node.attr.endswith(("_object", "_object_list"))
    ]
    assert not found


def test_nothing_mocks_but_tests():
    assert not [path for path in FILES if "unittest.mock" in imports_of(path)]


@pytest.mark.slow
def test_tests_look_at_an_optimizer_by_inspect_alone():
    """`paceline.testing.inspect` gives what they need: what is private may move."""
    private = ("_training", "_world", "_present")
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in nodes_of(path):
            where = f"{path}:{getattr(node, 'lineno', 0)}: use inspect(optimizer)"
            if isinstance(node, ast.Attribute) and node.attr in private:
                of_optimizer = ast.unparse(node.value) in ("optimizer", "wrapped")
                assert node.attr != "_training", where
                assert not of_optimizer, where
            if isinstance(node, ast.ImportFrom) and node.module == "paceline.optimizer":
                names = {alias.name for alias in node.names}
                assert names.isdisjoint({"training_of", "present_of"}), where


def test_what_stands_for_more_bytes_is_known_to_one_file():
    """The others ask `stands_in`, and make parts and copies with `stand_alike`."""
    assert [
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        if "stands_for_bytes" in path.read_text()
    ] == ["tensors.py"]


DEFAULT_METHOD = "bsp"
TABLES = ("testing/cases.py",)
"""A row for each method is there on purpose."""


def words_of(path):
    """Identifiers and texts of a file's code, without its documentation."""
    documentation = {
        id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)
    }
    for node in nodes_of(path):
        for field in ("id", "attr", "arg", "name", "asname"):
            yield getattr(node, field, None), node
        if isinstance(node, ast.Constant) and id(node) not in documentation:
            yield node.value, node


def test_nobody_but_methods_knows_one_by_name():
    """Lists of methods are made from the registry."""
    others = "|".join(METHODS.keys() - {DEFAULT_METHOD})
    named = re.compile(rf"(?<![a-z0-9])({others})(?![a-z0-9])", re.IGNORECASE)
    found = [
        f"{path}:{getattr(node, 'lineno', '')} says {word!r}"
        for path in FILES
        if part_of(path) != "methods"
        and path.relative_to(SOURCE).as_posix() not in TABLES
        for word, node in words_of(path)
        if isinstance(word, str) and named.search(word)
    ]
    assert not found
