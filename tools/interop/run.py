"""Trains agents and environments of others, unmodified, and compares every trained token with the engine's own record.

    python tools/interop/run.py NAME|all [--steps 3] [--work output/interop]

Each peer has a virtual environment of its own with pinned packages, never ours, and reaches the policy over HTTP at the
PolicyGateway. The run is an agentic run as users start it (Ray, Megatron trainer, Hugging Face engine, a weight push
after every step, one batch ahead) with a tiny model. The engine writes down what it samples in its own process
(engine_side/); `tracking.rollout_dump_dir` is what was trained. Of every trained token the tokens before it, log-prob
and weight version must be those that the engine wrote for this trajectory, and a trajectory trains every token that was
sampled for it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PEERS_FOLDER = HERE / "peers"
START_S = 300.0


@dataclass(frozen=True)
class Peer:
    """Someone else's agent or environment."""

    packages: tuple[str, ...]
    script: str
    server: bool = False
    """The script serves `http_agent`; else it is a `command`."""
    environment: bool = False
    """It plays the environment that `openenv init` writes."""


PEERS = {
    "openai": Peer(("openai==3.54.0",), "openai_client.py"),
    "anthropic": Peer(("anthropic==2.12.0",), "anthropic_client.py"),
    "mini-swe-agent": Peer(("mini-swe-agent==2.4.6", "litellm[mcp]==1.106.2"), "mini_swe_agent.py"),
    "verifiers": Peer(("verifiers==0.4.0",), "verifiers_server.py", server=True),
    "openenv": Peer(("openenv==0.10.0",), "openenv_server.py", server=True, environment=True),
}


def python_of(peer: Peer, folder: Path) -> str:
    """The interpreter of the peer's own environment, which is made once. Raises CalledProcessError with pip's words."""
    python = folder / "bin" / "python"
    done = folder / "installed.txt"
    if not done.is_file() or done.read_text().split() != list(peer.packages):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
        install = [str(python), "-m", "pip", "install", "-q", *peer.packages]
        subprocess.run(install, check=True, capture_output=True, text=True)
        done.write_text(" ".join(peer.packages))
    return str(python)


def started(stack: ExitStack, command: Sequence[str], folder: Path, log: Path, port: int) -> None:
    """A server, up, until the stack closes. Raises RuntimeError with its last words when it ends or is not up."""
    with log.open("w") as words:
        env = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(PEERS_FOLDER)}
        server = subprocess.Popen(command, cwd=folder, stdout=words, stderr=subprocess.STDOUT, env=env)
    stack.callback(server.wait)
    stack.callback(server.kill)
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError(f"{Path(command[1]).name} is not up: {log.read_text()[-1500:]}")


def serve(stack: ExitStack, peer: Peer, python: str, folder: Path) -> str:
    """The address of the peer's server."""
    from roll_async.cluster.network import held_port

    port, arguments = stack.enter_context(held_port("127.0.0.1")), []
    if peer.environment:
        made, at = folder / "echo", stack.enter_context(held_port("127.0.0.1"))
        openenv = str(Path(python).with_name("openenv"))
        subprocess.run([openenv, "init", made.name, "-o", str(folder)], check=True, capture_output=True, text=True)
        application = made / "server" / "app.py"
        text = application.read_text().replace(
            "max_concurrent_envs=1,", "max_concurrent_envs=64,"
        )  # as its comment says
        application.write_text(text)
        uvicorn = [python, "-m", "uvicorn", "server.app:app", "--port", str(at), "--app-dir", str(made)]
        started(stack, uvicorn, made, folder / "environment.log", at)
        arguments = [f"http://127.0.0.1:{at}"]
    command = [python, str(PEERS_FOLDER / peer.script), str(port), *arguments]
    started(stack, command, folder, folder / "server.log", port)
    return f"http://127.0.0.1:{port}/"


def config_of(name: str, folder: Path, model: Path, env_type: str, env_config: dict, steps: int) -> dict:
    """A run of three short steps on the CPU."""
    path = os.pathsep.join((str(HERE / "engine_side"), str(ROOT)))
    return {
        "exp_name": "run",
        "output_dir": str(folder),
        "pretrain": str(model),
        "max_steps": steps,
        "save_steps": 0,
        "rollout_batch_size": 8,
        "sequence_length": 1000,
        "async_generation_ratio": 1,
        "algorithm": {"adv_estimator": "grpo", "pg_variant": "ppo"},
        "custom_envs": {
            name: {
                "env_type": env_type, "env_config": env_config, "max_steps": 8, "max_seconds": 240, "max_concurrent": 4,
            }
        },
        "train_env_manager": {"group_size": 4},
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "training_args": {
                "learning_rate": 1e-3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
            },
            "strategy_args": {
                "strategy_name": "megatron_train",
                "strategy_config": {"transformer_impl": "local", "use_distributed_optimizer": False},
            },
            "infer_batch_size": 4,
        },
        "actor_infer": {
            "model_args": {"dtype": "fp32"},
            "generating_args": {"max_new_tokens": 90},
            "strategy_args": {"strategy_name": "hf_infer"},
            "infer_batch_size": 16,
            "system_envs": {"PYTHONPATH": path, "ROLL_INTEROP_RECORD": str(folder / "engine.jsonl")},
        },
        "tracking": {"track_with": "stdout", "rollout_dump_dir": str(folder / "trained")},
    }  # fmt: skip


def lines(path: Path) -> Iterator[dict]:
    """The objects of a file of JSON lines."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def compare(folder: Path) -> dict[str, object]:
    """Counts of what was compared. Raises AssertionError naming the first token that differs."""
    sampled: dict[tuple[str, bytes, int], set[tuple[float, int]]] = {}
    """(trajectory, tokens before it, token) to the log-probs and versions that the engine told."""
    per_trajectory: Counter[str] = Counter()
    for row in lines(folder / "engine.jsonl"):
        trajectory = row["request"].rsplit("+", 1)[0]
        before = Prefix(row["prompt"])
        versions = [version for version, count in row["versions"] for _ in range(count)]
        for token, logprob, version in zip(row["tokens"], row["logprobs"], versions, strict=True):
            sampled.setdefault((trajectory, before.digest, token), set()).add((logprob, version))
            before.add(token)
        per_trajectory[trajectory] += len(row["tokens"])
    trained: Counter[str] = Counter()
    steps = 0
    for path in sorted((folder / "trained").glob("step_*.jsonl")):
        steps += 1
        for row in lines(path):
            name = row["sample_id"].split("#")[0]
            before = Prefix(row["prompt_token_ids"])
            versions = [version for version, count in row["version_runs"] for _ in range(count)]
            found = zip(row["response_token_ids"], row["loss_mask"], row["behaviour_logprobs"], versions, strict=True)
            for place, (token, mask, logprob, version) in enumerate(found):
                if mask:
                    told = sampled.get((name, before.digest, token), set())
                    assert (logprob, version) in told, (
                        f"{row['sample_id']} token {place}: {logprob, version}, not {told}"
                    )
                    trained[name] += 1
                before.add(token)
    for name, count in trained.items():
        assert count == per_trajectory[name], f"{name}: trained {count} of {per_trajectory[name]} sampled tokens"
    assert trained, "nothing was trained"
    return {"steps": steps, "trajectories": len(trained), "tokens": sum(trained.values())}


class Prefix:
    """A digest of the tokens so far."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._state = hashlib.blake2b(array("i", tokens).tobytes(), digest_size=16)

    def add(self, token: int) -> None:
        """One more."""
        self._state.update(array("i", [token]).tobytes())

    @property
    def digest(self) -> bytes:
        """Of all tokens so far."""
        return self._state.copy().digest()


def train(name: str, folder: Path, python: str, model: Path, steps: int) -> dict[str, object]:
    """What was compared of a run with this peer, in a new folder. Raises RuntimeError, AssertionError."""
    peer = PEERS[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        if peer.server:
            env_type, env_config = "http_agent", {"url": serve(stack, peer, python, folder)}
        else:
            command = [python, str(PEERS_FOLDER / peer.script)]
            env_type, env_config = "command", {"command": command, "folder": str(folder)}
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(config_of(name, folder, model, env_type, env_config, steps)))
        launch = [sys.executable, str(ROOT / "examples" / "start_agentic_pipeline.py"), "--config", str(config)]
        with (folder / "run.log").open("w") as log:
            ended = subprocess.run(launch, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        if ended.returncode:
            raise RuntimeError(f"the run ended with code {ended.returncode}; see {folder / 'run.log'}")
    found = compare(folder)
    assert found["steps"] == steps, f"{found['steps']} steps"
    last = list(lines(folder / "run" / "metrics.jsonl"))[-1]
    for kind, start in (("branches", "agent/branches/"), ("outcomes", "agent/run/outcomes/")):
        found[kind] = {key.removeprefix(start): value for key, value in last.items() if key.startswith(start) and value}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=[*PEERS, "all"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--work", type=Path, default=ROOT / "output" / "interop")
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    from model import make_model

    work = args.work.resolve()
    model, failed = make_model(work / "assets"), False
    for name in PEERS if args.peer == "all" else [args.peer]:
        try:
            python = python_of(PEERS[name], work / "environments" / name)
            found = train(name, work / name, python, model, args.steps)
            said = ", ".join(f"{key} {value}" for key, value in found.items())
            print(f"{name} ({' '.join(PEERS[name].packages)}): ok, {said}", flush=True)
        except subprocess.CalledProcessError as error:
            failed = True
            words = (error.stderr or "").strip().splitlines()
            print(f"{name}: {' '.join(error.cmd[:5])} failed: {words[-1] if words else error}", flush=True)
        except (RuntimeError, AssertionError, OSError) as error:
            failed = True
            print(f"{name}: FAILED: {error}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
