"""The report as a live page: a small server that only reads one run folder.

    /                 the page               /state     how much there is
    /report           verdict and sections   /choices   options of the page
    /images, /image   records                /maps      maps as bytes
    /picture/KEY      one image              /rows.csv  the chosen images

Nothing can be written and no file can be named: addresses are the ones above, images have a hash of their
name, and models, checkpoints and methods must be among those in the rows. Requests whose Host is an unknown
name are refused (DNS rebinding). Bound to anything but loopback, every request needs the token, which is in
the first address and then in a cookie.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import ipaddress
import json
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from heatproof.errors import HeatproofError, InputError, StoreError, UnknownNameError, visible
from heatproof.report.gallery import media_type
from heatproof.report.live import Live, as_csv, read_query, record_of
from heatproof.report.pieces import asset, fill
from heatproof.verdict.data import RunData

ASSETS = {
    "page.css": "text/css", "live.css": "text/css",
    "page.js": "text/javascript", "wipe.js": "text/javascript", "live.js": "text/javascript",
}  # fmt: skip
PICTURE = re.compile(r"/picture/([0-9a-f]{24})")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
NO_TOKEN = "This page needs its token: open the address that heatproof serve printed."
TRIED = 50  # ports after the wanted one
CONNECTIONS = 64  # simultaneous connections, each in its thread; more are refused
PATIENCE = 20.0  # seconds to receive a whole request, and again to send its answer
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: 5\r\n\r\n"


@dataclass(frozen=True)
class Reply:
    """Content of an HTTP response."""

    content: bytes
    kind: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class Server(ThreadingTCPServer):
    """HTTP server of one run."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, run: str | Path, host: str = "127.0.0.1", port: int = 0, token: bool = False) -> None:
        """token: require one on loopback too, against other users of the machine."""
        self.live = Live(run)
        self.address_family, address, loopback = resolve(host)
        self.token = None if loopback and not token else secrets.token_urlsafe(24)
        self.names = {"localhost", host.lower(), socket.gethostname().lower()}
        self.host = host
        self.free = threading.BoundedSemaphore(CONNECTIONS)
        try:
            super().__init__((address, port), Handler)
        except OSError as error:
            raise InputError(_why_not(host, port, error, self.address_family, address)) from error
        self.server_port = self.server_address[1]

    @property
    def address(self) -> str:
        """The address to open, with the token if one is needed."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::", "") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server_port}/" + (f"?token={self.token}" if self.token else "")

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        request.settimeout(0)
        with contextlib.suppress(OSError):
            request.send(BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):  # a browser that left
            print(visible(traceback.format_exc()), file=sys.stderr)


class TimedReader(io.RawIOBase):
    """Reads from a connection until its time is over, so that a slow sender does not block a thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.expect()

    def expect(self) -> None:
        """Start the time of the next request."""
        self.until = time.monotonic() + PATIENCE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request came too slowly")
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    server_version, sys_version = "heatproof", ""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # small answers must not wait for each other

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.timed = TimedReader(self.connection)
        self.rfile = io.BufferedReader(self.timed)

    def handle_one_request(self) -> None:
        self.timed.expect()
        super().handle_one_request()

    def do_GET(self) -> None:
        self._send(self._answer())

    do_HEAD = do_GET  # noqa: N815

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):  # any other method
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self.close_connection = True  # its body is not read
        self._send(_text("Only GET and HEAD are supported.", 405, {"Allow": "GET, HEAD"}))

    def _answer(self) -> Reply:
        if not known_host(self.headers.get("Host", ""), self.server.names):
            return _text("Unknown host name; start the server with --host NAME.", 403)
        try:
            address = urlsplit(self.path)
            query = dict(reversed(parse_qsl(address.query, keep_blank_values=True, max_num_fields=20)))
            if (refused := self._token(address.path, query)) is not None:
                return refused
            return answer(self.server.live, address.path, query)
        except UnknownNameError as error:
            return _json({"error": str(error)}, 404)
        except StoreError as error:
            return _json({"error": str(error)}, 503)
        except (HeatproofError, ValueError) as error:
            return _json({"error": str(error)}, 400)
        except Exception:
            print(visible(traceback.format_exc()), file=sys.stderr)
            return _json({"error": "internal error; see the terminal of heatproof serve"}, 500)

    def _token(self, path: str, query: Mapping[str, str]) -> Reply | None:
        """None if the request has the token; else a redirect that sets the cookie, or a refusal."""
        token, cookie = self.server.token, f"heatproof_{self.server.server_port}"
        if token is None:
            return None
        if _equal(query.get("token", ""), token):
            if path != "/":
                return None
            header = f"{cookie}={token}; Path=/; HttpOnly; SameSite=Lax"
            return Reply(b"", "text/plain", 303, {"Location": "/", "Set-Cookie": header})
        given = dict(part.strip().partition("=")[::2] for part in self.headers.get("Cookie", "").split(";"))
        if _equal(given.get(cookie, ""), token):
            return None
        return _text(NO_TOKEN, 401, {"WWW-Authenticate": "Bearer"})

    def _send(self, reply: Reply) -> None:
        self.connection.settimeout(PATIENCE)  # for all of it, not for each of its bytes
        self.send_response(reply.status)
        kind = reply.kind if reply.kind.startswith("image/") else f"{reply.kind}; charset=utf-8"
        own = {"Content-Type": kind, "Content-Length": str(len(reply.content)), **reply.headers}
        for name, value in {"Cache-Control": "no-store", **HEADERS, **own}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal is for errors."""


def answer(live: Live, path: str, query: Mapping[str, str]) -> Reply:
    """The reply to a request."""
    if path == "/":
        return Reply(fill("live", {}).encode(), "text/html")
    if path.startswith("/assets/") and (name := path.removeprefix("/assets/")) in ASSETS:
        return Reply(asset(name).encode(), ASSETS[name])
    if path == "/state":
        return _json(live.state())
    if match := PICTURE.fullmatch(path):
        content = live.picture(match[1])
        cached = {"Cache-Control": "private, max-age=86400, immutable"}  # images never change within a run
        return Reply(content, media_type(content), headers=cached)
    if path not in (*PAGES, "/rows.csv"):
        return _text("Not found.", 404)
    data = live.data(query.get("model") or None, query.get("checkpoint") or None)
    if path == "/rows.csv":
        named = {"Content-Disposition": 'attachment; filename="heatproof.csv"'}
        content = as_csv(data, read_query(query, data)).encode("utf-8-sig")  # so that Excel reads it as UTF-8
        return Reply(content, "text/csv", headers=named)
    return _json(PAGES[path](live, data, query))


PAGES: dict[str, Callable[[Live, RunData, Mapping[str, str]], Any]] = {
    "/choices": lambda live, data, query: live.choices(data),
    "/report": lambda live, data, query: live.report(data),
    "/images": lambda live, data, query: live.images(data, query),
    "/image": lambda live, data, query: record_of(data, live.image(query.get("key", ""))),
    "/maps": lambda live, data, query: live.maps(data, query.get("method", ""), query.get("keys", "")),
}


def resolve(host: str) -> tuple[socket.AddressFamily, str, bool]:
    """Family and address of a host, and whether it is loopback."""
    try:
        addresses = socket.getaddrinfo(
            host or "0.0.0.0", None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise InputError(f"cannot resolve the host {host!r}; use 127.0.0.1 or 0.0.0.0") from error
    family, *_, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    return socket.AddressFamily(family), str(address[0]), ip.is_loopback


def known_host(header: str, names: set[str]) -> bool:
    """Whether a Host header is an IP address or one of the server's names.

    >>> known_host("127.0.0.1:8080", set()), known_host("evil.example:8080", {"localhost"})
    (True, False)
    """
    try:
        host = urlsplit(f"//{header}").hostname or ""
        if host in names:
            return True
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _why_not(host: str, port: int, error: OSError, family: int, address: str) -> str:
    failed = f"cannot use port {port} of {host}: {error.strerror}"
    for free in range(port + 1, min(port + TRIED, 65536)):
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            try:
                trial.bind((address, free))
            except OSError:
                continue
            return f"{failed}; port {free} is free: --port {free}"
    return f"{failed}; name another with --port"


def _json(content: Any, status: int = 200) -> Reply:
    return Reply(json.dumps(content, allow_nan=False, separators=(",", ":")).encode(), status=status)


def _text(text: str, status: int, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(f"{text}\n".encode(), "text/plain", status, headers or {})


def _equal(given: str, token: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())
