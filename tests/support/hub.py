"""A model hub on this machine's loopback interface. It serves folders that a test fills to the real hub clients."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
_UPLOAD = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Commits, each {path: bytes}, and the branches and tags that name them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    """The token that a client must send to read the repository; None: no token is needed."""
    gated: bool = False
    """True: every client can see the repository, but none can read its files."""
    private: bool = False
    """As an upload made it."""


class LoopbackHub(AbstractContextManager["LoopbackHub"]):
    """Serves inside its ``with`` block. ``url`` is for HF_ENDPOINT, which clients read when they are imported.

    Answers the requests of huggingface_hub for whole files: repo info, trees, paths-info, HEAD and GET of ``resolve``
    with ETag and X-Repo-Commit, and errors with the codes that huggingface_hub turns into its exceptions. It takes
    models too, from the token ``writer``, with all files in one request.
    """

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.status: int | None = None
        """If set, the status of every answer: a hub that is overloaded or broken."""
        self.writer = ""
        """The token with which models are uploaded; empty: nobody may."""
        self.requests: list[tuple[str, str]] = []
        """(method, path) of every request."""

    def publish(
        self,
        kind: str,
        name: str,
        files: Mapping[str, bytes | str] | Path,
        ref: str = "main",
        token: str | None = None,
        gated: bool = False,
    ) -> str:
        """Adds a commit with these files, or those of a folder, and points the branch or tag ``ref`` to it. Returns the
        commit."""
        if isinstance(files, Path):
            root = files
            files = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        content = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
        commit = hashlib.sha1(repr(sorted(content.items())).encode()).hexdigest()
        repository = self.repositories.setdefault((kind, name), Repository())
        repository.commits[commit] = content
        repository.refs[ref] = commit
        repository.token, repository.gated = token, gated
        return commit

    def asked(self, pattern: str) -> list[str]:
        """``GET /path`` of the requests whose path matches a shell pattern."""
        return [f"{method} {path}" for method, path in self.requests if fnmatch.fnmatch(path, pattern)]

    def __enter__(self) -> LoopbackHub:
        hub = self

        class Handler(_Handler):
            serves = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    serves: LoopbackHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.serves.requests.append((self.command, path))
        if self.serves.status is not None:
            return self._send(self.serves.status, b"{}")
        if match := _API.fullmatch(path):
            return self._api(*match.groups())
        if match := _FILE.fullmatch(path):
            return self._file("dataset" if match[1] else "model", *match.groups()[1:])
        return self._refuse(404, "EntryNotFound", f"no such page {path}")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Uploads as one commit; other requests as :meth:`do_GET`."""
        path = unquote(urlsplit(self.path).path)
        upload = _UPLOAD.fullmatch(path)
        if path != "/api/repos/create" and path != "/api/validate-yaml" and upload is None:
            return self.do_GET()
        self.serves.requests.append((self.command, path))
        lines = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token != self.serves.writer:
            return self._refuse(403, "Forbidden", f"this token may not write: {token}")
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if upload is None:
            request = json.loads(lines)
            name = "/".join(part for part in (request.get("organization"), request["name"]) if part)
            if ("model", name) in self.serves.repositories:
                problem = {"error": "You already created this model repo", "url": f"{self.serves.url}/{name}"}
                return self._send(409, json.dumps(problem).encode())
            commit = self.serves.publish("model", name, {})
            self.serves.repositories["model", name].private = "private" in (
                request.get("visibility"),
                "private" if request.get("private") else None,
            )  # of clients from 2.0 on, and before
            return self._answer({"url": f"{self.serves.url}/{name}", "id": name, "commit": commit})
        if upload[2] == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(lines)["files"]
            ]
            return self._answer({"files": files})
        repository = self.serves.repositories["model", upload[1]]
        files = dict(repository.commits[repository.refs["main"]])
        for line in map(json.loads, lines.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        commit = self.serves.publish("model", upload[1], files)
        url = f"{self.serves.url}/{upload[1]}/commit/{commit}"
        return self._answer({"commitOid": commit, "commitUrl": url, "success": True})

    def _answer(self, body: Any) -> None:
        self._send(200, json.dumps(body).encode())

    def _api(self, kind: str, name: str, endpoint: str | None, revision: str | None, below: str | None) -> None:
        commit = self._commit(kind, name, unquote(revision or "main"), reads=endpoint not in (None, "revision"))
        if commit is None:
            return None
        files = self.serves.repositories[kind, name].commits[commit]
        if endpoint in ("tree", "paths-info"):
            paths = set(files) if endpoint == "tree" else set(self._asked_paths())
            chosen = [p for p in sorted(files) if p in paths and p.startswith(below or "")]
            entries = [
                {"type": "file", "path": p, "size": len(files[p]), "oid": hashlib.sha1(files[p]).hexdigest()}
                for p in chosen
            ]
            return self._send(200, json.dumps(entries).encode(), {"X-Repo-Commit": commit})
        info = {
            "_id": commit[:24],
            "id": name,
            "sha": commit,
            "private": self.serves.repositories[kind, name].private,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }
        return self._send(200, json.dumps(info | {"siblings": [{"rfilename": p} for p in sorted(files)]}).encode())

    def _asked_paths(self) -> list[str]:
        body: Any = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        paths: list[str] = body.get("paths", [])
        return paths

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        commit = self._commit(kind, name, revision, reads=True)
        if commit is None:
            return None
        content = self.serves.repositories[kind, name].commits[commit].get(path)
        if content is None:
            return self._refuse(404, "EntryNotFound", f"{path} is not in the repository", {"X-Repo-Commit": commit})
        tag = hashlib.sha1(content).hexdigest()
        return self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": commit, "Accept-Ranges": "none"})

    def _commit(self, kind: str, name: str, revision: str, reads: bool) -> str | None:
        """None where the request was refused."""
        repository = self.serves.repositories.get((kind, name))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.token is not None and token != repository.token):
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        elif repository.gated and reads:
            self._refuse(403, "GatedRepo", "Access to it is restricted")
        elif (commit := repository.refs.get(revision, revision)) not in repository.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return commit
        return None

    def _refuse(self, status: int, code: str, message: str, more: Mapping[str, str] | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, **(more or {})}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
