"""The shape of the package: rooms that import only from rooms before them, small files, short ways between them."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.reasons import Reason

ROOT = Path(__file__).parent.parent
# Rooms of the core. A room imports only from rooms before it.
CORE = ["base", "batch", "device", "program", "distributed", "manager", "guard", "call", "serve"]
# Extras, which the core would not miss.
EXTRAS = ["fused", "training", "attention", "spec_decode", "doctor", "sleeping", "integrations"]
SETTINGS, REASONS = 23, 40
ROOMS = ["base", "_lazy", *CORE[1:], *EXTRAS]
# The core names no library but torch, NumPy, Triton (whose launches are watched) and tqdm.
LIBRARIES = re.compile(r"transformers|peft|diffusers|vllm|flashinfer|flash_attn|timm|sglang", re.IGNORECASE)
# The doors of the package see every room, and no room sees them.
DOORS = {"__init__", "__main__", "_version"}


FILES = [
    path.relative_to(ROOT) for package in ("simplegraph", "bench") for path in sorted((ROOT / package).rglob("*.py"))
]
PACKAGE = [path for path in FILES if path.parts[0] == "simplegraph"]


class Source(NamedTuple):
    """What is asked of a file; its tree is not kept, whose nodes every later garbage collection would visit.

    Attributes:
        imports: every (module, name), also under TYPE_CHECKING and inside functions; a module has no name. A string
            that is the dotted name of a module of this package counts as an import of it.
        libraries: libraries of other people that its code names, in imports, names and strings.
        classes: every class's name.
        docstring: the file's own.
    """

    imports: list[tuple[str, str]]
    classes: list[str]
    docstring: str | None
    libraries: frozenset[str]


@functools.cache
def read(path: Path) -> Source:
    """Read a file of the package or the benchmarks."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    strings = list(strings_of(tree))
    named = [(string, "") for string in strings if re.fullmatch(r"simplegraph(\.\w+)+", string) and file_of(string)]
    imports = imported_names(tree)
    words = [*strings, *(f"{module}.{name}" for module, name in imports if not module.startswith("simplegraph"))]
    words += [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    libraries = frozenset(found.lower() for word in words for found in LIBRARIES.findall(word))
    return Source([*imports, *named], classes, ast.get_docstring(tree), libraries)


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


def strings_of(tree: ast.AST) -> Iterator[str]:
    """Yield every string in the code that is no docstring, the parts of formatted ones included."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    docstrings = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node)
    }  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@functools.cache
def imported_files(path: Path) -> frozenset[Path]:
    """The package's other files that a file imports."""
    names = read(path).imports
    files = (file_of(f"{module}.{name}") or home_of(module, name) or file_of(module) for module, name in names)
    return frozenset(file for file in files if file not in (None, path))


@pytest.mark.parametrize(("package", "most"), [("simplegraph", 3), ("bench", 6)])
def test_little_lies_loose_at_the_top_level(package: str, most: int) -> None:
    assert len(loose := [path.name for path in FILES if path.parent == Path(package)]) <= most, loose


def test_every_folder_says_what_lives_there() -> None:
    for folder in sorted({path.parent for path in FILES}):
        assert (init := folder / "__init__.py") in FILES, f"{folder} has no __init__.py"
        assert read(init).docstring, f"{init} has no docstring"


FOLDERS = sorted({path.parent for path in PACKAGE} - {Path("simplegraph")})


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_folder_lists_its_files_and_no_others(folder: Path) -> None:
    """Who looks for something begins with the folder's own page."""
    listed = set(re.findall(r"^ *(\w+)  +\S", read(folder / "__init__.py").docstring or "", flags=re.MULTILINE))
    files = {path.stem for path in PACKAGE if path.parent == folder} - {"__init__"}
    folders = {path.name for path in FOLDERS if path.parent == folder}
    assert listed == files | folders


def test_the_package_has_few_settings_and_reasons() -> None:
    assert len(CudaGraphConfig.__dataclass_fields__) <= SETTINGS
    assert len(Reason) <= REASONS


def test_no_two_classes_have_one_name() -> None:
    homes = collections.defaultdict(list)
    for path in PACKAGE:
        for name in read(path).classes:
            homes[name].append(str(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_one_file_of_the_package_is_called_operators() -> None:
    """Four files of that name meant four things."""
    assert [str(path) for path in PACKAGE if path.name == "operators.py"] == ["simplegraph/base/operators.py"]


def test_no_import_goes_in_a_circle() -> None:
    try:
        graphlib.TopologicalSorter({path: imported_files(path) for path in PACKAGE}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(str(path) for path in reversed(error.args[1])))


def test_no_chain_of_imports_is_long() -> None:
    """Twelve files at most; doors, an ``__init__`` and the room that everybody needs are not counted."""

    @functools.cache
    def longest(path: Path) -> tuple[Path, ...]:
        below = max(map(longest, imported_files(path)), key=len, default=())
        uncounted = path.name == "__init__.py" or room(path) in {*DOORS, "base"}
        return below if uncounted else (path, *below)

    order = graphlib.TopologicalSorter({path: imported_files(path) for path in PACKAGE}).static_order()
    chain = max(map(longest, order), key=len)  # each file after those it imports
    assert len(chain) <= 12, " imports ".join(map(str, chain))


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


def test_an_import_by_a_string_is_seen(tmp_path: Path) -> None:
    """`importlib.import_module`, and tables of names to be imported later, are imports like others."""
    late = tmp_path / "late.py"
    late.write_text(
        'TABLE = {"x": "simplegraph.training.runner"}\nmodule = import_module("simplegraph.attention.cache")\n'
    )
    found = {str(file) for file in imported_files(late)}
    assert found == {"simplegraph/training/runner.py", "simplegraph/attention/cache.py"}


def test_the_core_names_no_library_of_other_people(tmp_path: Path) -> None:
    named = {str(path): sorted(read(path).libraries) for path in PACKAGE if room(path) in CORE and read(path).libraries}
    assert named == {}
    knowing = tmp_path / "knowing.py"
    knowing.write_text('"""Says transformers."""\nimport peft.tuners\nloaded = "vllm.attention" in sys.modules\n')
    assert read(knowing).libraries == {"peft", "vllm"}


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
