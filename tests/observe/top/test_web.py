"""The page for a browser, over real HTTP."""

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lazygt.errors import LazyGTError, NoSession
from lazygt.observe.top.status import SessionStatus
from lazygt.observe.top.web import PageServer, serve
from tests.observe.top.statuses import status

pytestmark = pytest.mark.timeout(60)


class MadeUp:
    """A source of a few statuses; then the session has ended."""

    def __init__(self, count: int) -> None:
        self.left = count

    def snapshot(self) -> SessionStatus:
        self.left -= 1
        if self.left < 0:
            raise NoSession("the session of process 1 has ended\nlast words")
        return status(64, frozen=(5,), waiting=(1, 2))

    def close(self) -> None:
        self.left = 0


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(MadeUp(3), 0, 0.01) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: PageServer, path: str, host: str = "") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    return connection.getresponse()


def test_the_page_is_served_and_needs_nothing_else(server: PageServer) -> None:
    answer = get(server, urlsplit(server.address).path)
    page = answer.read().decode()
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert 'new EventSource("events")' in page
    assert "innerHTML" not in page
    assert "http://" not in page
    assert "https://" not in page


def test_events_are_views_until_the_session_ends(server: PageServer) -> None:
    answer = get(server, f"/{server.token}/events")
    assert answer.headers["Content-Type"] == "text/event-stream"
    events = [event.split("\n") for event in answer.read().decode().strip().split("\n\n")]
    assert [lines[0] for lines in events] == ["event: status"] * 3 + ["event: ended"]
    for _, data in events[:3]:
        view = json.loads(data.removeprefix("data: "))
        assert len(view["squares"]) == 64
        assert view["squares"][5] == [5, "frozen", "blocks ranks 1-2"]
        assert view["alerts"] == [["rank 5 (process 1005) is frozen; it blocks ranks 1-2 and keeps "
                                   "the client waiting", "problem"]]  # fmt: skip
        assert view["columns"][:2] == [">rank", "state"]
        assert [row[:2] for row in view["rows"][:2]] == [["5", "frozen"], ["63", "busy"]]
        assert len(view["rows"]) == 16
    assert events[3][1:] == ["data: the session of process 1 has ended", "data: last words"]


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/", ""), ("/events", ""), ("/wrong/", ""), ("/TOKEN", "evil.example"),
        ("/TOKEN/", "evil.example"), ("/TOKEN/events", "evil.example"), ("/TOKEN/../x", ""),
        ("/TOKEN/page.html", ""), ("//etc/passwd", ""),
    ],
)  # fmt: skip
def test_others_get_nothing(server: PageServer, path: str, host: str) -> None:
    answer = get(server, path.replace("TOKEN", server.token), host)
    assert answer.status == 404
    assert server.token not in answer.read().decode()


def test_only_this_machine_is_served(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) == 32


def test_a_port_that_is_taken_is_said(server: PageServer) -> None:
    with pytest.raises(LazyGTError, match="can't be had"):
        serve(MadeUp(1), server.server_port, 1.0, print)


def test_a_browser_shows_all_ranks(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on PATH")
    with PageServer(MadeUp(10**6), 0, 0.1) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with sync_api.sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=chromium, args=["--no-sandbox"]
                )
                for scheme in ("light", "dark"):
                    page = browser.new_page(
                        color_scheme=scheme, viewport={"width": 1000, "height": 900}
                    )
                    errors: list[str] = []
                    page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
                    page.goto(server.address)
                    page.wait_for_selector("#grid span.frozen")
                    assert page.locator("#grid span").count() == 64
                    assert page.locator("#rows tr").count() == 16
                    assert page.locator("#rows tr").first.inner_text().startswith("5\tfrozen")
                    alert = page.locator("#alerts").inner_text()
                    assert "is frozen; it blocks ranks 1-2" in alert
                    assert errors == []
                    page.screenshot(path=tmp_path / f"{scheme}.png")
                    page.close()
                browser.close()
        finally:
            server.shutdown()
            thread.join()
