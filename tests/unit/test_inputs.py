"""Names of models and data sets: a folder here, a cached snapshot, a hub, or one line that says what to do."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from roll_async.config.api import ConfigError, load, load_with_warnings
from roll_async.launch.checks.gate import require_models
from roll_async.launch.checks.inputs import is_hub_name, missing_inputs
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "rlvr_config_async.yaml"
FILES = {"config.json": b'{"model_type": "qwen2"}', "model.safetensors": b"weights", "rows.jsonl": b"{}\n"}
SHA = "a" * 40
ASK = """
import sys
from roll_async.config.api import load
from roll_async.launch.checks.inputs import resolve_names
try:
    config = resolve_names(load(sys.argv[1], sys.argv[2:]))
except ValueError as error:
    sys.exit(f"{error}")
print(config.pretrain, config.actor_infer.model_args.model_name_or_path, config.actor_train.data_args.file_name[0])
"""


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as a snapshot needs."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        name = self.path.partition("?")[0]
        if "/resolve/" in name and (data := FILES.get(name.rpartition("/")[2])) is not None:
            etag = hashlib.sha256(data).hexdigest()
            return self.answer(data, {"ETag": f'"{etag}"', "X-Repo-Commit": SHA})
        if "/tree/" in name and "/acme/" in name:
            entries = [{"type": "file", "path": f, "size": len(d), "oid": "b" * 40} for f, d in FILES.items()]
            return self.answer(json.dumps(entries).encode(), {})
        if name.startswith("/api/") and "/acme/" in name:
            siblings = [{"rfilename": f} for f in FILES]
            return self.answer(json.dumps({"id": "acme/tiny", "sha": SHA, "siblings": siblings}).encode(), {})
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, data, headers):
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def ask(tmp_path):
    """Resolve the names of a shipped config against a hub on loopback, in a process with a cache of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def run(*overrides, code=ASK, **env):
        where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf")}
        keep = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
        return subprocess.run(
            [sys.executable, "-c", code, str(CONFIG), *overrides],
            capture_output=True, text=True, timeout=patient(120), cwd=tmp_path,
            env={**keep, **where, **env, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    yield run
    server.shutdown()
    server.server_close()
    thread.join(timeout=patient(10))


@pytest.mark.slow
def test_a_hub_name_is_fetched_once_and_found_in_the_cache_afterwards(ask):
    names = ("pretrain=acme/tiny", "actor_train.data_args.file_name=hf://datasets/acme/rows/rows.jsonl")
    done = ask(*names)
    assert done.returncode == 0, done.stderr
    policy, engine, rows = done.stdout.split()
    assert policy == engine and json.loads((Path(policy) / "config.json").read_text()) == {"model_type": "qwen2"}
    assert Path(rows).read_bytes() == FILES["rows.jsonl"]
    offline = ask(*names, HF_HUB_OFFLINE="1")
    assert offline.stdout == done.stdout, offline.stderr


@pytest.mark.slow
def test_a_conversion_takes_the_names_that_a_run_takes(ask):
    code = "import sys; from roll_async.cli import main; sys.exit(main(['convert', sys.argv[2], 'there']))"
    found = ask("acme/tiny", code=code)
    assert found.returncode == 2 and "no such folder" not in found.stderr, "it was fetched, and is no model"
    unknown = ask("nobody/nothing", code=code)
    assert unknown.returncode == 2 and unknown.stderr.count("\n") == 1
    assert "SOURCE: nobody/nothing is neither a folder here nor a repository of the hub" in unknown.stderr


@pytest.mark.slow
def test_what_cannot_be_reached_or_does_not_exist_is_one_line_with_the_remedy(ask):
    offline = ask("pretrain=acme/tiny", HF_HUB_OFFLINE="1")
    assert offline.stderr.count("\n") == 1 and "run: hf download acme/tiny" in offline.stderr
    unknown = ask("pretrain=nobody/nothing")
    assert "nobody/nothing is neither a folder here nor a repository of the hub" in unknown.stderr
    other = ask("pretrain=modelscope://acme/tiny")
    assert other.returncode == 1 and "pip install modelscope" in other.stderr


def test_a_missing_relative_folder_is_no_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").mkdir()
    assert is_hub_name("Qwen/Qwen2.5-7B") and is_hub_name("gpt2")
    assert not is_hub_name("output/model") and not is_hub_name("./a/b") and not is_hub_name("/a/b")
    found = dict(missing_inputs(load(CONFIG, ["pretrain=output/model"])))
    assert found["pretrain"] == "model folder output/model does not exist or holds no config.json"


def test_a_missing_file_of_a_validation_set_is_named_by_the_key_of_its_set():
    sets = "validation.sets={more: {data_args: {file_name: no/more.jsonl}}, sampled: {generating_args: {top_p: 0.9}}}"
    config = load(
        ROOT / "configs" / "rlvr_config_async_cpu.yaml", [sets, "validation.data_args.file_name=no/main.jsonl"]
    )
    found = {key: text for key, text in missing_inputs(config) if key.startswith("validation")}
    assert set(found) == {"validation.data_args.file_name", "validation.sets.more.data_args.file_name"}
    assert "no/more.jsonl" in found["validation.sets.more.data_args.file_name"]


def test_a_variable_that_the_chat_template_does_not_read_is_refused_at_its_place_before_anything_starts(tmp_path):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    fast.chat_template = "{{ messages[0].content }}{{ '<think>' if enable_thinking }}"
    fast.save_pretrained(tmp_path)
    named = (
        f"pretrain={tmp_path}",
        "actor_train.data_args={file_name: a.jsonl, template_kwargs: {enable_thinking: true}}",
    )
    loaded = load_with_warnings(ROOT / "configs" / "rlvr_config_async_cpu.yaml", named)
    require_models(loaded, loaded.config)
    typed = "validation.data_args.template_kwargs={enable_thinkin: false}"
    loaded = load_with_warnings(ROOT / "configs" / "rlvr_config_async_cpu.yaml", [*named, typed])
    with pytest.raises(ConfigError) as error:
        require_models(loaded, loaded.config)
    assert str(error.value) == (
        f"<override {typed}>: error C203: validation.data_args.template_kwargs.enable_thinkin: false has no effect: "
        "the chat template (native) reads no such variable; name one that it reads (enable_thinking), or remove it"
    )
