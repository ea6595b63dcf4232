"""`roll-async serve-policy MODEL`: the gateway's endpoints with a fixed model, for evaluation and for data.

One trajectory per key: `TOKEN`, or `TOKEN/anything`, so that an agent keeps its conversations apart by its key. The
model is an engine of this process, whose trajectories are written to --record when the server ends, or behind a remote
API, each turn of which is written when it is there.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click
from click.core import ParameterSource

from roll_async.commands.command_line import EXIT_CODES, HELP, Number
from roll_async.config.processor import default_dtype
from roll_async.inference.backends import ENGINES

if TYPE_CHECKING:
    from roll_async.agents.processes.remote import RemoteOptions
    from roll_async.agents.session import Session
    from roll_async.agents.turn_handler import TurnHandler
    from roll_async.inference.settings import EngineSettings

_TURNS = 1_000_000  # no limit, as a number
_COUNT = click.IntRange(min=1)
_OF_ENGINES = ("engine", "max_model_len", "dtype", "device", "template_kwargs")


def _variables(ctx: click.Context, option: click.Parameter, given: str) -> Mapping[str, object]:
    try:
        found = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{given!r:.60} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise click.BadParameter(f"""{given!r:.60} is no JSON object; write '{{"enable_thinking": false}}'""")
    return found


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Of the command."""

    model: str
    engine: str
    host: str
    port: int
    token: str
    max_model_len: int
    max_new_tokens: int
    temperature: float
    template_kwargs: Mapping[str, object]
    dtype: str | None
    device: str
    record: Path | None
    remote: RemoteOptions | None


@click.command(name="serve-policy", context_settings=HELP, epilog=EXIT_CODES)
@click.argument("model")
@click.option("--engine", default="hf_infer", show_default=True, type=click.Choice(sorted(ENGINES)))
@click.option("--host", default="127.0.0.1", show_default=True, help="Others than loopback need --token-env.")
@click.option("--port", default=8100, show_default=True, type=click.IntRange(0, 65535), help="0 = a free one.")
@click.option("--token-env", default=None, help="Environment variable with the token; without it one is made up.")
@click.option("--max-model-len", default=4096, show_default=True, type=_COUNT, help="Tokens of a conversation.")
@click.option("--max-new-tokens", default=512, show_default=True, type=_COUNT, help="Tokens of a turn.")
@click.option(
    "--temperature",
    default=1.0,
    show_default=True,
    type=Number(min=0),
    help="Used when the request sets none; 0 = greedy.",
)
@click.option(
    "--template-kwargs",
    default="{}",
    callback=_variables,
    help="JSON object: variables of the chat template, such as enable_thinking.",
)
@click.option(
    "--dtype",
    default=None,
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="Default: bf16; fp32 on a CPU without instructions for it.",
)
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--record", default=None, type=click.Path(path_type=Path), help="JSON lines: rows, or remote turns.")
@click.option("--remote", default=None, help="Address of an OpenAI-compatible API where MODEL is, with /v1.")
@click.option("--remote-key-env", default=None, help="Environment variable with the key of --remote.")
@click.pass_context
def command(
    ctx: click.Context, token_env: str | None, remote: str | None, remote_key_env: str | None, **given: object
) -> int:
    """Serve MODEL (a folder or a hub name) at /v1/chat/completions, /v1/responses and /v1/messages.

    With --remote, MODEL is the name of a model there: for evaluation and data only, nothing is trained from its turns.
    --record has tokens and log-probs where the remote gives them, else text.

    \b
    Example:
      roll-async serve-policy output/agentic_assets/model --dtype fp32 --record trajectories.jsonl
      roll-async serve-policy qwen --remote https://host/v1 --remote-key-env HOST_KEY --record turns.jsonl
    """
    from roll_async.agents.gateway.server import is_loopback
    from roll_async.commands.run import ended

    token = secrets.token_urlsafe(24)
    if token_env is not None:
        if not os.environ.get(token_env):
            raise click.UsageError(f"--token-env {token_env}: that variable is not set")
        token = os.environ[token_env]
    elif not is_loopback(str(given["host"])):
        raise click.UsageError(f"--host {given['host']} can be reached by others: give a token with --token-env NAME")
    chosen = {name for name in given if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    options = None if remote is None else _remote_options(remote, remote_key_env, given, chosen)
    if remote is None and remote_key_env is not None:
        raise click.UsageError("--remote-key-env has no effect without --remote; remove it")
    arguments = Arguments(token=token, remote=options, **given)  # type: ignore[arg-type]
    if options is None and arguments.max_new_tokens >= arguments.max_model_len:
        raise click.UsageError(f"--max-new-tokens {arguments.max_new_tokens} leaves no room for a prompt")
    try:
        _require_free(arguments.host, arguments.port)
        if options is None:
            arguments = replace(arguments, model=_usable_model(arguments))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return ended("serve-policy", lambda: asyncio.run(_serve(arguments, told_token=token_env is None)))


def _require_free(host: str, port: int) -> None:
    """Raises ValueError where nothing can listen, which would else be known only when the engine has started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server: what is closing is no obstacle
            probe.bind((host, port))
    except OSError as error:  # socket.gaierror is one
        taken = error.errno == errno.EADDRINUSE
        what = (
            f"--port {port} is taken; choose another one, or 0 for a free one" if taken else f"--host {host}: {error}"
        )
        raise ValueError(what) from error


def _usable_model(arguments: Arguments) -> str:
    """The folder of the model, fetched from its hub where it is a name. Raises ValueError for a model, an engine or a
    device that is not here.
    """
    from roll_async.launch.checks.inputs import missing_model, model_folder
    from roll_async.launch.checks.packages import missing_engine

    on_cpu = arguments.device == "cpu"
    if problem := missing_model(arguments.model):
        raise ValueError(problem)
    if problem := missing_engine(arguments.engine, on_cpu=on_cpu):
        raise ValueError(f"--engine {arguments.engine}: {problem}")
    if not on_cpu:
        import torch

        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return model_folder("MODEL", arguments.model)


def _remote_options(address: str, key_env: str | None, given: Mapping[str, object], chosen: set[str]) -> RemoteOptions:
    from roll_async.agents.gateway.server import is_loopback
    from roll_async.agents.processes.remote import RemoteOptions

    if idle := [f"--{name.replace('_', '-')}" for name in _OF_ENGINES if name in chosen]:
        raise click.UsageError(f"{', '.join(idle)}: no effect with --remote, whose server decides; remove it")
    if key_env is not None and not os.environ.get(key_env):
        raise click.UsageError(f"--remote-key-env {key_env}: that variable is not set")
    try:
        options = RemoteOptions(
            base_url=address,
            model=str(given["model"]),
            key="" if key_env is None else os.environ[key_env],
            max_new_tokens=int(str(given["max_new_tokens"])),
            temperature=float(str(given["temperature"])) if "temperature" in chosen else None,
        )
    except ValueError as error:
        raise click.UsageError(f"--remote: {error}") from error
    if options.key and not options.encrypted and not is_loopback(options.host):
        click.echo(f"warning: the key goes to {options.host} unencrypted (http)", err=True)
    return options


@dataclass
class _Trajectories:
    """Sessions by key."""

    token: str
    make: Callable[[str], TurnHandler]
    sessions: dict[str, TurnHandler] = field(default_factory=dict)

    def adopt(self, key: str) -> TurnHandler | None:
        """The session of a key that begins with the token."""
        given, _, name = key.partition("/")
        # Its time does not tell how much of a guess is right; as bytes, since texts must be ASCII.
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return None
        if name not in self.sessions:
            self.sessions[name] = self.make(name or "main")
        return self.sessions[name]


async def _serve(arguments: Arguments, *, told_token: bool) -> int:
    from roll_async.agents.gateway.server import PolicyGateway

    stopped = asyncio.Event()
    async with AsyncExitStack() as stack:
        record = None
        if arguments.record is not None:
            try:
                record = stack.enter_context(arguments.record.open("a"))
            except OSError as error:
                raise ValueError(
                    f"--record {arguments.record}: {error.strerror}; name a file that can be written"
                ) from error
        if arguments.remote is None:
            kept = _Trajectories(arguments.token, await _engine(arguments, record, stack))
        else:
            kept = _Trajectories(arguments.token, _remote(arguments.remote, record, stack))
        gateway = PolicyGateway(model=arguments.model, host=arguments.host, port=arguments.port, adopt=kept.adopt)
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, stopped.set)
        await gateway.start()
        stack.push_async_callback(gateway.close)
        shown = arguments.token if told_token else "the token of --token-env"
        where = "" if arguments.remote is None else f" of {arguments.remote.base_url}, for evaluation and data only,"
        click.echo(f"serving {arguments.model}{where} at {gateway.base_url}, key {shown}")
        await stopped.wait()
    return 0


def _remote(options: RemoteOptions, record: TextIO | None, stack: AsyncExitStack) -> Callable[[str], TurnHandler]:
    """Makes trajectories whose turns a remote model answers."""
    from roll_async.agents.processes.remote import RemoteModel, RemoteTurns

    model = RemoteModel(options)
    stack.push_async_callback(model.close)

    def tell(turn: Mapping[str, object]) -> None:
        if record is not None:
            record.write(json.dumps(turn) + "\n")
            record.flush()

    return lambda name: RemoteTurns(name, model, tell)


async def _engine(arguments: Arguments, record: TextIO | None, stack: AsyncExitStack) -> Callable[[str], TurnHandler]:
    """Makes trajectories whose turns an engine of this process samples."""
    from roll_async.agents.policies import OneEnginePolicy
    from roll_async.agents.rendering import TemplateRenderer
    from roll_async.agents.session import RENDERING_THREADS, Session, SessionOptions
    from roll_async.inference.backends import create_engine
    from roll_async.prompts.tokenizer import load_tokenizer, lost_by, told
    from roll_async.schema import SamplingParams

    tokenizer = load_tokenizer(arguments.model, proves=False)
    if lost := lost_by(tokenizer):
        click.echo(f"warning: the tokenizer of {arguments.model} loses {', '.join(lost)}; no run takes it", err=True)
    try:
        tokenizer = told(tokenizer, "native", None, arguments.template_kwargs)
    except ValueError as error:
        raise ValueError(f"--{str(error).replace('_', '-', 1)}") from error
    renderer = TemplateRenderer(tokenizer)
    if renderer.ends.difference:
        click.echo(f"end marks: the engine stops also at {renderer.ends.difference}", err=True)
    engine = create_engine(arguments.engine, engine_settings(arguments))
    await engine.start()
    made: list[Session] = []
    if record is not None:
        # Callbacks run in reverse: this one when the engine has ended and no turn is added.
        stack.callback(lambda: _write(record, made))
    stack.push_async_callback(engine.close)
    options = SessionOptions(
        sampling=SamplingParams(
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            stop_token_ids=renderer.ends.ids,
        ),
        max_turns=_TURNS,
        max_context=arguments.max_model_len,
        client_sampling=True,
    )
    executor = stack.enter_context(ThreadPoolExecutor(RENDERING_THREADS))
    policy = OneEnginePolicy(engine.generate)

    def make(name: str) -> Session:
        made.append(Session(name, policy, renderer, options, executor))
        return made[-1]

    return make


def engine_settings(arguments: Arguments) -> EngineSettings:
    """Of the engine of this process."""
    from roll_async.inference.settings import EngineSettings

    return EngineSettings(
        model_folder=arguments.model,
        dtype=arguments.dtype or default_dtype(on_devices=arguments.device != "cpu"),
        device=arguments.device,
        max_model_len=arguments.max_model_len,
        stop_strings=True,  # an engine that is started without refuses requests that have some
        truncated_sampling=True,
    )


def _write(record: TextIO, sessions: Sequence[Session]) -> None:
    """One line per row: tokens, mask and log-probs as they were sampled."""
    from roll_async.schema import Outcome

    for session in sessions:
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
            record.write(json.dumps(line) + "\n")
