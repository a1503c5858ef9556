"""The shape of the package: rooms that import only from rooms before them, small files, short ways between them."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
# A room imports only from rooms before it.
ROOMS = [
    *("errors", "_lazy", "reasons", "config", "context", "nested", "batch", "graph", "fused"),
    *(
        "distributed",
        "manager",
        "module",
        "optimizing",
        "training",
        "checking",
        "attention",
        "spec_decode",
        "integrations",
    ),
]
# The doors of the package see every room, and no room sees them.
DOORS = {"__init__", "__main__", "_version"}


FILES = [
    path.relative_to(ROOT) for package in ("simplegraph", "bench") for path in sorted((ROOT / package).rglob("*.py"))
]
PACKAGE = [path for path in FILES if path.parts[0] == "simplegraph"]


class Source(NamedTuple):
    """What is asked of a file; its tree is not kept, whose nodes every later garbage collection would visit.

    Attributes:
        imports: every (module, name), also under TYPE_CHECKING and inside functions; a module has no name.
        classes: every class's name and number of lines.
        docstring: the file's own.
    """

    imports: list[tuple[str, str]]
    classes: list[tuple[str, int]]
    docstring: str | None


@functools.cache
def read(path: Path) -> Source:
    """Read a file of the package or the benchmarks."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    classes = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in nodes]
    return Source(imported_names(tree), classes, ast.get_docstring(tree))


def room(path: Path) -> str:
    """The folder, or the file at the top level, that a file of the package belongs to."""
    return path.with_suffix("").parts[1]


def file_of(module: str) -> Path | None:
    """The package's file that a dotted name stands for; None if it is no module of the package."""
    path = Path(*module.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found in PACKAGE), None)


def home_of(door: str, name: str) -> Path | None:
    """The file that a door imports a name from at its first use; None for the door's own names."""
    stub = ROOT.joinpath(*door.split("."), "__init__.pyi")
    lines = imported_names(ast.parse(stub.read_text(encoding="utf-8"))) if stub.exists() else []
    return next((file_of(module) for module, known in lines if known == name), None)


def imported_names(tree: ast.AST) -> list[tuple[str, str]]:
    """Return every (module, name) that is imported; see `Source`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


@functools.cache
def imported_files(path: Path) -> frozenset[Path]:
    """The package's other files that a file imports."""
    names = read(path).imports
    files = (file_of(f"{module}.{name}") or home_of(module, name) or file_of(module) for module, name in names)
    return frozenset(file for file in files if file not in (None, path))


def classes(paths: list[Path]) -> list[tuple[Path, str, int]]:
    """Return every class of these files: its file, its name and its number of lines."""
    return [(path, *found) for path in paths for found in read(path).classes]


@pytest.mark.parametrize(("package", "most"), [("simplegraph", 8), ("bench", 6)])
def test_little_lies_loose_at_the_top_level(package: str, most: int) -> None:
    assert len(loose := [path.name for path in FILES if path.parent == Path(package)]) <= most, loose


def test_every_folder_says_what_lives_there() -> None:
    for folder in sorted({path.parent for path in FILES}):
        assert (init := folder / "__init__.py") in FILES, f"{folder} has no __init__.py"
        assert read(init).docstring, f"{init} has no docstring"


def test_no_file_is_above_400_lines() -> None:
    lengths = {str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: lines for path, lines in lengths.items() if lines > 400} == {}


def test_no_class_is_above_250_lines() -> None:
    lengths = {f"{path}: {name}": lines for path, name, lines in classes(FILES)}
    assert {name: lines for name, lines in lengths.items() if lines > 250} == {}


def test_no_two_classes_have_one_name() -> None:
    homes = collections.defaultdict(list)
    for path, name, _ in classes(PACKAGE):
        homes[name].append(str(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_no_import_goes_in_a_circle() -> None:
    try:
        graphlib.TopologicalSorter({path: imported_files(path) for path in PACKAGE}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(str(path) for path in reversed(error.args[1])))


def test_no_chain_of_imports_is_long() -> None:
    """Ten files at most; an ``__init__`` is passed through and not counted."""

    @functools.cache
    def longest(path: Path) -> tuple[Path, ...]:
        below = max(map(longest, imported_files(path)), key=len, default=())
        return below if path.name == "__init__.py" else (path, *below)

    order = graphlib.TopologicalSorter({path: imported_files(path) for path in PACKAGE}).static_order()
    chain = max(map(longest, order), key=len)  # each file after those it imports
    assert len(chain) <= 10, " imports ".join(map(str, chain))


def test_a_room_imports_only_from_rooms_before_it() -> None:
    inside = [path for path in PACKAGE if room(path) not in DOORS]
    assert {room(path) for path in inside} <= set(ROOMS)
    wrong = {
        f"{path} imports {file}"
        for path in inside
        for file in imported_files(path)
        if room(file) in DOORS or ROOMS.index(room(file)) > ROOMS.index(room(path))
    }
    assert sorted(wrong) == []


def test_what_a_room_keeps_to_itself_is_imported_by_no_other() -> None:
    wrong = [
        f"{path} imports {module}.{name}"
        for path in PACKAGE
        if room(path) not in DOORS
        for module, name in read(path).imports
        if (file := file_of(f"{module}.{name}") or file_of(module)) and room(file) != room(path)
        if any(part.startswith("_") for part in (*module.split(".")[2:], name))
    ]
    assert wrong == []


def test_what_shape_will_run_is_decided_without_torch() -> None:
    todo, seen = [path for path in PACKAGE if room(path) == "batch"], set()
    while todo:
        path = todo.pop()
        seen.add(path)
        assert not [module for module, _ in read(path).imports if module.split(".")[0] == "torch"], path
        todo += imported_files(path) - seen
