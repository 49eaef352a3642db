"""A web server for tests: a folder with listings, ranges and ETags, and faults."""

import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class WebServer:
    """`fault(path, number)` returns the fault of the request with this number (from 0) for a path, or None.

    Faults: an int is the status of the answer; "reset" closes the connection; "truncated" ends it half-way; a float
    delays it by as many seconds; "no ranges" sends the whole file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fault: Callable[[str, int], int | str | float | None] = lambda path, number: None
        self.requests: Counter[str] = Counter()
        self.queries: list[str] = []
        """Path with query of every request."""
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Send the answer to a GET or HEAD request."""
        path = request.path.partition("?")[0]
        self.queries.append(request.path)
        fault = self.fault(path, self.requests[path])
        self.requests[path] += 1
        file = self.folder / path.lstrip("/")
        if isinstance(fault, float):
            time.sleep(fault)
        if fault == "reset":
            request.close_connection = True
            request.connection.close()
            return
        if file.is_dir():
            page = "".join(f'<a href="{one.name}{"/" * one.is_dir()}">' for one in file.iterdir()).encode()
            request.send_response(200)
            request.send_header("Content-Length", str(len(page)))
            request.end_headers()
            request.wfile.write(page if request.command == "GET" else b"")
            return
        if isinstance(fault, int) or not file.is_file():
            request.send_error(fault if isinstance(fault, int) else 404)
            return
        content = file.read_bytes()
        tag, wanted, size = hashlib.sha256(content).hexdigest()[:16], request.headers.get("Range"), len(content)
        if wanted and fault != "no ranges":
            start, end = map(int, wanted.removeprefix("bytes=").split("-"))
            content = content[start : end + 1]
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{start + len(content) - 1}/{size}")
        else:
            request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.send_header("ETag", f'"{tag}"')
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content[: len(content) // 2] if fault == "truncated" else content)
        request.close_connection = fault == "truncated"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[WebServer]:
    """Serve a folder from threads of this process."""
    server = WebServer(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                server.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, *_: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_address[1]}"
        threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            listening.shutdown()
