"""Functions are known by a digest of their text: what computes something else is never taken for a known one."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import linecache
import math
import pkgutil
import textwrap
import types
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from changed_texts import changed, from_source
from transformers.activations import NewGELUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from simplegraph.fused.layers.digests import DIGESTS
from simplegraph.fused.layers.texts import digest, known_name, with_names
from tests.fused.__main__ import main

PLACES = sorted(set(DIGESTS.values()))
NORM, GATE, GELU = LlamaRMSNorm.forward, LlamaMLP.forward, NewGELUActivation.forward
OPERATORS: dict[Any, Any] = {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.FloorDiv: ast.Mod, ast.USub: ast.UAdd}
OPERATORS |= {ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.Eq: ast.NotEq, ast.Not: ast.UAdd}


def installed(place: str) -> Any:
    pytest.importorskip(place.partition(".")[0])
    return pkgutil.resolve_name(place)


def tree_of(function: Any) -> Any:
    """The syntax tree of a function."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return node


@pytest.mark.parametrize("place", PLACES)
def test_functions_of_the_installed_libraries_are_known(place: str) -> None:
    assert known_name(installed(place)) == place.partition(":")[2]


def test_the_command_prints_the_digests_of_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["transformers.activations:QuickGELUActivation.forward", "transformers.activations:Gone.forward"])
    lines = capsys.readouterr().out.splitlines()
    known = {line for line in lines if line.endswith(",")}
    assert known
    assert known <= {f'"{each}": "{place}",' for each, place in DIGESTS.items()}
    assert [line.partition(": ")[2] for line in lines if line.endswith("# new")] == [
        '"transformers.activations:QuickGELUActivation.forward",  # new'
    ]
    assert any(line.startswith("# transformers.activations:Gone.forward is gone") for line in lines)


def test_layout_docstrings_annotations_and_decorators_make_no_other_function() -> None:
    described = changed(GATE, "(self, x):", "(\n    self, x: int = 0\n) -> int:\n    '''A text.'''  # and a comment\n")
    decorated = from_source(f"@(lambda function: function)\n{ast.unparse(tree_of(GATE))}", GATE)
    assert known_name(described) == known_name(decorated) == "LlamaMLP.forward"


def variants(node: Any) -> Iterator[str]:
    """Sources of a function that is changed in one place."""
    computing = node.body[1:] if ast.get_docstring(node) else list(node.body)
    for part in [part for statement in computing for part in ast.walk(statement)]:
        for name, value in changes(part):
            before = getattr(part, name)
            setattr(part, name, value)
            yield ast.unparse(node)
            setattr(part, name, before)
    for dropped in computing:
        node.body = [each for each in computing if each is not dropped] or [ast.Pass()]
        yield ast.unparse(node)


def changes(part: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of a part, and values with which it computes something else."""
    if isinstance(part, ast.Constant):
        yield "value", not part.value if part.value in (None, True, False) else part.value * 2
    elif isinstance(part, (ast.BinOp, ast.UnaryOp)) and type(part.op) in OPERATORS:
        yield "op", OPERATORS[type(part.op)]()
    elif isinstance(part, ast.Compare):
        yield "ops", [OPERATORS[type(part.ops[0])]()]
    elif isinstance(part, ast.Attribute):
        yield "attr", f"{part.attr}_"
    elif isinstance(part, ast.keyword):
        yield "arg", "another"
    elif isinstance(part, ast.Call) and len({*map(ast.dump, part.args)}) > 1:
        yield "args", part.args[::-1]
    elif isinstance(part, ast.Call) and part.keywords:
        yield "keywords", part.keywords[1:]


@pytest.mark.parametrize("place", PLACES)
def test_a_function_that_computes_something_else_is_unknown(place: str) -> None:
    function = inspect.unwrap(installed(place))
    assert known_name(from_source(ast.unparse(tree_of(function)), function)) == place.partition(":")[2]
    sources = list(variants(tree_of(function)))
    others = [from_source(source, function) for source in sources]
    assert [source for source, other in zip(sources, others, strict=True) if known_name(other)] == []
    assert all(map(digest, others))  # each was read


def replaced(function: Any, **parts: Any) -> Any:
    """A function with parts of its code replaced."""
    return types.FunctionType(function.__code__.replace(**parts), function.__globals__)


def calling_itself() -> Any:
    function = with_names(apply_rotary_pos_emb, {})
    function.__globals__["rotate_half"] = function
    return function


UNREADABLE: dict[str, Any] = {
    "no function": lambda: GATE.__call__,
    "no source": lambda: replaced(NORM, co_filename="<string>"),
    "a changed file": lambda: replaced(NORM, co_firstlineno=NORM.__code__.co_firstlineno + 1),
    "another constant": lambda: replaced(
        GELU, co_consts=tuple(0.25 if each == 0.5 else each for each in GELU.__code__.co_consts)
    ),
    "another name": lambda: replaced(
        NORM, co_names=tuple("sqrt" if each == "rsqrt" else each for each in NORM.__code__.co_names)
    ),
    "a module of a known name": lambda: with_names(NORM, {"torch": types.ModuleType("torch")}),
    "no module": lambda: with_names(NORM, {"torch": types.SimpleNamespace(rsqrt=torch.rsqrt)}),
    "another function": lambda: with_names(apply_rotary_pos_emb, {"rotate_half": torch.neg}),
    "a function that calls itself": calling_itself,
    "an enclosing function's name": lambda: from_source(
        f"def make(torch):\n{textwrap.indent(ast.unparse(tree_of(NORM)), '    ')}\n    return forward", NORM
    )(torch),
    "a wrapper": lambda: functools.wraps(NORM)(lambda self, hidden_states: 2 * NORM(self, hidden_states)),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_function_that_may_run_something_else_has_no_digest(case: str) -> None:
    assert digest(UNREADABLE[case]()) == ""
    assert [known_name(NORM), known_name(GELU)] == ["LlamaRMSNorm.forward", "NewGELUActivation.forward"]


def test_a_name_of_another_module_makes_another_function() -> None:
    assert digest(with_names(NORM, {"torch": math})) not in {"", digest(NORM)}


def test_a_file_that_changed_since_it_was_imported_is_not_what_runs() -> None:
    function = from_source(ast.unparse(tree_of(NORM)), NORM)
    linecache.cache[function.__code__.co_filename][2][-1] = "    return ("
    assert digest(function) == ""


def test_a_module_in_an_archive_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("archived_norms.py", f"import torch\n{ast.unparse(tree_of(NORM))}\n")
    monkeypatch.syspath_prepend(str(archive))
    assert known_name(importlib.import_module("archived_norms").forward) == "LlamaRMSNorm.forward"


def test_the_compiler_s_warnings_are_not_given_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = from_source("def forward(self):\n    return '\\d'\n", NORM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert digest(function) != ""
