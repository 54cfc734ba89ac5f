"""The house rules that a machine can check: who may import whom, and what."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from paceline.methods import METHODS

SOURCE = Path(__file__).parent.parent.parent / "src" / "paceline"
PARTS = {
    path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for path in SOURCE.rglob("*.py")
} - {"__init__", "__main__"}
METHODS_MAY_IMPORT = {
    *("errors", "spec", "interfaces", "methods"),
    *("units", "bucketing", "cluster"),
}
COMPRESSORS_MAY_IMPORT = {"errors", "spec", "interfaces", "compression"}
FORBIDDEN_TO_METHODS = {
    *("torch.distributed", "socket", "time", "os", "random", "threading"),
}
PRIVATE_NAMES_LIVE_IN = [
    SOURCE / "torch_internals.py",
    SOURCE / "runtimes" / "python_internals.py",
    # An integration is the one file that knows its framework's.
    SOURCE / "integrations" / "accelerate.py",
    SOURCE / "integrations" / "ray.py",
]
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


MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in FILES
}
MOST_PACKAGES, MOST_MODULES = 15, 8
"""At the top of the source."""


def modules_imported_by(path):
    """The modules of paceline that a file imports: at its top, in functions, for types."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
    return found & MODULES.keys()


def test_files_import_each_other_in_no_circle():
    """Take away the files that import none of those left, until none can be taken away."""
    left = {name: modules_imported_by(path) for name, path in MODULES.items()}
    while free := [name for name in left if left[name].isdisjoint(left)]:
        for name in free:
            del left[name]
    assert not left, "in a circle, or importing one"


def test_few_packages_and_modules_stand_at_the_top():
    packages = list(SOURCE.glob("*/__init__.py"))
    modules = [path for path in SOURCE.glob("*.py") if not path.stem.startswith("__")]
    assert len(packages) <= MOST_PACKAGES
    assert len(modules) <= MOST_MODULES


def test_the_page_on_the_server_shows_its_transitions_and_states(monkeypatch):
    monkeypatch.syspath_prepend(SOURCE.parents[1] / "website")
    import server_page

    fresh = server_page.PAGE.read_text() == server_page.page()
    fresh = fresh and server_page.PICTURE.read_text() == server_page.picture()
    assert fresh, "run: python website/server_page.py"


def test_the_picture_of_packages_shows_their_imports(monkeypatch):
    monkeypatch.syspath_prepend(SOURCE.parents[1] / "website")
    import package_picture

    fresh = package_picture.PICTURE.read_text() == package_picture.picture()
    assert fresh, "run: python website/package_picture.py"


MOST_LINES_OF_A_MAP = 30


def map_of(init):
    """The lines of a package's docstring that say what its modules are for."""
    text = ast.get_docstring(ast.parse(init.read_text())) or ""
    return [line for line in text.splitlines() if line.startswith("- `")]


@pytest.mark.parametrize(
    "init",
    sorted(SOURCE.glob("*/**/__init__.py")),
    ids=lambda init: init.parent.relative_to(SOURCE).as_posix(),
)
def test_a_package_s_docstring_names_its_modules_and_nothing_else(init):
    """In lines like "- `name`, `other`: what they are for", in reading order."""
    folder = init.parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    lines = map_of(init)
    # A name counts at the start of a line, or after "; " or ". ", before its colon.
    named = [
        name
        for line in lines
        for names in re.findall(r"(?:^- |; |\. )((?:`\w+`(?:, )?)+):", line)
        for name in re.findall(r"\w+", names)
    ]
    assert sorted(named) == sorted(modules), f"mend the list at the top of {init}"
    assert len(lines) <= MOST_LINES_OF_A_MAP


def part_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def paceline_parts(path):
    for name in imports_of(path):
        words = name.split(".")
        if words[0] == "paceline" and len(words) > 1 and words[1] in PARTS:
            yield words[1]


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
        if path not in PRIVATE_NAMES_LIVE_IN
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
        if path not in PRIVATE_NAMES_LIVE_IN
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


def expanded(pattern):
    """A pattern's alternatives: ``{a,b}.py`` is ``a.py`` and ``b.py``."""
    begin, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    choices, _, end = rest.partition("}")
    return [
        one for choice in choices.split(",") for one in expanded(begin + choice + end)
    ]


def test_the_list_of_files_without_docstrings_only_shrinks():
    """Each of its patterns matches a file that has something to mend."""
    root = SOURCE.parents[1]
    options = tomllib.loads((root / "pyproject.toml").read_text())
    listed = options["tool"]["ruff"]["lint"]["per-file-ignores"]
    google = 'lint.pydocstyle.convention="google"'
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--isolated",
            "--select=D",
            "--exit-zero",
        ]
        + [f"--config={google}", "--output-format=json", "src"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    faulty = {
        Path(one["filename"]).relative_to(root).as_posix()
        for one in json.loads(checked.stdout)
    }
    patterns = [
        pattern
        for key, rules in listed.items()
        if rules == ["D"] and key.startswith("src/")
        for pattern in expanded(key)
    ]
    folders = {path.as_posix() for one in faulty for path in Path(one).parents}
    assert [
        one for one in patterns if one.removesuffix("/**") not in faulty | folders
    ] == []


def test_nothing_mocks_but_tests():
    assert not [path for path in FILES if "unittest.mock" in imports_of(path)]


@pytest.mark.slow
def test_tests_look_at_an_optimizer_by_inspect_alone():
    """`paceline.testing.inspect` gives what they need: what is private may move."""
    private = ("_training", "_runtime", "_active")
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        for node in nodes_of(path):
            where = f"{path}:{getattr(node, 'lineno', 0)}: use inspect(optimizer)"
            if isinstance(node, ast.Attribute) and node.attr in private:
                of_optimizer = ast.unparse(node.value) in ("optimizer", "wrapped")
                assert node.attr != "_training", where
                assert not of_optimizer, where
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "paceline.core.optimizer"
            ):
                names = {alias.name for alias in node.names}
                assert names.isdisjoint({"training_of", "active_training"}), where


def test_what_stands_for_more_bytes_is_known_to_one_file():
    """The others ask `stands_in`, and make parts and copies with `stand_alike`."""
    assert [
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        if "stands_for_bytes" in path.read_text()
    ] == ["interfaces/buckets.py"]


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
