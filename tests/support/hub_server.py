"""A stand-in for a model hub: the parts of its HTTP API that fetching a repository uses, on a free port."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Repositories by "org/name", and what went over the wire.

    `refuse` maps a repository to (status, X-Error-Code). The next file that is longer than `cut_after` breaks off
    there, once; with `dies_with_cut` the hub is `broken` from then on and fails every request.
    """

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut_after: int | None = None
    dies_with_cut: bool = False
    broken: bool = False
    sent: list[tuple[str, int]] = field(default_factory=list)
    """(file, bytes of its body) of each transfer."""

    def add(self, repo: str, directory: Path) -> None:
        self.repos[repo] = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}

    def commit(self, repo: str) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.repos[repo].items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None: ...

    def _answer(self, *, with_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        rest = parts[4:] if is_api else parts[2:]
        if self.hub.broken:
            self._refuse(500, "")
        elif repo in self.hub.refuse:
            self._refuse(*self.hub.refuse[repo])
        elif repo not in self.hub.repos:
            self._refuse(404, "RepoNotFound")
        elif len(rest) > 1 and rest[1] not in ("main", self.hub.commit(repo)):
            self._refuse(404, "RevisionNotFound")
        elif is_api:
            self._describe(repo, is_tree=bool(rest) and rest[0] == "tree")
        elif (name := "/".join(rest[2:])) in self.hub.repos[repo]:
            self._send_file(repo, name, with_body=with_body)
        else:
            self._refuse(404, "EntryNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _describe(self, repo: str, *, is_tree: bool) -> None:
        files = self.hub.repos[repo]
        if is_tree:
            answer: object = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            answer = {"id": repo, "modelId": repo, "sha": self.hub.commit(repo), "siblings": siblings}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, repo: str, name: str, *, with_body: bool) -> None:
        content = self.hub.repos[repo][name]
        start = 0
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", self.hub.commit(repo))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not with_body:
            return
        body = content[start:]
        cut = self.hub.cut_after
        if cut is not None and cut < len(body):
            body, self.close_connection = body[:cut], True
            self.hub.cut_after, self.hub.broken = None, self.hub.dies_with_cut
        self.wfile.write(body)
        self.hub.sent.append((name, len(body)))


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
