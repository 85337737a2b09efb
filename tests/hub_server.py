"""A Hub of one repository on this machine, whose connections can be made to break."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlparse

COMMIT = "0" * 39 + "1"


class Asked(NamedTuple):
    """A request for the content of a file. first: the byte that it was to begin with."""

    file: str
    first: int


class Break(Exception):
    """What `serve` raises to end a connection after so many bytes; reset: without a proper end."""

    def __init__(self, after: int, *, reset: bool) -> None:
        self.after, self.reset = after, reset


@contextmanager
def hub(folder: Path, serve: Callable[[Asked], None] = lambda asked: None) -> Iterator[tuple[str, list[Asked]]]:
    """Serve `folder` as the repository owner/mini; gives the endpoint and the requests as they come.

    Args:
        serve: called before the content of a file is sent; may raise Break.
    """
    requests: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(with_content=False)

        def do_GET(self) -> None:
            self.answer(with_content=True)

        def answer(self, *, with_content: bool) -> None:
            path = unquote(urlparse(self.path).path)
            names = sorted(file.name for file in folder.iterdir())
            if path == "/api/models/owner/mini/revision/main" or path == f"/api/models/owner/mini/revision/{COMMIT}":
                siblings = [{"rfilename": name} for name in names]
                self.send_json({"id": "owner/mini", "sha": COMMIT, "siblings": siblings, "private": False})
            elif path.startswith("/api/models/owner/mini/tree/"):
                files = [(name, (folder / name).stat().st_size) for name in names]
                self.send_json([{"type": "file", "path": n, "size": size, "oid": etag(n)} for n, size in files])
            elif path.startswith("/owner/mini/resolve/") and (name := path.rsplit("/", 1)[1]) in names:
                self.send_file(name, with_content=with_content)
            else:
                self.send_json({"error": "Repository not found"}, 404)

        def send_json(self, value: object, status: int = 200) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        def send_file(self, name: str, *, with_content: bool) -> None:
            content = (folder / name).read_bytes()
            first = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
            self.send_response(206 if first else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{etag(name)}"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(content) - first))
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if not with_content:
                return
            asked = Asked(name, first)
            requests.append(asked)
            try:
                serve(asked)
            except Break as broken:
                self.wfile.write(content[first : first + broken.after])
                self.wfile.flush()
                if broken.reset:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
            else:
                self.wfile.write(content[first:])

        def log_message(self, format: str, *args: object) -> None:
            pass

        def finish(self) -> None:
            with suppress(OSError):  # of a connection that was broken on purpose
                super().finish()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag(name: str) -> str:
    return f"{sum(name.encode()) + 7 * len(name):040x}"
