"""A report's page: one file that says what the report says, and fetches nothing."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.doctor.page import amount

pytestmark = pytest.mark.usefixtures("no_grad")


class Parts(html.parser.HTMLParser):
    """Collects the texts, links and open tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.last: tuple[str, list[tuple[str, str | None]]] = "", []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe"), "nothing is fetched, nothing runs"
        self.links += [value for name, value in attrs if name == "href" and value]
        assert tag != "table" or self.last == ("div", [("class", "wide")]), "a wide table would make the page scroll"
        self.last = tag, attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts += [data.strip()] if data.strip() else []


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @sg.eager_break
    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 8 and x.sum().item() > 1e9:
            return x
        return self.linear(self.gate(self.linear(x)))


def test_the_page_has_sizes_padding_better_sizes_steps_reasons_and_failures(
    device: torch.device, tmp_path: Path
) -> None:
    model = sg.wrap(Gated().to(device).eval(), capture_sizes=[2, 4, 8], mode="PIECEWISE", progress=False)
    model.capture_graphs(torch.zeros(4, 4, device=device))
    for size in (3,) * 10 + (2,) * 5 + (8, 9):
        model(torch.zeros(size, 4, device=device))
    model.graph_report().save(path := tmp_path / "graphs.html")
    page = Parts(path.read_text(encoding="utf-8"))
    assert page.open == []
    with pytest.raises(sg.ConfigError, match=r"graphs\.json'; expected an HTML file\. JSON is report\.to_json\(\)\."):
        model.graph_report().save(tmp_path / "graphs.json")
    text = "\n".join(page.texts)
    stats = model.graph_stats
    assert page.texts.count("Gated: CUDA graphs") == 2
    assert f"{stats.replays}\nreplays" in text
    assert "PIECEWISE 4" in page.texts
    assert "batch size\nserved at\ncalls\npadding\n2\n2\n5\n0\n3\n4\n10\n10" in text
    assert "capture_sizes=[2, 3]" in page.texts
    assert ": padding of 0 rows instead of 10, with 2 sizes; now there are 2." in page.texts
    assert "Not among these: 2 calls of 8 to 9 rows, which no graph here holds." in page.texts
    assert "Gated.gate" in page.texts
    assert "0.00 MiB" not in page.texts, "graphs of a small model are shown in KiB"
    assert re.search(r"Captures that failed\n.*batch size 8.*test_page\.py", text, re.DOTALL)
    assert {reason.value for reason in stats.eager} == {"capture_failed", "batch_too_large"} <= set(page.texts)
    assert page.links == []  # the page is read where no site may be reached
    assert "simplegraph explain NAME" in page.texts


def test_the_page_says_when_and_with_what_it_was_made_and_which_eager_calls_cost_speed(
    device: torch.device, tmp_path: Path
) -> None:
    """A page that is read a month later, or by somebody else, stands for itself."""
    model = sg.wrap(nn.Linear(4, 4).to(device).eval(), capture_sizes=[2, 4], progress=False)
    for size in (3, 3, 3, 3, 9, 9):
        model(torch.zeros(size, 4, device=device))
    report = model.graph_report()
    report.save(path := tmp_path / "graphs.html")
    text = "\n".join(Parts(path.read_text(encoding="utf-8")).texts)
    assert f"simplegraph {sg.__version__}, torch {torch.__version__}, Python 3." in text
    assert re.search(r"written 20\d\d-\d\d-\d\d \d\d:\d\d UTC", text)
    normal = model.graph_stats.eager.total() - 2
    assert f"\n2\neager calls that cost speed\n{normal}\neager calls in the normal course\n" in text
    costs = text.index("Eager calls that cost speed")
    assert costs < text.index("\nbatch_too_large\n") < text.index("Eager calls in the normal course")
    assert text.index("Eager calls in the normal course") < text.index("\nfirst_call\n")
    assert f"\n{model.graph_stats.proof_seconds:.2f} s\nproofs\n" in text
    assert f"\n{model.graph_stats.longest_stall:.2f} s\nthe longest call that had to capture\n" in text
    assert report.to_dict()["proof_seconds"] == pytest.approx(
        sum(graph["proof_seconds"] for graph in report.to_dict()["graphs"])
    )


def test_a_measure_stays_on_one_line_with_its_unit(device: torch.device, tmp_path: Path) -> None:
    """Where many inputs take the page's width, "12.0 KiB" stood on two lines."""
    model = sg.wrap(nn.Linear(4, 4).to(device).eval(), capture_sizes=[2, 4], progress=False)
    model.capture_graphs(torch.zeros(4, 4, device=device))
    model.graph_report().save(path := tmp_path / "graphs.html")
    cells = re.findall(r"<td([^>]*)>[\d.,]+ (?:B|KiB|MiB|ms)</td>", path.read_text(encoding="utf-8"))
    assert cells == [' class="number"'] * 4
    assert re.search(r"\.number \{[^}]*white-space: nowrap", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1, "1 B"), (512, "512 B"), (1536, "1.5 KiB"), (2**20, "1.00 MiB"), (5 * 2**29, "2,560.00 MiB")],
)
def test_an_amount_of_memory_is_shown_in_a_unit_that_suits_it(count: int, shown: str) -> None:
    """A capture takes no memory where the pool has room already, as on a GPU: that is not "0.00 MiB"."""
    assert amount(count) == shown


def test_no_sizes_are_proposed_that_save_nothing(tmp_path: Path) -> None:
    """And a manager's graphs are compared only where `run` is asked to, so the page promises no comparison."""
    manager = sg.CudaGraphManager(device="cpu", capture_sizes=[2, 4], progress=False)
    buffer = torch.zeros(4, 3)
    manager.capture(forward := lambda mode, batch: buffer[: batch.num_tokens] * 2)
    for size in (2, 4, 4):
        manager.run(manager.dispatch(size), forward)
    manager.report().save(path := tmp_path / "graphs.html")
    text = path.read_text(encoding="utf-8")
    assert "Padding by batch size" in text
    assert "plan_sizes" not in text
    assert "Not among these" not in text
    assert "<td>no</td>" in text
    assert "not yet" not in text


@pytest.mark.parametrize("exact", [True, False])
def test_the_page_of_a_module_without_graphs_or_without_batches_is_a_page(exact: bool, tmp_path: Path) -> None:
    class Odd(nn.Module):
        """Has a name that HTML would read."""

        def _get_name(self) -> str:
            return "<b>Odd</b>"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = sg.wrap(Odd().eval(), exact_shapes=exact, progress=False)
    model.graph_report().save(tmp_path / "before.html")
    assert "Nothing is captured." in Parts((tmp_path / "before.html").read_text()).texts
    for _ in range(4):
        model(torch.zeros(3, 3))
    model.graph_report().save(tmp_path / "after.html")
    page = Parts((tmp_path / "after.html").read_text())
    assert "<b>Odd</b>: CUDA graphs" in page.texts
    assert ("Padding by batch size, in calls" in page.texts) is False


def test_the_sizes_to_choose_hold_every_batch_that_a_graph_could_serve(device: torch.device, tmp_path: Path) -> None:
    """A size whose only call was a proof, which runs eagerly, is no size to leave out."""
    model = sg.wrap(nn.Linear(4, 4).to(device).eval(), capture_sizes=[4, 8], verify=1, progress=False)
    model.capture_graphs(torch.zeros(3, 4, device=device))
    for size in (3,) * 6 + (8,):
        model(torch.zeros(size, 4, device=device))
    model.graph_report().save(path := tmp_path / "graphs.html")
    texts = Parts(path.read_text(encoding="utf-8")).texts
    assert "capture_sizes=[3, 8]" in texts
    assert not any("which no graph here holds" in text for text in texts)
