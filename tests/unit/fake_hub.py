"""A hub on loopback that speaks as much of the protocol as the real client needs to publish a model: repositories,
branches, the upload mode of each file, LFS objects, and commits of one JSON line a file.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_good"


class FakeHub:
    """`repos`: name to {"private", "branches": {branch: {path: bytes}}}. Everybody may write to `me` alone."""

    def __init__(self, address):
        self.address = address
        self.repos, self.objects, self.commits, self.asked = {}, {}, [], []
        self.large = (".safetensors", ".png")
        """Endings of files that go to LFS."""
        self.on_object = threading.Event()
        """An LFS object begins to come."""
        self.hold = None
        """Event until which no LFS object is taken, or no question at all is answered (`silent`)."""
        self.silent = False

    def add(self, name, files, *, private=False):
        self.repos[name] = {"private": private, "branches": {"main": {".gitattributes": b"", **files}}}

    def answer(self, method, path, body):
        """(status, JSON, error code of the hub)."""
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": "me", "orgs": []}, None
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, None
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if found := re.fullmatch(r"/lfs/(\w+)", path):
            self.on_object.set()
            if self.hold:
                self.hold.wait(600)
            assert hashlib.sha256(body).hexdigest() == found[1]
            self.objects[found[1]] = body
            return 200, {}, None
        if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            return 200, {"transfer": "basic", "objects": [self._action(o) for o in json.loads(body)["objects"]]}, None
        name, what, branch = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([^/]+)/([^/]+))?", path).groups()
        repo = self.repos.get(name)
        if repo is None:
            return 404, {"error": "Repository not found"}, "RepoNotFound"
        branch = unquote(branch or "main")
        if what == "branch":
            repo["branches"].setdefault(branch, dict(repo["branches"]["main"]))
            return 200, {}, None
        if branch not in repo["branches"]:
            return 404, {"error": "Invalid rev id"}, "RevisionNotFound"
        return getattr(self, f"_{what or 'revision'}")(name, repo, repo["branches"][branch], body)

    def _create(self, asked):
        owner = asked["organization"] or "me"
        name = f"{owner}/{asked['name']}"
        if owner != "me":
            return 403, {"error": f"You don't have the rights to create a model under the namespace {owner}"}, None
        if exists := name in self.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.address}/{name}"}, None
        self.add(name, {}, private=asked.get("visibility") == "private")
        return 200 + exists, {"url": f"{self.address}/{name}"}, None

    def _action(self, wanted):
        return {**wanted, "actions": {"upload": {"href": f"{self.address}/lfs/{wanted['oid']}"}}}

    def _revision(self, name, repo, files, body):
        head = re.match(r"---\n(.*?)\n---\n", files.get("README.md", b"").decode(), re.S)
        return 200, {
            "id": name, "sha": "0" * 40, "private": repo["private"], "siblings": [{"rfilename": f} for f in files],
            "cardData": yaml.safe_load(head[1]) if head else None,
        }, None  # fmt: skip

    def _tree(self, name, repo, files, body):
        return 200, [{"type": "file", "path": f, "size": len(c), "oid": "0" * 40} for f, c in files.items()], None

    def _preupload(self, name, repo, files, body):
        mode = {True: "lfs", False: "regular"}
        paths = [file["path"] for file in json.loads(body)["files"]]
        return 200, {
            "files": [{"path": p, "uploadMode": mode[p.endswith(self.large)], "shouldIgnore": False} for p in paths]
        }, None  # fmt: skip

    def _commit(self, name, repo, files, body):
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    self.commits.append((name, value["summary"]))
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        return 200, {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.address}/{name}/commit/1"}, None


@contextmanager
def fake_hub():
    """A hub that answers until the end."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self):
            body = self._body()
            path = urlsplit(self.path).path
            hub.asked.append(f"{self.command} {path}")
            if hub.silent:
                hub.hold.wait(600)
            if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                status, answer, code = 401, {"error": "Invalid username or password."}, None
            else:
                status, answer, code = hub.answer(self.command, path, body)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            if code:
                self.send_header("X-Error-Code", code)
            with suppress(ConnectionError):  # of a client that has given up
                self.end_headers()
                self.wfile.write(text)

        do_GET = do_POST = do_PUT = handle_one

        def _body(self):
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, name="fake-hub")
    thread.start()
    try:
        yield hub
    finally:
        if hub.hold:
            hub.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
