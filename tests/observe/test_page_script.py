"""The script of the HTML page in a bare JavaScript engine: it opens, moves, magnifies, searches.

tests/observe/test_page.py does the same with a mouse, where there is a browser.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lazygt.graph import Graph, parse_graph
from lazygt.observe.picture import render
from tests.observe.pages import FUSED, layered_net

quickjs = pytest.importorskip("quickjs", reason="quickjs-ng is not installed")

DOM = Path(__file__).with_name("dom.js").read_text()
VOID = {"meta", "input"}

pytestmark = pytest.mark.timeout(60)


class Reader(HTMLParser):
    """The elements of a page, each as [tag, attributes, text, children]."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root: list[Any] = ["root", {}, "", []]
        self._open = [self.root]
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = [tag, {name: value or "" for name, value in attrs}, "", []]
        self._open[-1][3].append(made)
        if tag not in VOID:
            self._open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1][3].append([tag, dict(attrs), "", []])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self._open[-1][2] += data


class Page:
    """The page of a graph, with a box a line, loaded as a browser would load it."""

    def __init__(self, graph: Graph, path: Path) -> None:
        html = render(graph, path, collapse=True).read_text(encoding="utf-8")
        self._engine = quickjs.Context()
        self._engine.eval(DOM)
        self._engine.eval(f"build({json.dumps(Reader(html).root)}, document)")
        self._engine.eval(html.rpartition("<script>")[2].partition("</script>")[0])

    def ask(self, code: str) -> Any:
        """The value of an expression of the page's own names."""
        return json.loads(self._engine.eval(f"JSON.stringify({code})"))

    def fire(self, target: str, kind: str, **facts: Any) -> bool:
        """Fire an event at an element, and say whether the browser's own answer is prevented."""
        return bool(self.ask(f"fire({target}, {json.dumps(kind)}, {json.dumps(facts)})"))

    def shown(self) -> list[dict[str, Any]]:
        """The boxes that are drawn, by number, name, place and size."""
        found: list[dict[str, Any]] = self.ask(
            "boxes.flatMap((box, number) => box.element ?"
            "  [{ ...box, number, element: null, opened: isOpen(box) }] : [])"
        )
        return found

    def box(self, text: str) -> dict[str, Any]:
        """A box that is drawn."""
        return next(box for box in self.shown() if box["text"] == text)

    def number(self, text: str) -> int:
        return int(self.box(text)["number"])

    def click(self, text: str) -> None:
        """Click on a box, with a hand that trembles."""
        target = f"boxes[{self.number(text)}].element"
        self.fire(target, "pointerdown", clientX=50, clientY=50)
        self.fire(target, "pointermove", clientX=52, clientY=51)
        self.fire(target, "pointerup", clientX=52, clientY=51)

    def on_screen(self, text: str) -> tuple[float, float]:
        """Where the middle of a box's upper edge is."""
        box, view = self.box(text), self.ask("view")
        return view["x"] + (box["x"] + box["w"] / 2) * view["k"], view["y"] + box["y"] * view["k"]

    def type(self, text: str) -> None:
        self.ask(f"$('search').value = {json.dumps(text)}")
        self.fire("$('search')", "input")

    def classes(self, name: str) -> list[int]:
        """The numbers of the boxes that are marked so."""
        found: list[int] = self.ask(
            f"boxes.flatMap(({{ element }}, number) =>"
            f"  element && element.classes.includes('{name}') ? [number] : [])"
        )
        return found


@pytest.fixture
def page(tmp_path: Path) -> Page:
    """1,000 ops: 50 lines of 20."""
    return Page(layered_net(depth=50, width=20), tmp_path / "net.html")


def test_a_click_opens_a_line_and_another_closes_it(page: Page) -> None:
    assert page.ask("document.title") == "net"
    assert [box["opened"] for box in page.shown()] == [False] * 52
    assert page.ask("$('edges').children.length") == 51
    place = page.on_screen("net.py:2")
    page.click("net.py:2")
    assert len(page.shown()) == 52 + 20
    assert page.ask("$('edges').children.length") == 51 - 2 + 2 * 20
    assert page.on_screen("net.py:2") == pytest.approx(place)  # it stays under the mouse
    page.click("net.py:2")
    assert len(page.shown()) == 52


def test_edges_inside_a_closed_box_are_not_drawn(tmp_path: Path) -> None:
    page = Page(parse_graph(FUSED), tmp_path / "fused.html")
    flows = "$('edges').children.map(({ dataset }) => [dataset.from, dataset.to].map(Number))"
    assert page.ask(flows) == [[page.number(one), page.number(other)] for one, other in (
        ("inputs", "a.py:1"), ("a.py:1", "a.py:3"), ("a.py:3", "outputs"),
    )]  # fmt: skip
    page.click("a.py:1")
    page.click("fused")
    assert [page.number("exp"), page.number("neg")] in page.ask(flows)


def test_all_boxes_open_and_close(page: Page) -> None:
    page.fire("$('open')", "click")
    assert len(page.shown()) == 52 + 1040
    assert page.ask("$('edges').children.length") == 2020
    page.fire("$('close')", "click")
    assert len(page.shown()) == 52


def test_boxes_lie_in_their_line_and_apart(page: Page) -> None:
    page.click("net.py:2")
    page.click("net.py:3")
    boxes = page.shown()
    for one, other in combinations(boxes, 2):
        if one["parent"] == other["parent"]:
            beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
            assert beside or below, (one, other)
    around = {box["number"]: box for box in boxes}
    inside = [box for box in boxes if box["parent"] in around]
    assert len(inside) == 40
    for box in inside:
        line = around[box["parent"]]
        assert line["x"] < box["x"] < box["x"] + box["w"] < line["x"] + line["w"]
        assert line["y"] < box["y"] < box["y"] + box["h"] < line["y"] + line["h"]


def test_a_drag_moves_and_opens_nothing(page: Page) -> None:
    before = page.ask("view")
    target = f"boxes[{page.number('inputs')}].element"
    page.fire(target, "pointerdown", clientX=100, clientY=600)
    for x, y in ((120, 610), (150, 630)):
        page.fire("canvas", "pointermove", clientX=x, clientY=y)
    page.fire(target, "pointerup", clientX=150, clientY=630)
    page.fire("canvas", "pointermove", clientX=300, clientY=300)  # no button is down
    after = page.ask("view")
    assert after == {"x": before["x"] + 50, "y": before["y"] + 30, "k": before["k"]}
    transform = f"translate({after['x']:g} {after['y']:g}) scale({after['k']:g})"
    assert page.ask("$('view').attributes.transform") == transform
    assert len(page.shown()) == 52


def test_the_wheel_magnifies_about_the_mouse(page: Page) -> None:
    def under_mouse() -> tuple[float, float]:
        view = page.ask("view")
        return (300 - view["x"]) / view["k"], (200 - view["y"]) / view["k"]

    point, scale = under_mouse(), page.ask("view.k")
    prevented = page.fire("canvas", "wheel", clientX=300, clientY=200, deltaY=-400)
    assert prevented  # or the browser would scroll
    assert page.ask("view.k") == pytest.approx(scale * 1.822, rel=1e-3)
    assert under_mouse() == pytest.approx(point)
    for _ in range(30):
        page.fire("canvas", "wheel", clientX=300, clientY=200, deltaY=-400)
    assert page.ask("view.k") == 8


def test_fit_shows_all(page: Page) -> None:
    page.fire("$('open')", "click")
    assert page.ask("view.k") == 0.6  # letters can be read
    page.fire("$('fit')", "click")
    all_, view = page.ask("$('view').getBBox()"), page.ask("view")
    assert view["k"] < 0.6
    assert view["x"] + all_["x"] * view["k"] >= 12 - 1e-6
    assert view["x"] + (all_["x"] + all_["width"]) * view["k"] <= 1200 - 12 + 1e-6
    assert view["y"] + (all_["y"] + all_["height"]) * view["k"] <= 800 - 12 + 1e-6


def test_search_marks_opens_and_centres(page: Page) -> None:
    assert page.fire("window", "keydown", key="/")
    assert page.ask("document.focused === $('search')")
    page.type("NET.py:37 ")
    assert page.ask("$('count').textContent") == "20 found"
    assert page.classes("found") == [page.number("net.py:37")]  # the closed box that they are in
    for _ in range(2):
        page.fire("$('search')", "keydown", key="Enter")
    assert page.ask("$('count').textContent") == "2 of 20"
    assert len(page.classes("found")) == 20
    (second,) = page.classes("current")
    assert second == page.classes("found")[1]
    assert page.ask(f"view.x + (boxes[{second}].x + boxes[{second}].w / 2) * view.k") == 600
    for _ in range(2):
        page.fire("$('search')", "keydown", key="Enter", shiftKey=True)
    assert page.ask("$('count').textContent") == "20 of 20"  # around the corner
    page.fire("$('search')", "keydown", key="Escape")
    assert page.classes("found") == page.classes("current") == []
    assert page.ask("$('count').hidden")


def test_names_are_found_before_tooltips(page: Page) -> None:
    page.ask("boxes.find((box) => box.text === 'output').tip.push('of an add')")
    page.type("add")
    assert page.ask("matches.length") == 1000
    page.type("of an add")
    assert page.ask("matches.length") == 1
    page.type("nothing of the kind")
    assert page.ask("$('count').textContent") == "0 found"
    page.fire("$('search')", "keydown", key="Enter")
    assert page.classes("current") == []
    assert not page.fire("$('search')", "keydown", key="/")  # it is typed


def test_the_mouse_shows_the_tooltip_and_lights_the_edges(page: Page) -> None:
    target = f"boxes[{page.number('net.py:1')}].element"
    page.fire(target, "pointermove", clientX=1190, clientY=790)
    tip = page.ask("$('tip').textContent").splitlines()
    assert tip[:2] == ["20 pointwise", "1.28 kflop, 15.4 kB, 20 launches"]
    assert page.ask("$('tip').style") == {"left": "992px", "top": "692px"}  # within the window
    lit = "$('edges').children.filter((edge) => edge.classes.includes('lit')).length"
    assert page.ask(lit) == 2
    page.fire("canvas", "pointermove", clientX=5, clientY=700)
    assert page.ask("$('tip').hidden")
    assert page.ask(lit) == 0


def test_the_legend_has_a_colour_a_family(page: Page) -> None:
    entries = page.ask("$('legend').children.map((each) => each.textContent)")
    assert entries == ["pointwise", "input", "output"]
