"""What the policy gateway costs: 1,000 concurrent trajectories of 10 turns on a fake engine, some with long prompts.

    python tools/bench/gateway.py [--trajectories 1000] [--long 4] [--long-tokens 128000] [--heavy 1] [--seconds 60]

The real `PolicyGateway`, sessions, template and tokenizer run in this process, plain HTTP clients in another one. A
turn takes the engine a known time, which its answer tells; the overhead of a turn is what the client waited beyond it,
its own HTTP included. A client asks with its whole history, as the chat completions API wants it, and begins a new
trajectory after 10 turns. `--long`: so many of them begin with a prompt of `--long-tokens`. `--heavy`: so many clients
beside them ask, one request after another, with 200 tools and a history of 50 calls whose arguments have 20 kB each,
then with a body of 8 MB, whose tokens no context takes.

Verdicts: p99 of the overhead of trajectories with short prompts, longest stall of the event loop, growth of the memory
between the second and the last third of the time (which needs minutes). On a busy machine the first two say little; the
processor time of a turn and of the longest stall are printed for that.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp

TURNS, OBSERVATION_WORDS, ANSWER_TOKENS = 10, 60, 100
BUDGET_OVERHEAD_S, BUDGET_STALL_S, BUDGET_GROWTH = 0.010, 0.030, 1.05
PULSE_S = 0.005
_ANSWERS = 256
WORDS = [a + b + "er" for a in "bcdfghjklmnprstv" for b in "aeio"]
TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{{ '\n' }}{%- endfor %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{ call.function.name + ' ' }}{{ call.function.arguments | tojson }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def words(rng: random.Random, count: int) -> str:
    """A text of so many tokens, four letters each."""
    return "".join(rng.choices(WORDS, k=count))


# The clients


def heavy_bodies(rng: random.Random) -> list[bytes]:
    """200 tools and 50 calls of 20 kB; 8 MB."""
    code = json.dumps({"code": words(rng, 5000)})
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in WORDS[:20]}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(200)]
    messages: list[dict] = [{"role": "user", "content": "go"}]
    for i in range(50):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "f1", "arguments": code}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": words(rng, 60)})
    long = [{"role": "user", "content": words(rng, 1_990_000)}]
    return [json.dumps(body).encode() for body in ({"messages": messages, "tools": tools}, {"messages": long})]


async def client(args: argparse.Namespace, base_url: str) -> None:
    """All trajectories, for the time that was asked for; prints what each turn waited."""
    gc.disable()  # its own pauses are no overhead of the gateway
    started = time.perf_counter()
    until = started + args.seconds
    waits: list[tuple[str, float]] = []
    problems: list[str] = []

    async def one(number: int, http: aiohttp.ClientSession) -> None:
        rng, long = random.Random(number), number < args.long
        await asyncio.sleep(rng.uniform(0, min(args.seconds / 4, args.engine_s + args.world_s)))
        trajectory = 0
        while time.perf_counter() < until:
            await play(http, f"{number}-{trajectory}", rng, long)
            trajectory += 1

    async def play(http: aiohttp.ClientSession, name: str, rng: random.Random, long: bool) -> None:
        question = words(rng, args.long_tokens) if long else words(rng, OBSERVATION_WORDS)
        messages = [{"role": "system", "content": "play"}, {"role": "user", "content": question}]
        for _ in range(TURNS):
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            asked = time.perf_counter()
            headers = {"authorization": f"Bearer sk-{name}", "content-type": "application/json"}
            async with http.post(f"{base_url}/chat/completions", data=body, headers=headers) as response:
                answer = await response.json()
            if response.status != 200:
                problems.append(str(answer))
                return
            said = answer["choices"][0]["message"]["content"]
            waits.append(("long" if long else "short", time.perf_counter() - asked - float(said.partition(" ")[0])))
            if time.perf_counter() > until:
                return
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": words(rng, 60)}]
            await asyncio.sleep(rng.uniform(0, 2 * args.world_s))

    async def heavy(number: int, http: aiohttp.ClientSession) -> None:
        for turn, body in enumerate(itertools.cycle(heavy_bodies(random.Random(number)))):
            headers = {"authorization": f"Bearer sk-heavy-{number}-{turn}", "content-type": "application/json"}
            asked = time.perf_counter()
            async with http.post(f"{base_url}/chat/completions", data=body, headers=headers) as response:
                await response.read()
            waits.append((f"heavy {response.status}", time.perf_counter() - asked))
            if time.perf_counter() > until:
                return

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        ordinary = (one(i, http) for i in range(args.trajectories))
        await asyncio.gather(*ordinary, *(heavy(i, http) for i in range(args.heavy)))
    print(json.dumps({"waits": waits, "problems": problems[:3], "cpu_s": time.process_time()}))


# The gateway


def tokenizer_of(folder: Path) -> object:
    """A character is a token, and so is every word of the texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<|im_start|>", "<|im_end|>", *map(chr, (10, *range(32, 127))), *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"({'|'.join(WORDS)})|[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    return fast


class Engine:
    """`agents/session.py: Policy`: waits, and says how long."""

    def __init__(self, tokenizer: object, mean_s: float) -> None:
        self._rng = random.Random(0)
        self._answers = [self._answer(tokenizer, mean_s) for _ in range(_ANSWERS)]
        self.num_turns = self.running = self.most_running = 0

    def _answer(self, tokenizer, mean_s: float) -> tuple[float, array]:
        seconds = round(self._rng.uniform(0.5, 1.5) * mean_s, 4)
        text = f"{seconds:.4f} {words(self._rng, ANSWER_TOKENS)}"
        return seconds, array("i", [*tokenizer(text)["input_ids"], tokenizer.eos_token_id])

    async def generate(self, request, *, conversation: str, validation: bool):
        from roll_async.schema import Completion, FinishReason

        seconds, ids = self._rng.choice(self._answers)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(seconds)
        self.running -= 1
        self.num_turns += 1
        return Completion(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=array("f", bytes(4 * len(ids))),
            version_runs=((0, len(ids)),),
            finish_reason=FinishReason.STOP,
            generation_s=seconds,
        )


class Pulse:
    """How late a timer of the loop comes, how much of it this process computed, and the processor time of the loop's
    longest callback.
    """

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.held_s: list[float] = []
        self.longest_callback_s, self.longest_callback = 0.0, ""
        self._run_handle = asyncio.Handle._run

    async def run(self) -> None:
        asyncio.Handle._run = self._timed(self._run_handle)  # type: ignore[method-assign]
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(PULSE_S)
            self.late_s.append(time.perf_counter() - wall - PULSE_S)
            self.held_s.append(min(self.late_s[-1], time.process_time() - cpu))

    def _timed(self, run):
        def timed(handle) -> None:
            cpu = time.thread_time()
            run(handle)
            cpu = time.thread_time() - cpu
            if cpu > self.longest_callback_s:
                task = getattr(handle._callback, "__self__", None)
                self.longest_callback_s, self.longest_callback = cpu, repr(task or handle)[:200]

        return timed


def resident_mb() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def watch_memory(found: list[float]) -> None:
    while True:
        found.append(resident_mb())
        await asyncio.sleep(1.0)


async def serve(args: argparse.Namespace) -> dict:
    from roll_async.agents.gateway.server import Endpoint, PolicyGateway
    from roll_async.agents.rendering import TemplateRenderer
    from roll_async.agents.session import RENDERING_THREADS, Session, SessionOptions
    from roll_async.cluster.gc_policy import defer_gc_during_startup
    from roll_async.schema import SamplingParams

    with tempfile.TemporaryDirectory() as folder, defer_gc_during_startup(settled=True):  # as a driver starts
        tokenizer = tokenizer_of(Path(folder))
        engine, renderer = Engine(tokenizer, args.engine_s), TemplateRenderer(tokenizer)  # type: ignore[arg-type]
    executor = ThreadPoolExecutor(RENDERING_THREADS, thread_name_prefix="rendering")
    options = SessionOptions(
        sampling=SamplingParams(max_new_tokens=1000),
        max_turns=TURNS + 1,
        max_context=max(2 * args.long_tokens, 600_000),
    )
    loop = asyncio.get_running_loop()

    def adopt(secret: str) -> Session:
        session = Session(secret, engine, renderer, options, executor)
        replies = itertools.count(1)

        def tells(running: bool) -> None:
            if not running and next(replies) == TURNS:  # a little later: the last reply is still on its way
                loop.call_later(1.0, shut, secret)

        session.on_activity = tells
        return session

    def shut(secret: str) -> None:
        gateway.shut(Endpoint(base_url="", api_key=secret, model=""))

    gateway, pulse, memory = PolicyGateway(adopt=adopt), Pulse(), []
    await gateway.start()
    command = [sys.executable, __file__, "--client", gateway.base_url, *sys.argv[1:]]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=1 << 30)
    looking = [asyncio.ensure_future(pulse.run()), asyncio.ensure_future(watch_memory(memory))]
    cpu = time.process_time()
    assert process.stdout is not None
    said = await process.stdout.read()
    cpu = time.process_time() - cpu
    for task in looking:
        task.cancel()
    await gateway.close()
    executor.shutdown()
    if await process.wait() or not said:
        raise SystemExit("the clients failed")
    return {**json.loads(said), "pulse": pulse, "memory": memory, "gateway_cpu_s": cpu, "engine": engine}


def report(found: dict, seconds: float) -> bool:
    """One line per verdict."""
    pulse, engine, memory = found["pulse"], found["engine"], found["memory"]
    turns = len(found["waits"])
    short = sorted(wait for kind, wait in found["waits"] if kind == "short")
    long = sorted(wait for kind, wait in found["waits"] if kind == "long")
    heavy = sorted(wait for kind, wait in found["waits"] if kind.startswith("heavy"))
    answers = Counter(kind.removeprefix("heavy ") for kind, _ in found["waits"] if kind.startswith("heavy"))
    third = max(1, len(memory) // 3)
    growth = statistics.median(memory[-third:]) / statistics.median(memory[third : 2 * third] or memory)
    p99, stall = quantile(short, 0.99), max(pulse.late_s)
    lines = [
        {
            "name": "gateway_overhead_p99",
            "value": round(1000 * p99, 2),
            "unit": "ms per turn",
            "ratio": round(p99 / BUDGET_OVERHEAD_S, 3),
            "budget": 1.0,
            "upper": True,
            "ok": p99 <= BUDGET_OVERHEAD_S and not found["problems"],
            "p50_ms": round(1000 * quantile(short, 0.5), 2),
            "long_prompts_p50_ms": round(1000 * quantile(long, 0.5), 1) if long else None,
            "long_prompts_max_ms": round(1000 * long[-1], 1) if long else None,
            "heavy_max_s": round(heavy[-1], 1) if heavy else None,
            "heavy_answers": dict(answers),
            "gateway_cpu_ms_per_turn": round(1000 * found["gateway_cpu_s"] / max(1, engine.num_turns), 3),
            "turns": turns,
            "turns_per_s": round(turns / seconds, 1),
            "most_at_once": engine.most_running,
            "problems": found["problems"],
        },
        {
            "name": "gateway_longest_stall",
            "value": round(1000 * stall, 2),
            "unit": "ms",
            "ratio": round(stall / BUDGET_STALL_S, 3),
            "budget": 1.0,
            "upper": True,
            "ok": stall <= BUDGET_STALL_S,
            "stall_p999_ms": round(1000 * quantile(sorted(pulse.late_s), 0.999), 2),
            "stall_of_this_process_ms": round(1000 * max(pulse.held_s), 2),
            "longest_callback_cpu_ms": round(1000 * pulse.longest_callback_s, 2),
            "longest_callback": pulse.longest_callback,
        },
        {
            "name": "gateway_memory",
            "value": round(memory[-1], 1),
            "unit": "MiB",
            "ratio": round(growth, 3),
            "budget": BUDGET_GROWTH,
            "upper": True,
            "ok": growth <= BUDGET_GROWTH,
            "seconds": seconds,
        },
    ]
    for line in lines:
        print(json.dumps(line))
    return all(line["ok"] for line in lines)


def quantile(values: list[float], share: float) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--long", type=int, default=4)
    parser.add_argument("--long-tokens", type=int, default=128_000)
    parser.add_argument("--heavy", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--engine-s", type=float, default=4.0, help="mean of a turn")
    parser.add_argument("--world-s", type=float, default=4.0, help="mean between two turns")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        asyncio.run(client(args, args.client))
        return 0
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    return 0 if report(asyncio.run(serve(args)), args.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
