"""A stand-in for the Hugging Face hub on loopback: the parts of its HTTP API that huggingface_hub calls to create a
repository, commit to it (regular files, and large ones by the LFS protocol), list it and download from it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_stand_in"
NAMES = r"(?P<repo>[\w.-]+/[\w.-]+)"


class Hub:
    """What is stored."""

    def __init__(self):
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.commits: list[tuple[str, str, list[str]]] = []  # repository, summary, paths
        self.large: dict[str, bytes] = {}
        self.unknown: list[str] = []  # requests that this stand-in does not answer

    def sha(self, repo: str) -> str:
        return hashlib.sha1(repr(sorted(self.repositories[repo].items())).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *words):
        pass

    def answer(self, status: int, content: object = None, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        path = self.path.partition("?")[0]
        for method, pattern, handle in ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, path)):
                if method in ("POST", "PUT") and "/lfs/" not in path and "yaml" not in path and not self.allowed():
                    return self.answer(401, {"error": "Invalid username or password."})
                return handle(self, body, **match.groupdict())
        self.hub.unknown.append(f"{self.command} {self.path}")
        return self.answer(404, {"error": "Not found"}, X_Error_Code="RepoNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    @property
    def address(self) -> str:
        return f"http://{self.headers['Host']}"

    def create(self, body):
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.hub.repositories:
            return self.answer(409, {"url": f"{self.address}/{repo}", "error": "You already created this model repo"})
        self.hub.repositories[repo] = {}
        if asked.get("private") or asked.get("visibility") == "private":  # by version of huggingface_hub
            self.hub.private.add(repo)
        return self.answer(200, {"url": f"{self.address}/{repo}", "name": repo})

    def validate(self, body):
        text = json.loads(body)["content"]
        errors = [] if text.startswith("---\n") and "\n---\n" in text[4:] else [{"message": "no metadata"}]
        self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, body, repo, revision):
        large = lambda file: file["path"].endswith(".safetensors")  # noqa: E731
        files = [
            {"path": f["path"], "uploadMode": "lfs" if large(f) else "regular", "shouldIgnore": False, "oid": None}
            for f in json.loads(body)["files"]
        ]
        self.answer(200, {"files": files, "commitOid": self.hub.sha(repo)})

    def batch(self, body, repo):
        objects = [
            {**wanted, "authenticated": True, "actions": {"upload": {"href": f"{self.address}/lfs/{wanted['oid']}"}}}
            for wanted in json.loads(body)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")

    def put(self, body, oid):
        right = hashlib.sha256(body).hexdigest() == oid
        if right:
            self.hub.large[oid] = body
        self.answer(200 if right else 400, {})

    def commit(self, body, repo, revision):
        rows = [json.loads(line) for line in body.splitlines()]
        files, summary = {}, ""
        for row in rows:
            value = row["value"]
            if row["key"] == "header":
                summary = value["summary"]
            elif row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
        self.hub.repositories[repo] |= files
        self.hub.commits.append((repo, summary, sorted(files)))
        sha = self.hub.sha(repo)
        self.answer(200, {"commitUrl": f"{self.address}/{repo}/commit/{sha}", "commitOid": sha, "success": True})

    def revision(self, body, repo, revision="main"):
        if repo not in self.hub.repositories:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        files = self.hub.repositories[repo]
        about = {"id": repo, "modelId": repo, "sha": self.hub.sha(repo), "private": repo in self.hub.private}
        return self.answer(200, about | {"tags": [], "siblings": [{"rfilename": name} for name in files]})

    def tree(self, body, repo, revision):
        files = self.hub.repositories[repo].items()
        self.answer(
            200,
            [{"type": "file", "path": n, "size": len(x), "oid": hashlib.sha1(x).hexdigest()} for n, x in files],
        )

    def resolve(self, body, repo, revision, path):
        files = self.hub.repositories.get(repo)
        if files is None:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        if path not in files:
            return self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
        content = files[path]
        tag = hashlib.sha256(content).hexdigest()
        return self.answer(200, content, ETag=f'"{tag}"', X_Repo_Commit=self.hub.sha(repo), Accept_Ranges="bytes")


REVISION = r"(?P<revision>[^/]+)"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", rf"/api/models/{NAMES}/preupload/{REVISION}", Handler.preupload),
    ("POST", rf"/{NAMES}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", Handler.put),
    ("POST", rf"/api/models/{NAMES}/commit/{REVISION}", Handler.commit),
    ("GET", rf"/api/models/{NAMES}", Handler.revision),
    ("GET", rf"/api/models/{NAMES}/revision/{REVISION}", Handler.revision),
    ("GET", rf"/api/models/{NAMES}/tree/{REVISION}", Handler.tree),
    ("HEAD", rf"/{NAMES}/resolve/{REVISION}/(?P<path>.+)", Handler.resolve),
    ("GET", rf"/{NAMES}/resolve/{REVISION}/(?P<path>.+)", Handler.resolve),
]


@contextmanager
def serving():
    """The hub, and its address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
