"""Live view in a browser on this machine: a page, and a stream of server-sent events.

Only this machine is served, and only clients with the address, which has a random token in it.
Other users of the machine may connect, and get 404 without the token. A request under another host
name is refused (DNS rebinding).
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from lazygt.errors import LazyGTError
from lazygt.observe.top.screen import page_of
from lazygt.observe.top.sources import StatusSource

_HOST = "127.0.0.1"
_REQUEST_SECONDS = 30.0  # timeout of a request or of a write to the browser
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline';"
    " script-src 'unsafe-inline'; frame-ancestors 'none'",
}


class PageServer(ThreadingHTTPServer):
    """HTTP server of a session's page, and of its events.

    Args:
        port: port to listen on; 0: any.
        interval: seconds between two events.

    Attributes:
        address: URL for a browser.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, source: StatusSource, port: int, interval: float) -> None:
        self._source, self._lock = source, threading.Lock()
        self.token, self.ended = secrets.token_urlsafe(24), threading.Event()
        self.interval = interval
        super().__init__((_HOST, port), _Handler)
        self.address = f"http://{_HOST}:{self.server_port}/{self.token}/"

    def event(self) -> tuple[str, bytes]:
        """Return the next event as (kind, data): a view as JSON, or the reason of the end."""
        try:
            with self._lock:
                return "status", json.dumps(page_of(self._source.snapshot())).encode()
        except LazyGTError as error:
            return "ended", str(error).encode()

    def server_close(self) -> None:
        """Close the server and its event streams."""
        self.ended.set()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    """Handler of one request: the page, or its event stream."""

    server: PageServer
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        """Answer ``/TOKEN/`` with the page and ``/TOKEN/events`` with the stream; else 404."""
        token, _, resource = self.path.removeprefix("/").partition("/")
        hosts = (f"{_HOST}:{self.server.server_port}", f"localhost:{self.server.server_port}")
        authorized = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not authorized or self.headers.get("Host") not in hosts:
            self.send_error(HTTPStatus.NOT_FOUND)
        elif resource == "":
            page = Path(__file__).with_name("page.html").read_bytes()
            self._begin("text/html; charset=utf-8", len(page))
            self.wfile.write(page)
        elif resource == "events":
            self._begin("text/event-stream")
            self._stream()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _begin(self, kind: str, length: int | None = None) -> None:
        """Begin a response: status and headers. Without a length it is a stream."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self) -> None:
        """Send events until the session ends, or the browser has gone."""
        kind = "status"
        try:
            while kind == "status":
                kind, text = self.server.event()
                lines = b"".join(b"data: " + line + b"\n" for line in text.split(b"\n"))
                self.wfile.write(b"event: " + kind.encode() + b"\n" + lines + b"\n")
                self.wfile.flush()
                if self.server.ended.wait(self.server.interval):
                    break
        except OSError:
            self.close_connection = True  # the browser has closed the connection

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal is the user's."""


def serve(
    source: StatusSource, port: int, interval: float, report: Callable[[str], object]
) -> None:
    """Serve until interrupted.

    Args:
        report: called with the page's URL.

    Raises:
        LazyGTError: the port is taken.
    """
    try:
        server = PageServer(source, port, interval)
    except OSError as error:
        raise LazyGTError(f"port {port} can't be had: {error}; --port 0 takes any") from None
    with server:
        report(server.address)
        server.serve_forever()
