"""The Python of the README and of every page runs as it stands, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph.base import errors
from simplegraph.base.reasons import Reason
from simplegraph.manager.replay_proof import OTHER_SIZE
from tests.docs.pages import (
    DOCS,
    PAGES,
    README,
    ROOT,
    Block,
    blocks,
    leads_nowhere,
    links,
    name_of,
    slugs,
    text_of,
    unprinted,
)

# The line that opens a block says why it is not run, or which packages it needs and is run with.
_NOT_RUN, _NEEDS = "not run: ", "needs: "
_KINDS = {"python", "bash", "text", "{toctree}", "{eval-rst}", "{literalinclude}", "{include}"}


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A page shows how to silence the logger, which later tests read."""
    logger = logging.getLogger("simplegraph")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def namespace() -> dict[str, Any]:
    return {"__name__": "page"}


def run(page: Path, namespace: dict[str, Any]) -> list[str]:
    """Run the Python of a page in one namespace; return the packages for want of which a block was left out."""
    missing: list[str] = []
    for block in blocks(page):
        if block.kind == "python" and not block.note.startswith(_NOT_RUN):
            names = block.note.removeprefix(_NEEDS).split() if block.note else []
            missing += [name for name in names if not importable(name)]
            if not missing:
                exec(compile("\n" * block.line + block.text, name_of(page), "exec"), namespace)
    return missing


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError):  # torchvision beside another torch is a RuntimeError
        return False
    return True


# As users have them: with proofs.
@pytest.mark.proofs
@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=name_of)
def test_the_python_of_a_page_runs(page: Path, namespace: dict[str, Any]) -> None:
    if page.name == "audit.md" and torch.cuda.is_available():
        pytest.skip("it audits the emulator")
    if missing := run(page, namespace):
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.mark.proofs
def test_the_readmes_first_lines_give_eagers_answer_and_print_what_follows_them(
    namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code = next(block.text for block in blocks(README) if block.kind == "python")
    without = "".join(line for line in code.splitlines(keepends=True) if "# added" not in line)
    assert code.count("# added") == 4, "the lines that a user adds"
    exec(without, eager := dict(namespace))
    exec(code, namespace)
    shown = next(block.text for block in blocks(README) if block.kind == "text")
    assert torch.cuda.is_available() or unprinted(shown, capsys.readouterr().out) == []  # a GPU's name is another
    assert type(eager["model"]) is torch.nn.Sequential
    model, x = namespace["model"], torch.randn(5, 64, device=namespace["device"])
    stats = model.graph_stats
    replays, padded = stats.replays, stats.padded_tokens
    with torch.inference_mode():
        torch.testing.assert_close(model(x), model[2](model[1](model[0](x))), rtol=1e-3, atol=1e-4)
    assert (stats.captures, stats.replays - replays, stats.padded_tokens - padded) == (4, 1, 3)


@pytest.mark.proofs
def test_all_ways_to_wrap_are_shown(namespace: dict[str, Any]) -> None:
    run(DOCS / "getting_started.md", namespace)
    assert issubclass(namespace["MixedIn"], sg.CudaGraphWrapper)
    assert issubclass(namespace["Decoder"], sg.CudaGraphWrapper)


def test_pages_of_models_check_what_they_show_and_are_in_the_table() -> None:
    pages = sorted((DOCS / "models").glob("*.md"))
    table = (DOCS / "models" / "index.md").read_text(encoding="utf-8")
    assert len(pages) == 6
    for page in pages:
        if page.stem != "index":
            assert f"]({page.name})" in table
            assert any("assert" in block.text for block in blocks(page))


def test_every_block_says_what_it_is() -> None:
    every = [(page, block) for page in PAGES for block in blocks(page)]
    assert len(every) > 40
    odd = [f"{name_of(page)}:{block.line}" for page, block in every if not _is_plain(block)]
    assert odd == [], "a block is python, bash or text; after that `needs: PACKAGE` or `not run: WHY`"


def _is_plain(block: Block) -> bool:
    noted = block.kind.startswith("{") or block.note.startswith((_NOT_RUN, _NEEDS))  # a directive names its file
    return block.kind in _KINDS and (not block.note or noted)


def test_commands_name_modules_that_exist() -> None:
    pages = "".join(map(text_of, PAGES))
    modules = {name.rstrip(".") for name in re.findall(r"(?:python|nproc-per-node \d) -m ([\w.]+)", pages)}
    ours = [name for name in modules if name.partition(".")[0] in ("bench", "docs", "simplegraph", "tests")]
    assert len(ours) >= 8
    assert [name for name in ours if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "bench" / "README.md", ROOT / "bench" / "results" / "README.md"], ids=name_of
)
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in links(page) if leads_nowhere(page, link)] == []


def test_the_readmes_links_work_wherever_the_sources_are_read() -> None:
    """From its folder, and to headings: only Sphinx knows other anchors."""
    found = links(README)
    assert len(found) >= 20
    assert [link for link in found if re.match(r"[a-z]+:", link)] == []
    targets = [(place, anchor) for place, _, anchor in (link.partition("#") for link in found) if anchor]
    assert [f"{place}#{anchor}" for place, anchor in targets if anchor not in slugs(ROOT / place)] == []


def test_the_readme_is_short_and_has_the_command_that_ci_runs() -> None:
    assert len(text_of(README).splitlines()) <= 110
    assert re.search(r"^<!-- ci: test -->\n```bash\npip install .* && python -m pytest .*\n```$", text_of(README), re.M)


def test_limits_name_the_differences_that_a_comparison_of_padded_calls_allows() -> None:
    names = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    page = " ".join((DOCS / "limits.md").read_text(encoding="utf-8").split())
    of_page = {name: share for share, name in re.findall(r"([\d.]+) % (?:of [^%]*?)?in (\w+)", page)}
    assert of_page == {name: f"{OTHER_SIZE[dtype] * 100:g}" for dtype, name in names.items()}


def test_every_reason_has_its_part_in_troubleshooting() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    missing = [r for r in Reason if f"\n### {r.value}\n" not in page]
    assert missing == [], "add a section to docs/troubleshooting.md, which `simplegraph explain` prints"


def test_every_public_name_is_in_the_reference() -> None:
    shown = {
        name.rpartition(".")[2]
        for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text_of(DOCS / "reference.md"), re.MULTILINE)
    }
    shown.update(vars(errors))  # shown as a whole
    doors = sorted((ROOT / "simplegraph").rglob("__init__.pyi"))
    public = {str(door): re.findall(r" as (\w+)$", text_of(door), re.MULTILINE) for door in doors}
    assert {place: missing for place, names in public.items() if (missing := sorted({*names} - shown))} == {}
    assert len(public) == 4
