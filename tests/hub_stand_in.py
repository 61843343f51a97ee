"""A stand-in for the Hugging Face hub: serves folders as repositories, the way that the hub's API does.

folder/models/team/tiny/config.json          the model team/tiny
folder/datasets/team/problems/train.jsonl    the data set team/problems
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

API = re.compile(r"/api/(models|datasets)/([\w-]+/[\w-]+)(?:/(revision|tree|paths-info)/[^/]+(?:/(.*))?)?$")
FILE = re.compile(r"/(?:(datasets)/)?([\w-]+/[\w-]+)/resolve/[^/]+/(.+)$")


class _Handler(BaseHTTPRequestHandler):
    folder: Path
    asked: list[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        if (found := API.match(path)) and (root := self.folder / found[1] / found[2]).is_dir():
            return self._say(_tree(root) if found[3] == "tree" else _info(found[2], root))
        if found := FILE.match(path):
            root = self.folder / (found[1] or "models") / found[2]
            if (root / found[3]).is_file():
                return self._send((root / found[3]).read_bytes(), {"X-Repo-Commit": _commit(root), "ETag": f'"{_oid(root / found[3])}"'})
            code = "EntryNotFound" if root.is_dir() else "RepoNotFound"
            return self._send(b"", {"X-Error-Code": code}, 404)
        return self._send(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        found = API.match(self.path.partition("?")[0])
        assert found, self.path
        assert found[3] == "paths-info", self.path
        wanted = json.loads(body)["paths"] if body[:1] == b"{" else re.findall(r"paths=([^&]+)", body.decode())
        self._say([each for each in _tree(self.folder / found[1] / found[2]) if each["path"] in wanted])

    def _say(self, value: Any) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, body: bytes, headers: dict[str, str], code: int = 200) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _files(root: Path) -> list[Path]:
    return sorted(file for file in root.rglob("*") if file.is_file())


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def _commit(root: Path) -> str:
    return hashlib.sha1("".join(map(_oid, _files(root))).encode()).hexdigest()


def _tree(root: Path) -> list[dict[str, Any]]:
    return [{"type": "file", "path": str(f.relative_to(root)), "size": f.stat().st_size, "oid": _oid(f)} for f in _files(root)]


def _info(name: str, root: Path) -> dict[str, Any]:
    siblings = [{"rfilename": str(file.relative_to(root))} for file in _files(root)]
    return {"id": name, "modelId": name, "sha": _commit(root), "siblings": siblings, "private": False, "gated": False, "tags": []}


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the repositories in a folder; yields the value of HF_ENDPOINT and the list of what was asked."""
    asked: list[str] = []
    handler = type("Handler", (_Handler,), {"folder": folder, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
