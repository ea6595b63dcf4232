"""A run's model on the hub: what the real client sends to one on loopback, what the card says and does not say."""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import close_session

from roll_async.checkpoint.folders.manifest import write_manifest
from roll_async.cli import main
from roll_async.commands.reading.model_card import _fenced, public_text
from roll_async.config.api import dump, load_with_warnings
from roll_async.observe.run_record import RunRecord, write_record
from tests.patience import patient
from tests.unit.fake_hub import TOKEN, fake_hub
from tests.unit.observe.written_run import write_run

ROOT = Path(__file__).resolve().parents[2]
CACHE = "/home/alice/.cache/huggingface/hub"
WEIGHTS = bytes(range(256)) * 40


def of_run(folder):
    """A model's files, and the rest of what makes a run publishable."""
    write_record(
        folder, RunRecord(run_id="3f9a61c2", command=("roll-async", "run"), state="finished", exported_step=20)
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"throughput/samples_per_s": 40.0}) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    hf = folder / "hf"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps({"model_type": "qwen2", "_name_or_path": "/home/alice/models/base"}))
    (hf / "model.safetensors").write_bytes(WEIGHTS)
    (hf / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    return of_run(write_run(tmp_path_factory.mktemp("output")))


@pytest.fixture
def run(once, tmp_path):
    return shutil.copytree(once, tmp_path / "run")


@pytest.fixture
def hub(monkeypatch):
    """A hub that the client of this process talks to, which has read its settings when it was imported."""
    close_session()  # another test's has its limit
    with fake_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/no/such/file")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
    close_session()


def publish(run, *words, repo="me/adder"):
    return main(["publish", str(run), "--repo", repo, *map(str, words)])


def written(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def on_hub(hub, repo="me/adder", branch="main"):
    return {name: content for name, content in hub.repos[repo]["branches"][branch].items() if name != ".gitattributes"}


@pytest.mark.slow
@pytest.mark.parametrize("large", [(".safetensors", ".png"), ("none",)], ids=["lfs", "in one commit through xet's way"])
def test_the_hub_gets_byte_for_byte_what_a_dry_run_writes(large, run, hub, tmp_path, monkeypatch, capsys):
    assert publish(run, "--output", tmp_path / "dry") == 0 and hub.asked == []
    hub.large = large
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", large == (".safetensors", ".png"))
    assert publish(run, repo="adder", *["--private"]) == 0
    assert on_hub(hub) == written(tmp_path / "dry") and hub.repos["me/adder"]["private"]
    assert on_hub(hub)["model.safetensors"] == WEIGHTS and bool(hub.objects) == (large != ("none",))
    assert f"{hub.address}/me/adder" in capsys.readouterr().out
    assert publish(run) == 0, "the same run again"
    assert sorted(path.name for path in (run / "hf").iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors",
    ]  # fmt: skip


@pytest.mark.slow
def test_files_that_are_not_of_the_run_stay_unless_the_user_says_otherwise(run, hub, tmp_path, capsys):
    theirs = {"README.md": b"# mine, by hand\n", "model-00001-of-00002.safetensors": b"old", "notes.txt": b"keep"}
    hub.add("me/adder", theirs)
    assert publish(run) == 2 and on_hub(hub) == theirs and hub.commits == []
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "files of no run (README.md, " in told
    assert "--replace" in told
    assert publish(run, "--revision", "rl") == 0 and on_hub(hub) == theirs, "a new branch is of nobody"
    assert "README.md" in on_hub(hub, branch="rl") and 'revision="rl"' in on_hub(hub, branch="rl")["README.md"].decode()
    assert publish(run, "--replace") == 0
    now = on_hub(hub)
    assert now["notes.txt"] == b"keep" and "model-00001-of-00002.safetensors" not in now
    assert b"3f9a61c2" in now["README.md"]
    write_record(run, RunRecord(run_id="another", state="finished"))
    capsys.readouterr()
    assert publish(run) == 2 and "files of run 3f9a61c2" in capsys.readouterr().err


def test_what_is_to_be_private_is_never_sent_to_a_public_repository(run, hub, capsys):
    hub.add("me/adder", {})
    assert publish(run, "--private") == 2 and "me/adder exists and is public" in capsys.readouterr().err
    assert hub.commits == []


CASES = {
    "no run": "is no folder: give the folder of a run",
    "no model": "has no hf/, which a run writes when it ends (this one: interrupted); or go on with it: roll-async run",
    "cut off": "lacks weights: its export was cut off",
    "damaged": "/run/hf/tokenizer_config.json is no JSON object; ",
    "damaged index": "model.safetensors.index.json is no JSON object; ",
    "no adapter": "has no hf_adapter/: only runs with lora_rank write one",
    "bad name": "Cannot have -- or .. in repo_id: 'me/a--b'",
    "not logged in": "not logged in: run `hf auth login`, or set HF_TOKEN",
    "wrong token": "refused with HTTP 401: Invalid user token.",
    "no right": "You don't have the rights to create a model under the namespace others; the token may not write to",
    "offline": "HF_HUB_OFFLINE is set: unset it, or write the folder alone with --dry-run",
    "no network": "cannot be reached (ConnectError",
    "silent": "cannot be reached (ReadTimeout",
    "there already": "exists; remove it, or name another folder with --output",
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case == "no right" else []) for case in CASES]
)
def test_what_cannot_be_published_is_one_line_and_exit_code_2(case, run, hub, tmp_path, monkeypatch, capsys):
    words, repo = [], "me/adder"
    match case:
        case "no run":
            run = tmp_path / "nowhere"
        case "no model":
            shutil.rmtree(run / "hf")
            write_record(run, RunRecord(command=("roll-async", "run", "--config", "mine"), state="interrupted"))
        case "cut off":
            (run / "hf/model.safetensors").unlink()
        case "damaged":
            (run / "hf/tokenizer_config.json").write_text("[1]")
        case "damaged index":
            (run / "hf/model.safetensors.index.json").write_text('{"weight_map": ')
        case "no adapter":
            words = ["--adapter"]
        case "bad name":
            repo = "me/a--b"
        case "not logged in":
            monkeypatch.delenv("HF_TOKEN")
        case "wrong token":
            monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        case "no right":
            repo = "others/adder"
        case "offline":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        case "no network":
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        case "silent":
            hub.silent, hub.hold, words = True, threading.Event(), ["--timeout", "0.3"]
        case "there already":
            (run / "hub").mkdir()
            words = ["--dry-run"]
    assert publish(run, *words, repo=repo) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith("roll-async publish: ") and CASES[case] in told, told
    assert hub.commits == [] and hub.repos == {}


@pytest.mark.slow
def test_ctrl_c_while_weights_are_sent_is_130_and_commits_nothing(run, tmp_path):
    (tmp_path / "tmp").mkdir()
    with fake_hub() as hub:
        hub.hold = threading.Event()
        env = os.environ | {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        env |= {"HF_HUB_OFFLINE": "", "TMPDIR": str(tmp_path / "tmp")}
        words = [sys.executable, "-m", "roll_async", "publish", str(run), "--repo", "me/adder"]
        started = subprocess.Popen(words, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            assert hub.on_object.wait(patient(60))
            started.send_signal(signal.SIGINT)
            _, told = started.communicate(timeout=min(patient(30), 300))  # the hub holds the weights for longer
        finally:
            started.kill()
            started.wait()
        assert started.returncode == 130 and "interrupted; the same command uploads what is missing" in told
        assert "Traceback" not in told and hub.commits == []
        assert list((tmp_path / "tmp").iterdir()) == []


def test_folders_addresses_and_names_in_a_cache_are_not_those_of_the_machine():
    assert public_text(f"{CACHE}/models--Qwen--Qwen2.5-0.5B/snapshots/abc") == "Qwen/Qwen2.5-0.5B"
    data = f"{CACHE}/datasets--openai--gsm8k/snapshots/abc/main/train.jsonl"
    assert public_text(data) == "hf://datasets/openai/gsm8k/main/train.jsonl"
    assert public_text("/home/alice/my files/model") == "./model" == public_text("../../alice/model")
    assert public_text("python /home/alice/tool.py --key=/srv/k/x") == "python ./tool.py --key=./x"
    for address in (
        "http://bob:pw@judge.corp:8000/v1", "10.0.0.7:6379", "redis://:pw@cache.corp/0", "s3://mine/x",
        "postgresql+psycopg://u:p@db/x", "http://bob:p,w@judge.corp", "HTTP://judge.corp", "judge.corp:8000",
        "mongodb://bob:pw@db1.corp:27017,db2.corp:27017", "bob:pw@proxy.corp:3128", "bob:pw@proxy:3128",
        "localhost:6379", "[fd00::1]:8000", "judge.md:18000",
    ):  # fmt: skip
        assert set(re.split(",| and ", public_text(f"{address} and {address}"))) == {"<address>"}, address
    began = time.monotonic()
    for same in (
        "hf://datasets/a/b/c",
        "Qwen/Qwen2.5-0.5B",
        "and/or",
        "1/2/3",
        "/no_think",
        "./output/x/y",
        "a.b.score",
        *(part * 20_000 for part in ("a", "a.", "a@")),
        "max_steps=5 x:10 1.5:10 rewards.maths=mine:score",
        "tests/foo.py:123 README.md:12 x[1:2] [::2]",
    ):
        assert public_text(same) == same
    assert time.monotonic() - began < patient(5), "a long text takes its length, not the square of it"


@pytest.mark.parametrize("home", ["/", "/root"])
def test_a_home_is_hidden_at_the_borders_of_paths_only(home, monkeypatch):
    monkeypatch.setenv("HOME", home)
    assert public_text("python x/y /srv/root/tool.py http://a.corp/root/x") == "python x/y ./tool.py <address>"
    assert public_text("or/and /rooted a/root /root") == f"or/and /rooted a/root {'/root' if home == '/' else '~'}"


def test_a_home_with_a_name_is_hidden_wherever_it_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/bob")
    for text in ("to /home/bob.", "-I/home/bob/include", "\\n/home/bob/x", "file:///home/bob/x", "x /nfs/home/bob/x"):
        assert "bob" not in public_text(text) + _fenced("response", text), text
    assert _fenced("response", "/home/bobby /home/bob.old").count("~") == 0


SECRETS = f"""
output_dir: /home/alice/output
pretrain: {CACHE}/models--Qwen--Qwen2.5-0.5B/snapshots/abc
system_envs: {{WANDB_API_KEY: topsecret, HOME: /home/alice}}
tracking: {{tracker_kwargs: {{entity: alice, api_key: topsecret}}, rollout_dump_dir: null}}
ledger: {{path: /home/alice/ledger.sqlite, enable: true}}
actor_train:
  model_args: {{model_name_or_path: "{CACHE}/models--Qwen--Qwen2.5-0.5B/snapshots/abc", lora_rank: 0}}
  data_args: {{file_name: ["{CACHE}/datasets--openai--gsm8k/snapshots/abc/train.jsonl"]}}
rewards: {{maths: {{type: math_rule, judge: {{base_url: "http://alice.corp/v1"}}}}}}
custom_envs: {{web: {{env_type: shop, env_config: {{token: topsecret, root: /home/alice/shop}}}}}}
"""


@pytest.mark.slow
def test_the_card_says_how_the_model_was_made_and_nothing_of_the_machine(run, tmp_path):
    (run / "config.yaml").write_text(SECRETS)
    (run / "hf/README.md").write_text("---\nlicense: apache-2.0\nbase_model: Qwen/older\n---\n# The base's own card\n")
    (run / "hf/LICENSE").write_text("of the base")
    assert publish(run, "--output", tmp_path / "dry", "--samples", "2") == 0
    files = written(tmp_path / "dry")
    card = ModelCard.load(tmp_path / "dry/README.md")
    assert card.data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-0.5B", "datasets": ["openai/gsm8k"], "library_name": "transformers",
        "license": "apache-2.0", "pipeline_tag": "text-generation", "tags": ["roll_async", "reinforcement-learning"],
        "roll_async_run": "3f9a61c2",
    }  # fmt: skip
    first, last = (sum(1 - math.exp(-step / 8) for step in five) / 5 for five in (range(1, 6), range(16, 21)))
    said = [
        "maths: `math_rule`", "web: `shop`", f"| `reward/mean` | {first:.4g} | {last:.4g} |", "(reward.png)",
        "| `validation/accuracy` | 0.4147 (step 5) | 0.8679 (step 20) |", "vllm serve me/adder",
        'from_pretrained("me/adder", dtype="auto")', "roll-async run --config run_config.yaml",
    ]  # fmt: skip
    assert [text for text in said if text not in card.text] == []
    assert card.text.count("Prompt:") == 2 and "\x1b" not in card.text and "base's own card" not in card.text
    for name, content in files.items():
        for leak in (b"alice", b"topsecret", str(tmp_path).encode(), str(Path.home()).encode() + b"/"):
            assert leak not in content, f"{leak} in {name}"
    assert yaml.safe_load(files["run_config.yaml"])["pretrain"] == "Qwen/Qwen2.5-0.5B"
    assert files["LICENSE"] == b"of the base" and files["reward.png"][:4] == b"\x89PNG"


def test_the_card_of_a_model_that_reads_images_names_its_own_classes(run, tmp_path):
    (run / "hf/config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}}))
    assert publish(run, "--output", tmp_path / "dry") == 0
    card = ModelCard.load(tmp_path / "dry/README.md")
    assert card.data.pipeline_tag == "image-text-to-text"
    code = card.text.partition("```python\n")[2].partition("```")[0]
    compile(code, "card", "exec")
    assert "import AutoModelForImageTextToText, AutoProcessor\n" in code and '{"type": "image", "path": "..."}' in code
    assert "tokenizer" not in code and "CausalLM" not in code


@pytest.mark.slow
@pytest.mark.parametrize("key", ["reward/mean", "staleness/mean"])
def test_numbers_that_are_none_in_some_steps_are_gaps_of_the_curve(key, run, tmp_path):
    first, *rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([json.dumps(json.loads(first) | {key: math.nan}), *rows, ""]))
    assert publish(run, "--output", tmp_path / "dry", "--samples", "0") == 0
    assert "(reward.png)" in (tmp_path / "dry/README.md").read_text()


@pytest.mark.slow
def test_a_text_cannot_end_its_block(run, tmp_path):
    path = run / "samples/step_00000020.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"response": "a\n````\n# Heading"}) + "\n" for row in rows))
    assert publish(run, "--output", tmp_path / "dry") == 0
    text = (tmp_path / "dry/README.md").read_text()
    assert "`````text\na\n````\n# Heading\n`````" in text
    outside = re.sub(r"(?m)^(`{3,})\w*\n.*?^\1$", "", text, flags=re.S)
    assert "# Heading" not in outside and "onerror" not in outside
    assert publish(run, "--output", tmp_path / "none", "--samples", "0") == 0
    assert "## Samples" not in (tmp_path / "none/README.md").read_text()


def config_of(path, *overrides):
    return load_with_warnings(path, overrides).config


KINDS = {
    "rlvr_config_async_cpu": "reinforcement-learning", "fully_async_cpu": "reinforcement-learning",
    "agentic_frozen_lake_async_cpu": "reinforcement-learning", "sft_demo_cpu": "sft", "dpo_demo_cpu": "dpo",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("config", KINDS)
def test_every_kind_of_run_has_a_card_and_a_config_that_runs_again(config, run, tmp_path, capsys):
    (run / "config.yaml").write_text(dump(config_of(ROOT / f"configs/{config}.yaml", "output_dir=/home/alice/output")))
    if KINDS[config] != "reinforcement-learning":
        rows = [
            {
                "step": step,
                "trainer/loss": 1 / step if step > 2 else math.nan,
                "rewards/accuracies": 0.5,
                "throughput/samples_per_s": 9.0,
            }
            | ({"validation/loss": 2 / step} if step % 5 == 0 else {})
            for step in range(1, 21)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        shutil.rmtree(run / "samples")
    assert publish(run, "--output", tmp_path / "dry", "--base-model", "Qwen/Qwen2.5-0.5B") == 0
    card = ModelCard.load(tmp_path / "dry/README.md")
    assert KINDS[config] in card.data.tags and card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert ("frozen_lake" in card.text) == config.startswith("agentic")
    if KINDS[config] != "reinforcement-learning":
        assert (
            tmp_path / "dry/loss.png"
        ).is_file() and "| `validation/loss` | 0.4 (step 5) | 0.1 (step 20) |" in card.text
    capsys.readouterr()
    assert main(["validate", str(tmp_path / "dry/run_config.yaml")]) == 0
    assert config_of(tmp_path / "dry/run_config.yaml").pretrain == "Qwen/Qwen2.5-0.5B"


@pytest.mark.slow
def test_of_a_run_under_way_it_is_the_newest_checkpoint_with_a_model(run, tmp_path, capsys):
    (run / "hf").rename(tmp_path / "hf")
    for step in (5, 10, 15):
        shutil.copytree(tmp_path / "hf", run / f"checkpoints/step_{step:08d}/hf")
        write_manifest(run / f"checkpoints/step_{step:08d}", {}, {"step": step, "run_id": "3f9a61c2", "roles": []})
    shutil.rmtree(run / "checkpoints/step_00000015/hf")
    assert publish(run, "--dry-run") == 0
    text = (run / "hub/README.md").read_text()
    assert "- Steps: 10 of 40" in text and "(step 10)" in text and "(step 15)" not in text
    assert "Step 10, " in text and "Step 20" not in text
    shutil.rmtree(run / "checkpoints/step_00000005/hf")
    shutil.rmtree(run / "checkpoints/step_00000010/hf")
    capsys.readouterr()
    run = run.rename(tmp_path / "my run")
    assert publish(run) == 2
    assert f"becomes one: roll-async convert '{run}' '{run / 'hf'}'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_is_published_with_the_name_of_its_base(run, tmp_path, capsys):
    adapter = run / "hf_adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/home/alice/base", "r": 12}))
    (adapter / "adapter_model.safetensors").write_bytes(WEIGHTS)
    assert publish(run, "--adapter", "--dry-run") == 2
    assert "name that model on the hub with --base-model" in capsys.readouterr().err
    assert publish(run, "--adapter", "--dry-run", "--base-model", "Qwen/Qwen2.5-0.5B") == 0
    assert json.loads((run / "hub/adapter_config.json").read_text()) == {
        "base_model_name_or_path": "Qwen/Qwen2.5-0.5B", "r": 12
    }  # fmt: skip
    card = ModelCard.load(run / "hub/README.md")
    assert card.data.library_name == "peft" and "from peft import AutoPeftModelForCausalLM" in card.text
    assert "vllm serve Qwen/Qwen2.5-0.5B --enable-lora --max-lora-rank 16 --lora-modules adder=me/adder" in card.text


@pytest.mark.slow
def test_what_the_hub_got_is_loaded_by_transformers_with_the_logits_of_the_run(run, hub, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=50, num_key_value_heads=1, **sizes))
    model.save_pretrained(run / "hf", max_shard_size="10KB")
    (run / "hf/model.safetensors").unlink()
    assert publish(run) == 0
    for name, content in on_hub(hub).items():
        (tmp_path / "got").mkdir(exist_ok=True)
        (tmp_path / "got" / name).write_bytes(content)
    assert sum(name.endswith(".safetensors") for name in on_hub(hub)) > 1
    tokens = torch.arange(10)[None]
    logits = [AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (run / "hf", tmp_path / "got")]
    assert torch.equal(*logits) and torch.equal(logits[0], model(tokens).logits)
