"""The HTML page: what stands in it, where, and that a real browser can use it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from lazygt.graph import Graph, parse_graph
from lazygt.observe.page import quotient, rows
from lazygt.observe.picture import render
from tests.observe.pages import FUSED, layered_net

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def page_data(graph: Graph, path: Path, collapse: bool | str = "auto") -> dict[str, Any]:
    """What is embedded in the page: its title, legend, boxes, rows and edges."""
    text = render(graph, path, collapse).read_text(encoding="utf-8")  # type: ignore[arg-type]
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


# -- rows ------------------------------------------------------------------------------------


def digraph(nodes: str, *edges: str) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges)
    return graph


def test_rows_of_a_diamond() -> None:
    assert rows(digraph("abcd", "ab", "ac", "bd", "cd")) == [["a"], ["b", "c"], ["d"]]


def test_a_node_stands_below_all_it_takes_from() -> None:
    assert rows(digraph("abcd", "ab", "bc", "ad", "cd")) == [["a"], ["b"], ["c"], ["d"]]


def test_an_input_stands_just_above_its_first_use() -> None:
    found = rows(digraph("axbc", "ab", "bc", "xc"))
    assert [set(row) for row in found] == [{"a"}, {"b", "x"}, {"c"}]


def test_an_edge_back_does_not_count() -> None:
    assert rows(digraph("abc", "ab", "bc", "ca")) == [["a"], ["b"], ["c"]]


def test_neighbours_stand_near_each_other() -> None:
    """a-d, b-e, c-f are listed crossed; the rows uncross them."""
    upper, lower = rows(digraph("abcfed", "ad", "be", "cf"))
    pairs = dict(zip("abc", "def", strict=True))
    assert [pairs[node] for node in upper] == lower


def test_wide_rows_go_on_in_the_next() -> None:
    found = rows(nx.empty_graph(100, create_using=nx.DiGraph))
    assert [len(row) for row in found] == [14] * 7 + [2]
    assert sorted(node for row in found for node in row) == list(range(100))


def test_empty_drawing_has_no_rows() -> None:
    assert rows(nx.DiGraph()) == []


def test_quotient_collects_edge_values() -> None:
    drawing = nx.DiGraph()
    for source, target, values in (("a", "b", (0,)), ("a", "c", (0,)), ("b", "c", (1, 2))):
        drawing.add_edge(source, target, values=values)
    boxes = quotient(drawing, {"a": "one", "b": "two", "c": "two"})
    assert dict(boxes.nodes(data="members")) == {"one": ["a"], "two": ["b", "c"]}
    assert list(boxes.edges(data="values")) == [("one", "two", (0, 0))]
    assert list(quotient(drawing, {"b": "b", "c": "c"}).edges) == [("b", "c")]


# -- what is embedded ------------------------------------------------------------------------


def shown(data: dict[str, Any], numbers: list[list[int]]) -> list[list[Any]]:
    """The rows by name, with the rows inside each box."""
    return [
        [
            (box["text"], shown(data, box["rows"])) if box["rows"] else box["text"]
            for box in (data["boxes"][number] for number in row)
        ]
        for row in numbers
    ]


def test_fused_nodes_are_open_boxes(tmp_path: Path) -> None:
    data = page_data(parse_graph(FUSED), tmp_path / "g.html")
    fused = ("fused", [["exp"], ["neg"]])
    assert shown(data, data["rows"]) == [["input"], [fused], ["sin"], ["output"]]
    assert [box["text"] for box in data["boxes"] if box["open"]] == ["fused"]


def test_lines_are_closed_boxes_with_fused_nodes_inside(tmp_path: Path) -> None:
    data = page_data(parse_graph(FUSED), tmp_path / "g.html", collapse=True)
    fused = ("fused", [["exp"], ["neg"]])
    assert shown(data, data["rows"]) == [
        [("inputs", [["input"]])],
        [("a.py:1", [[fused]])],
        [("a.py:3", [["sin"]])],
        [("outputs", [["output"]])],
    ]
    assert not any(box["open"] for box in data["boxes"])


def test_every_node_and_edge_of_a_large_graph_is_there_once(tmp_path: Path) -> None:
    data = page_data(layered_net(depth=50, width=20), tmp_path / "g.html")
    leaves = [number for number, box in enumerate(data["boxes"]) if box["rows"] is None]
    assert len(leaves) == 20 + 50 * 20 + 20
    placed = [number for row in data["rows"] for number in row]
    placed += [number for box in data["boxes"] for row in box["rows"] or [] for number in row]
    assert sorted(placed) == list(range(len(data["boxes"])))
    assert len(data["edges"]) == 2 * 50 * 20 + 20
    assert {number for edge in data["edges"] for number in edge[:2]} == set(leaves)


def test_tooltip_has_source_line_result_and_cost(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("x = 1\ny = torch.add(x, <b>)  # </script>\n")
    graph = parse_graph(
        "graph {\n%0: f32[4] = input\n"
        f"%1: f32[4] = aten.add.Tensor(%0, %0)  # {source}:2\nreturn %1\n}}"
    )
    data = page_data(graph, tmp_path / "g.html")
    add = next(box for box in data["boxes"] if box["text"] == "add")
    assert add["tip"] == [
        "aten.add.Tensor",
        "f32[4]",
        "4 flop, 32 B, 1 launch",
        "reads 16 B, writes 16 B",
        f"{source}:2",
        "y = torch.add(x, <b>)  # </script>",
    ]
    collapsed = page_data(graph, tmp_path / "g.html", collapse=True)
    line = next(box for box in collapsed["boxes"] if box["text"] == "train.py:2")
    assert line["note"] == "1 op, 4 flop, 32 B"
    assert line["source"] == "y = torch.add(x, <b>)  # </script>"


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = render(parse_graph(FUSED), tmp_path / "g.html").read_text()
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]  # a name
    assert not re.search(r"\bsrc=|<link|@import|fetch\(|XMLHttpRequest", text)


# -- in a browser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no chromium on PATH")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


class Tab:
    """A page of 1,000 ops (50 lines of 20) in a browser, and what went wrong in it."""

    def __init__(self, browser: Any, path: Path) -> None:
        render(layered_net(depth=50, width=20), path)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(viewport={"width": 1200, "height": 800})
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def count(self, selector: str) -> int:
        found: int = self.page.locator(selector).count()
        return found

    def place(self, name: str) -> dict[str, float]:
        """Where the box of this name is on the screen."""
        rect = self.page.locator(".box", has_text=name).first.locator("rect")
        found: dict[str, float] = rect.bounding_box()
        return found


@pytest.fixture
def tab(browser: Any, tmp_path: Path) -> Iterator[Tab]:
    tab = Tab(browser, tmp_path / "net.html")
    yield tab
    tab.page.close()
    assert not tab.errors
    assert tab.requests == [(tmp_path / "net.html").as_uri()]


@pytest.mark.timeout(60)
def test_browser_shows_a_box_a_line_and_opens_it_at_a_click(tab: Tab) -> None:
    assert tab.page.title() == "net"
    assert tab.count(".folder") == 52
    assert tab.count(".box:not(.folder)") == 0
    assert tab.count(".edge") == 51
    tab.page.locator(".folder", has_text="net.py:2").first.click()
    assert tab.count(".box:not(.folder):not(.title)") == 20
    assert tab.count(".opened") == 1
    assert tab.count(".edge") == 51 - 2 + 2 * 20  # from line 1 to each op, and from each to line 3
    tab.page.locator(".opened").click(position={"x": 5, "y": 5})
    assert tab.count(".box:not(.folder)") == 0


@pytest.mark.timeout(60)
def test_browser_opens_all(tab: Tab) -> None:
    tab.page.click("#open")
    assert tab.count(".box:not(.folder):not(.title)") == 1040
    assert tab.count(".edge") == 2020
    tab.page.click("#close")
    assert tab.count(".box") == 52


@pytest.mark.timeout(60)
def test_browser_moves_and_magnifies(tab: Tab) -> None:
    before = tab.place("inputs")
    tab.page.mouse.move(100, 600)
    tab.page.mouse.down()
    tab.page.mouse.move(150, 630)
    tab.page.mouse.up()
    after = tab.place("inputs")
    assert (after["x"] - before["x"], after["y"] - before["y"]) == pytest.approx((50, 30), abs=1)
    tab.page.mouse.wheel(0, -400)
    tab.page.wait_for_function("view.k > 0.35")
    assert tab.place("inputs")["width"] > 1.5 * before["width"]


@pytest.mark.timeout(60)
def test_browser_finds_and_centres(tab: Tab) -> None:
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("net.py:37")
    assert tab.page.inner_text("#count") == "20 found"
    assert tab.count(".found") == 1  # the closed box that they are in
    tab.page.keyboard.press("Enter")
    tab.page.keyboard.press("Enter")
    assert tab.page.inner_text("#count") == "2 of 20"
    assert tab.count(".found") == 20
    box = tab.page.locator(".current rect").bounding_box()
    assert abs(box["x"] + box["width"] / 2 - 600) < 2
    assert 200 < box["y"] < 600
    tab.page.keyboard.press("Escape")
    assert tab.count(".found") == 0


@pytest.mark.timeout(60)
def test_browser_shows_the_tooltip(tab: Tab) -> None:
    tab.page.locator(".folder", has_text="net.py:1").first.hover()
    tip = tab.page.inner_text("#tip")
    assert tip.splitlines()[:2] == ["20 pointwise", "1.28 kflop, 15.4 kB, 20 launches"]
    assert tab.count(".edge.lit") == 2
    tab.page.mouse.move(5, 700)
    assert tab.page.is_hidden("#tip")
