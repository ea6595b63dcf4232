"""`roll-async serve-policy MODEL`: the gateway's endpoints with a fixed model, for evaluation and for data.

One trajectory per key: `TOKEN`, or `TOKEN/anything`, so that an agent keeps its conversations apart by its key. Every
trajectory is written to --record when the server ends.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roll_async.commands.command_line import EXIT_CODES, HELP

if TYPE_CHECKING:
    from roll_async.agents.session import Session

_TURNS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    model: str
    engine: str
    host: str
    port: int
    token: str
    max_model_len: int
    max_new_tokens: int
    temperature: float
    dtype: str
    device: str
    record: Path | None


@click.command(name="serve-policy", context_settings=HELP, epilog=EXIT_CODES)
@click.argument("model")
@click.option("--engine", default="hf_infer", show_default=True, help="hf_infer, vllm or sglang.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Others than loopback need --token-env.")
@click.option("--port", default=8100, show_default=True, help="0 = a free one.")
@click.option("--token-env", default=None, help="Environment variable with the token; without it one is made up.")
@click.option("--max-model-len", default=4096, show_default=True, help="Tokens of a conversation.")
@click.option("--max-new-tokens", default=512, show_default=True, help="Tokens of a turn.")
@click.option("--temperature", default=1.0, show_default=True, help="Used when the request sets none; 0 = greedy.")
@click.option("--dtype", default="bf16", show_default=True, type=click.Choice(["bf16", "fp16", "fp32"]))
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--record", default=None, type=click.Path(path_type=Path), help="JSON lines with every row.")
def command(token_env: str | None, **given: object) -> int:
    """Serve MODEL (a folder or a hub name) at /v1/chat/completions, /v1/responses and /v1/messages.

    \b
    Example:
      roll-async serve-policy output/agentic_assets/model --dtype fp32 --record trajectories.jsonl
    """
    from roll_async.agents.gateway.server import is_loopback

    token = secrets.token_urlsafe(24)
    if token_env is not None:
        if not os.environ.get(token_env):
            raise click.UsageError(f"--token-env {token_env}: that variable is not set")
        token = os.environ[token_env]
    elif not is_loopback(str(given["host"])):
        raise click.UsageError(f"--host {given['host']} can be reached by others: give a token with --token-env NAME")
    arguments = _Arguments(token=token, **given)  # type: ignore[arg-type]
    if arguments.max_new_tokens >= arguments.max_model_len:
        raise click.UsageError(f"--max-new-tokens {arguments.max_new_tokens} leaves no room for a prompt")
    return asyncio.run(_serve(arguments, told_token=token_env is None))


@dataclass
class _Trajectories:
    """Sessions by key."""

    token: str
    make: Callable[[str], Session]
    sessions: dict[str, Session] = field(default_factory=dict)

    def adopt(self, key: str) -> Session | None:
        """The session of a key that begins with the token."""
        given, _, name = key.partition("/")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return None
        return self.sessions.setdefault(name, self.make(name or "main"))


async def _serve(arguments: _Arguments, *, told_token: bool) -> int:
    from roll_async.agents.gateway.server import PolicyGateway
    from roll_async.agents.policies import OneEnginePolicy
    from roll_async.agents.rendering import TemplateRenderer
    from roll_async.agents.session import Session, SessionOptions
    from roll_async.inference.backends import create_engine
    from roll_async.inference.settings import EngineSettings
    from roll_async.prompts.tokenizer import load_tokenizer
    from roll_async.schema import SamplingParams

    renderer = TemplateRenderer(load_tokenizer(arguments.model))
    engine = create_engine(
        arguments.engine,
        EngineSettings(
            model_folder=arguments.model,
            dtype=arguments.dtype,
            device=arguments.device,
            max_model_len=arguments.max_model_len,
            stop_strings=True,
            truncated_sampling=True,
        ),
    )
    await engine.start()
    options = SessionOptions(
        sampling=SamplingParams(max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature),
        max_turns=_TURNS,
        max_context=arguments.max_model_len,
        client_sampling=True,
    )
    stopped = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    with ThreadPoolExecutor(1) as executor:
        policy = OneEnginePolicy(engine.generate)
        kept = _Trajectories(arguments.token, lambda name: Session(name, policy, renderer, options, executor))
        gateway = PolicyGateway(model=arguments.model, host=arguments.host, port=arguments.port, adopt=kept.adopt)
        await gateway.start()
        shown = arguments.token if told_token else "the token of --token-env"
        click.echo(f"serving {arguments.model} at {gateway.base_url}, key {shown}")
        try:
            await stopped.wait()
        finally:
            await gateway.close()
            await engine.close()
            if arguments.record is not None:
                _write(arguments.record, kept.sessions)
    return 0


def _write(path: Path, sessions: dict[str, Session]) -> None:
    """One line per row: tokens, mask and log-probs as they were sampled."""
    from roll_async.schema import Outcome

    with path.open("a") as file:
        for session in sessions.values():
            for row in session.tree.rows(session.name, reward=None, outcome=Outcome.CANCELLED):
                line = {
                    "trajectory": session.name,
                    "row": row.sample_id,
                    "prompt_token_ids": row.prompt_token_ids.tolist(),
                    "response_token_ids": row.response_token_ids.tolist(),
                    "loss_mask": list(row.loss_mask),
                    "behaviour_logprobs": [round(x, 6) for x in row.behaviour_logprobs],
                    "num_turns": row.num_turns,
                }
                file.write(json.dumps(line) + "\n")
