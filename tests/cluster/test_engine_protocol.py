"""One suite for every engine: what `inference/protocol.py` promises, checked against plain Transformers in float32."""

import asyncio
import copy
import time
from array import array
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
psutil = pytest.importorskip("psutil")

from roll_async.inference.backends import create_engine
from roll_async.inference.protocol import PauseMode
from roll_async.inference.settings import EngineSettings
from roll_async.inference.sleeping import SleepState
from roll_async.schema import FinishReason, GenerateRequest, SamplingParams
from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.digest import of_trainer
from roll_async.weight_sync.errors import UpdateFailed
from roll_async.weight_sync.layout import EngineLayout
from roll_async.weight_sync.transfer import TensorPart, open_sender
from tests.patience import patient
from tests.rounding import Bounds

# SGLang's cache holds 1,024 tokens, so that it takes requests back; vLLM with as little: test_kv_cache_load.py.
VARIANTS = {
    "vllm": ("vllm", {}, "tied"),
    "vllm_core_process": ("vllm", {"core_in_process": False}, "untied"),
    "vllm_tp2": ("vllm", {"tensor_parallel_size": 2}, "untied"),
    "hf_infer": ("hf_infer", {}, "untied"),
    "sglang": ("sglang", {"cpu_kv_cache_bytes": 1 << 20}, "tied"),
}
"""Strategy and settings of each engine that keeps the protocol, and its model's head."""
LIBRARY = {"vllm": "vllm", "hf_infer": "transformers"}
EOS, CONTEXT = 2, 512
TOLERANCE = 10 * Bounds(layers=2, hidden=128, inner=256, length=CONTEXT).forward
"""Of log-probs, in nat: they are sums of logits of up to 10."""
PROMPT = [11, 22, 33, 44, 55]


def tiny_model(seed: int, tied: bool):
    """Random Qwen2; head_dim 32 is the smallest that vLLM's CPU attention knows."""
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.1,
        dtype="float32",
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = EOS
    return model


def save_tokenizer(folder):
    """Token 17 is the word w017."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{i:03}": i for i in range(512)}, unk_token="w000"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w002", pad_token="w000")
    tokenizer.save_pretrained(folder)


def tensors_of(model):
    return [(name, p.detach()) for name, p in model.named_parameters()]


@torch.no_grad()
def reference_logprobs(model, prompt, tokens, sampling, *, joint=False):
    """[R] log-probs of `tokens` under temperature, then top-k, then top-p, from one full forward pass. `joint`: top-p
    looks at the distribution before top-k.
    """
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    logits = logits / (sampling.temperature or 1.0)
    whole = logits
    if sampling.top_k > 0:
        logits = logits.masked_fill(
            logits < logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:], -torch.inf
        )
    if sampling.top_p < 1:
        ordered, order = (whole if joint else logits).sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def greedy(model, prompt, count):
    tokens = []
    for _ in range(count):
        tokens.append(int(model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].argmax()))
        if tokens[-1] == EOS:
            break
    return tokens


def resident_bytes():
    """Of this process and its children, the trackers of Python apart."""
    return sum(p.memory_info().rss for p in [psutil.Process(), *psutil.Process().children(recursive=True)])


class Replica:
    """An engine, the loop it lives on, and the models whose weights it is given."""

    def __init__(self, strategy, folder, tied=True, make_model=tiny_model, **changes):
        self.strategy = strategy
        self.models = {"old": make_model(1, tied), "new": make_model(2, tied)}
        self.models["old"].save_pretrained(folder)
        save_tokenizer(folder)
        self.runner = asyncio.Runner()
        settings = {"dtype": "fp32", "device": "cpu", "max_model_len": CONTEXT, "max_running": 64, "seed": 7, **changes}
        self.engine = create_engine(strategy, EngineSettings(model_folder=str(folder), **settings))
        self.version, self.count, self.senders = 0, 0, {}
        ranks = changes.get("tensor_parallel_size", 1) if strategy == "vllm" else 1  # the others take whole tensors
        self.layout = EngineLayout(tensor=ranks, num_kv_heads=2)
        self.runner.run(self.engine.start())

    def close(self):
        self.runner.run(self.engine.close())
        self.close_senders()

    def close_senders(self):
        self.runner.close()
        for sender in self.senders.values():
            sender.close()

    def request(self, prompt=PROMPT, **sampling):
        self.count += 1
        sampling = {"max_new_tokens": 24, **sampling}
        return GenerateRequest(
            request_id=f"r{self.count}", prompt_token_ids=array("i", prompt), sampling=SamplingParams(**sampling)
        )

    def start(self, *requests):
        return [asyncio.ensure_future(self.engine.generate(r)) for r in requests]

    async def started(self, *requests):
        """The tasks of requests, once each has a token: what comes then finds them running, on a slow machine, too."""
        tasks = self.start(*requests)
        for request, task in zip(requests, tasks, strict=True):
            while not task.done() and self.engine.progress(request.request_id, 0) is None:
                await asyncio.sleep(0.001)
        return tasks

    async def prefix_found_of_one_asked_twice(self):
        """Tokens of a prompt of 300 that the cache is asked for in two turns, and those that it has."""
        before = self.engine.load().kv
        for _ in range(2):
            await self.engine.generate(self.request(range(30, 330), max_new_tokens=2))
        after = self.engine.load().kv
        return (
            after.prefix_asked_tokens - before.prefix_asked_tokens,
            after.prefix_hit_tokens - before.prefix_hit_tokens,
        )

    def assert_sampled_from(self, model, request, completion):
        tokens = list(completion.token_ids)
        joint = self.strategy == "sglang"
        wanted = reference_logprobs(
            self.models[model], list(request.prompt_token_ids), tokens, request.sampling, joint=joint
        )
        assert torch.allclose(torch.tensor(completion.logprobs), wanted, atol=TOLERANCE, rtol=0), (
            (torch.tensor(completion.logprobs) - wanted).abs().max()
        )

    def send(self, tensors, version, transport="shm", verify="full", **numbers):
        """The trainer's side of one version. `numbers`: export and base of the plan."""
        parts = (TensorPart.whole(name, tensor) for name, tensor in tensors)
        plan = UpdatePlan(version=version, transport=transport, verify=verify, layout=self.layout, **numbers)
        previous = self.senders.get(transport)
        self.senders[transport] = open_sender(plan, parts, block_bytes=100_000, previous=previous)
        return self.senders[transport]

    async def take_in(self, tensors, version, transport="shm", verify="full", num_buckets=None, **numbers):
        sender = self.send(tensors, version, transport, verify, **numbers)
        await self.engine.begin_update(sender.plan)
        taken = self.sent_bytes = 0
        while (block := await asyncio.to_thread(sender.next_block)) is not None and taken != num_buckets:
            await self.engine.load_bucket(Bucket(index=taken, blocks=(block,)))
            taken, self.sent_bytes = taken + 1, self.sent_bytes + block.num_bytes
        return sender

    async def push(self, model, version, **options):
        await self.push_tensors(tensors_of(self.models[model]), version, **options)

    async def push_tensors(self, tensors, version, **options):
        sender = await self.take_in(tensors, version, **options)
        assert await self.engine.finish_update() == of_trainer([sender.sent])
        await self.engine.pause(PauseMode.ABORT)
        await self.engine.commit(version)
        await self.engine.resume()
        self.version = version


async def generate_nothing_before_the_first_update(replica):
    assert replica.engine.version is None
    kv = replica.engine.load().kv
    assert replica.strategy == "hf_infer" or kv.free_tokens == kv.total_tokens > 0, "known before the first step"
    request = replica.request()
    (task,) = replica.start(request)
    await asyncio.sleep(0.2)
    assert not task.done()
    await replica.push("new", 1)
    replica.assert_sampled_from("new", request, await task)


async def end_a_request_by_closing(replica):
    (task,) = replica.start(replica.request(max_new_tokens=480))
    await asyncio.sleep(0.05)
    await replica.engine.close()
    assert task.done() and task.result().finish_reason is not FinishReason.LENGTH


def wait_until_no_child_is_left(before):
    deadline = time.monotonic() + patient(10)
    while time.monotonic() < deadline:
        new = set(psutil.Process().children(recursive=True)) - before
        left = [
            p for p in new if p.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(p.cmdline())
        ]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(left)


@pytest.fixture(scope="module", params=VARIANTS)
def shared(request, tmp_path_factory):
    """An engine that starts without weights and is closed while it generates. Both are looked at here, because to start
    another one for them costs more than all tests of this engine.
    """
    strategy, changes, head = VARIANTS[request.param]
    if strategy == "sglang":
        request.getfixturevalue("sglang_on_cpu")
    else:
        pytest.importorskip(LIBRARY[strategy])
    children = set(psutil.Process().children(recursive=True))
    replica = Replica(
        strategy,
        tmp_path_factory.mktemp("model"),
        tied=head == "tied",
        random_weights=True,
        stop_strings=True,
        sleep_level=2,
        **changes,
    )
    replica.runner.run(generate_nothing_before_the_first_update(replica))
    yield replica
    replica.runner.run(end_a_request_by_closing(replica))
    replica.close_senders()
    wait_until_no_child_is_left(children)


@pytest.fixture
def replica(shared):
    """The shared replica with the old weights as version 0."""
    if shared.version != 0:
        shared.runner.run(shared.push("old", 0))
    return shared


def test_logprobs_are_those_of_the_distribution_sampled_from(replica):
    async def go():
        requests = [
            replica.request(temperature=t, top_k=k, top_p=p)
            for t, k, p in [
                (1.0, -1, 1.0),
                (0.7, -1, 1.0),
                (1.3, 20, 1.0),
                (1.0, -1, 0.8),
                (0.9, 30, 0.7),
                (1.0, 1000, 1.0),  # more than the vocabulary
            ]
            for _ in range(3)
        ]
        completions = await asyncio.gather(*replica.start(*requests))
        for request, completion in zip(requests, completions, strict=True):
            assert completion.request_id == request.request_id and completion.generation_s > 0
            replica.assert_sampled_from("old", request, completion)
        assert len({tuple(c.token_ids) for c in completions[:3]}) == 3

    replica.runner.run(go())


def test_a_score_is_the_logprob_of_given_tokens_under_the_weights_served(replica):
    rows = [[11, 22, 33, 44, 55, 66, 77], [5, 9], list(range(100, 140))]

    async def scores():
        return await asyncio.gather(*(replica.engine.score(row) for row in rows))

    def check(model):
        wanted = [
            reference_logprobs(replica.models[model], row[:1], row[1:], SamplingParams(max_new_tokens=1))
            for row in rows
        ]
        for found, exact in zip(replica.runner.run(scores()), wanted, strict=True):
            assert torch.allclose(torch.tensor(found), exact, atol=TOLERANCE, rtol=0)

    async def beside_a_request():
        (task,) = replica.start(replica.request(max_new_tokens=40, temperature=0.7, top_k=5))
        found = await scores()
        await task
        return found

    check("old")
    assert [len(f) for f in replica.runner.run(beside_a_request())] == [6, 1, 39]
    with pytest.raises(ValueError, match="2 to 511 fit"):
        replica.runner.run(replica.engine.score([1]))
    replica.runner.run(replica.push("new", replica.version + 1))
    check("new")


def test_temperature_zero_is_greedy_and_a_resumed_request_continues_the_same_text(replica):
    async def go():
        wanted = greedy(replica.models["old"], PROMPT, 24)
        whole = await replica.engine.generate(replica.request(temperature=0.0))
        assert list(whole.token_ids) == wanted
        rest = await replica.engine.generate(
            replica.request([*PROMPT, *wanted[:10]], temperature=0.0, max_new_tokens=14)
        )
        assert list(rest.token_ids) == wanted[10:]

    replica.runner.run(go())


def test_finish_reasons_tell_the_end_of_sequence_from_the_length(replica):
    async def go():
        requests = [replica.request([7, 8, 9 + i], max_new_tokens=200) for i in range(64)]
        completions = await asyncio.gather(*replica.start(*requests))
        stopped = [c for c in completions if c.finish_reason is FinishReason.STOP]
        cut = [c for c in completions if c.finish_reason is FinishReason.LENGTH]
        assert stopped and cut and len(stopped) + len(cut) == 64
        for c in completions:
            assert EOS not in c.token_ids[:-1]
            assert (c.token_ids[-1] == EOS) == (c.finish_reason is FinishReason.STOP)
            assert c.version_runs == ((0, len(c.token_ids)),)
        assert all(len(c.token_ids) == 200 for c in cut)

    replica.runner.run(go())


def test_a_stop_token_of_the_request_ends_it_and_is_part_of_the_answer(replica):
    async def go():
        wanted = greedy(replica.models["old"], PROMPT, 24)
        stop = next(t for i, t in enumerate(wanted) if i > 2 and t not in wanted[:i])
        completion = await replica.engine.generate(replica.request(temperature=0.0, stop_token_ids=(stop,)))
        assert list(completion.token_ids) == wanted[: wanted.index(stop) + 1]
        assert completion.finish_reason is FinishReason.STOP

    replica.runner.run(go())


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it_or_is_refused(replica):
    async def go():
        wanted = greedy(replica.models["old"], PROMPT, 24)
        stop = next(t for i, t in enumerate(wanted) if i > 2 and t not in wanted[:i])
        try:
            completion = await replica.engine.generate(replica.request(temperature=0.0, stop_strings=(f"w{stop:03}",)))
        except ValueError as error:
            assert "stop_strings" in str(error) and "use vllm" in str(error)
            return
        assert list(completion.token_ids) == wanted[: wanted.index(stop) + 1]
        assert completion.finish_reason is FinishReason.STOP
        assert replica.engine.decode([17]) == "w017", "the host looks for the beginning of a stop string in the text"

    replica.runner.run(go())


def test_a_full_context_ends_with_length_and_a_prompt_without_room_is_refused(replica):
    async def go():
        request = replica.request([5 + i % 400 for i in range(CONTEXT - 6)], temperature=0.0, max_new_tokens=100)
        completion = await replica.engine.generate(request)
        assert completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) == 6
        with pytest.raises(ValueError, match="no room"):
            await replica.engine.generate(replica.request([5] * CONTEXT))

    replica.runner.run(go())


def test_progress_tells_running_tokens_that_their_answer_begins_with(replica):
    async def go():
        engine, told = replica.engine, {}
        requests = [replica.request([9, 8, 7 + i], max_new_tokens=300, stop_token_ids=(50 + i,)) for i in range(6)]
        requests.append(replica.request(temperature=0.0, max_new_tokens=8))
        tasks = replica.start(*requests)
        while not all(task.done() for task in tasks):
            for request in requests:
                pieces = told.setdefault(request.request_id, [])
                start = sum(len(p.token_ids) for p in pieces)
                piece = engine.progress(request.request_id, start)
                if piece is not None:
                    assert piece.token_ids and piece.request_id == request.request_id and piece.experts is None
                    assert piece.finish_reason is FinishReason.ABORT and piece.generation_s > 0
                    pieces.append(piece)
            await asyncio.sleep(0.005)
        for request, task in zip(requests, tasks, strict=True):
            whole, pieces = task.result(), told[request.request_id]
            tokens = [t for piece in pieces for t in piece.token_ids]
            logprobs = [x for piece in pieces for x in piece.logprobs]
            assert len(tokens) < len(whole.token_ids), "the token that ends a request comes with its end"
            assert tokens == list(whole.token_ids[: len(tokens)])
            assert logprobs == list(whole.logprobs[: len(tokens)])
            assert all(piece.version_runs == ((0, len(piece.token_ids)),) for piece in pieces)
            assert engine.progress(request.request_id, 0) is None, "it has ended"
        assert sum(len(pieces) > 1 for pieces in told.values()) >= 2

    replica.runner.run(go())


def test_progress_never_ends_inside_of_a_stop_string(replica):
    async def go():
        engine, stop = replica.engine, "w001w002w003w004"
        request = replica.request([9, 8, 7], max_new_tokens=200, stop_strings=(stop,), temperature=0.0)
        (task,) = replica.start(request)
        try:
            longest = 0
            while not task.done():
                piece = engine.progress(request.request_id, 0)
                longest = max(longest, len(piece.token_ids) if piece else 0)
                await asyncio.sleep(0.005)
            whole = await task
        except ValueError as error:
            assert "stop_strings" in str(error) and "use vllm" in str(error)
            return
        assert 0 < longest <= len(whole.token_ids) - len(stop)

    replica.runner.run(go())


def test_abort_returns_when_the_requests_have_ended_with_all_tokens_so_far(replica):
    async def go():
        requests = [replica.request([9, 8, 7 + i], max_new_tokens=480) for i in range(12)]
        tasks = await replica.started(*requests)
        await replica.engine.abort([*(r.request_id for r in requests), "nobody"])
        assert all(t.done() for t in tasks)
        aborted = 0
        for request, task in zip(requests, tasks, strict=True):
            completion = task.result()
            replica.assert_sampled_from("old", request, completion)
            aborted += completion.finish_reason is FinishReason.ABORT and len(completion.token_ids) > 0
        assert aborted
        assert (load := replica.engine.load()).running == load.waiting == 0

    replica.runner.run(go())


@pytest.mark.parametrize("delay_s", [0, 0.0005, 0.002, 0.005])
def test_an_abort_right_after_the_start_is_not_lost(replica, delay_s):
    async def go():
        for _ in range(5):
            requests = [replica.request(max_new_tokens=480) for _ in range(4)]
            tasks = replica.start(*requests)
            await asyncio.sleep(delay_s)
            started = time.monotonic()
            await replica.engine.abort([r.request_id for r in requests])
            assert time.monotonic() - started < patient(1)
            await asyncio.sleep(0)
            assert all(t.done() and len(t.result().token_ids) < 400 for t in tasks)

    replica.runner.run(go())


def test_nothing_is_sampled_while_paused_and_new_requests_wait(replica):
    async def go():
        running = await replica.started(*(replica.request(max_new_tokens=480) for _ in range(4)))
        await replica.engine.pause(PauseMode.ABORT)
        assert all(t.done() for t in running)
        late, unwanted = replica.request(), replica.request()
        waiting, dropped = replica.start(late, unwanted)
        await asyncio.sleep(0.2)
        assert not waiting.done() and not dropped.done()
        await replica.engine.abort([unwanted.request_id])
        assert dropped.done() and dropped.result().finish_reason is FinishReason.ABORT
        assert len(dropped.result().token_ids) == 0 and not waiting.done()
        await replica.engine.resume()
        replica.assert_sampled_from("old", late, await waiting)

    replica.runner.run(go())


@pytest.mark.parametrize("delay_s", [0, 0.001, 0.004])
def test_a_pause_right_after_the_start_does_not_hang(replica, delay_s):
    async def go():
        for _ in range(4):
            tasks = replica.start(*(replica.request(max_new_tokens=480) for _ in range(4)))
            await asyncio.sleep(delay_s)
            async with asyncio.timeout(patient(10)):
                await replica.engine.pause(PauseMode.ABORT)
                await replica.engine.resume()
                await replica.engine.abort([f"r{replica.count - i}" for i in range(4)])
                await asyncio.gather(*tasks)

    replica.runner.run(go())


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_an_update_travels_beside_the_served_weights_and_changes_them_at_the_commit(replica, transport):
    async def go():
        request = replica.request([3, 4, 5], max_new_tokens=450)
        (before,) = replica.start(request)
        sender = await replica.take_in(tensors_of(replica.models["new"]), 4, transport)
        assert await replica.engine.finish_update() == of_trainer([sender.sent])
        during = replica.request()
        completion = await replica.engine.generate(during)
        replica.assert_sampled_from("old", during, completion)
        assert completion.version_runs == ((0, len(completion.token_ids)),)
        await replica.engine.pause(PauseMode.ABORT)
        replica.assert_sampled_from("old", request, before.result())
        await replica.engine.commit(4)
        await replica.engine.resume()
        replica.version = 4
        assert replica.engine.version == 4
        after = replica.request()
        completion = await replica.engine.generate(after)
        replica.assert_sampled_from("new", after, completion)
        assert completion.version_runs == ((4, len(completion.token_ids)),)

    replica.runner.run(go())


def test_an_update_given_up_halfway_changes_nothing_and_the_next_one_is_whole(replica):
    async def go():
        await replica.take_in(tensors_of(replica.models["new"]), 5, num_buckets=3)
        request = replica.request()
        replica.assert_sampled_from("old", request, await replica.engine.generate(request))
        await replica.push("new", 6)
        request = replica.request()
        replica.assert_sampled_from("new", request, await replica.engine.generate(request))

    replica.runner.run(go())


@torch.no_grad()
def stepped(model):
    """The model with one of a hundred values of each tensor changed."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.view(-1)[::100] += 0.2
    return model


def test_a_push_of_what_changed_builds_on_what_trainer_and_engine_kept_of_the_one_before(replica):
    async def go():
        replica.models["stepped"] = stepped(replica.models["new"])
        await replica.push("new", 14, export=1)
        whole = replica.sent_bytes
        await replica.push("stepped", 15, export=2, base=1)
        assert replica.sent_bytes < whole / 20
        request = replica.request()
        replica.assert_sampled_from("stepped", request, await replica.engine.generate(request))

    replica.runner.run(go())


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_partial_update_is_refused_and_a_whole_one_heals(replica, name):
    async def go():
        partial = [(n, t) for n, t in tensors_of(replica.models["new"]) if n != name]
        await replica.take_in(partial, 8)
        await replica.engine.pause(PauseMode.ABORT)
        with pytest.raises(UpdateFailed, match="incomplete"):
            await replica.engine.finish_update()
            await replica.engine.commit(8)
        assert replica.engine.version == 0
        replica.version = None
        await replica.push("new", 9)
        request = replica.request()
        replica.assert_sampled_from("new", request, await replica.engine.generate(request))

    replica.runner.run(go())


@pytest.mark.parametrize("shared", ["sglang"], indirect=True)
def test_sglang_takes_an_update_after_one_whose_commit_failed_while_it_loaded(replica):
    """Its session of an update is open then, and it opens no second one."""
    engine, session = replica.engine, replica.engine._session
    load = session.load

    async def without_room(tensors):
        session.load = load
        raise RuntimeError("no room in /dev/shm")

    async def go():
        await replica.take_in(tensors_of(replica.models["new"]), 8)
        await engine.pause(PauseMode.ABORT)
        session.load, replica.version = without_room, None
        with pytest.raises(UpdateFailed, match="commit: no room"):
            await engine.commit(8)
        await replica.push("new", 9)
        request = replica.request()
        replica.assert_sampled_from("new", request, await engine.generate(request))

    replica.runner.run(go())


def test_a_byte_changed_on_the_way_shows_in_the_digest(replica):
    async def go():
        sender = replica.send(tensors_of(replica.models["new"]), 10)
        await replica.engine.begin_update(sender.plan)
        index = 0
        while (block := sender.next_block()) is not None:
            if index == 2:
                path = Path(block.location)
                content = bytearray(path.read_bytes())
                content[1000] ^= 1
                with path.open("r+b") as file:
                    file.write(content)
            await replica.engine.load_bucket(Bucket(index=index, blocks=(block,)))
            index += 1
        assert await replica.engine.finish_update() != of_trainer([sender.sent])

    replica.runner.run(go())


def test_a_running_engine_refuses_what_would_change_its_weights(replica):
    async def go():
        with pytest.raises(RuntimeError, match="pause"):
            await replica.engine.begin_update(UpdatePlan(version=11, transport="nccl", verify="none"))
        with pytest.raises(RuntimeError, match="without|pause"):
            await replica.engine.commit(11)
        await replica.take_in(tensors_of(replica.models["new"]), 11)
        with pytest.raises(RuntimeError, match="pause it first"):
            await replica.engine.commit(11)
        request = replica.request()
        replica.assert_sampled_from("old", request, await replica.engine.generate(request))

    replica.runner.run(go())


def test_kept_requests_carry_the_version_of_every_token(replica):
    if not replica.engine.capabilities.keep_in_place:
        with pytest.raises(ValueError, match="keep"):
            replica.runner.run(replica.engine.pause(PauseMode.KEEP))
        return

    async def go():
        requests = [replica.request([3, 4, 5 + i], max_new_tokens=400) for i in range(8)]
        await replica.take_in(tensors_of(replica.models["new"]), 12)
        tasks = await replica.started(*requests)
        await replica.engine.pause(PauseMode.KEEP)
        await asyncio.sleep(0.5)  # answers that ended before the pause may still be on their way
        running = [not t.done() for t in tasks]
        await asyncio.sleep(0.2)
        assert running == [not t.done() for t in tasks] and any(running)
        await replica.engine.commit(12)
        await replica.engine.resume()
        replica.version = 12
        mixed = 0
        for request, task in zip(requests, tasks, strict=True):
            completion = await task
            tokens = list(completion.token_ids)
            versions = [v for v, n in completion.version_runs for _ in range(n)]
            assert set(versions) <= {0, 12} and versions == sorted(versions)
            mixed += len(set(versions)) == 2
            both = {
                v: reference_logprobs(replica.models[m], list(request.prompt_token_ids), tokens, request.sampling)
                for v, m in ((0, "old"), (12, "new"))
            }
            wanted = torch.stack([both[v][i] for i, v in enumerate(versions)])
            assert torch.allclose(torch.tensor(completion.logprobs), wanted, atol=TOLERANCE, rtol=0)
        assert mixed

    replica.runner.run(go())


@torch.no_grad()
def logprobs_across_a_swap(before, after, prompt, tokens, count):
    """[R - count] log-probs of the tokens after the first `count`: the cache up to the last one that `before` sampled
    is its own, `after` goes on from there.
    """
    past = before(torch.tensor([[*prompt, *tokens[: count - 1]]]), use_cache=True).past_key_values
    logits = after(torch.tensor([tokens[count - 1 : -1]]), past_key_values=past).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[count:])[:, None])[:, 0]


def test_kept_requests_go_on_with_the_cache_of_the_old_weights_where_prompts_share_none(tmp_path):
    pytest.importorskip("vllm")
    replica = Replica("vllm", tmp_path, tied=True, enable_prefix_caching=False)

    async def go():
        requests = [replica.request([3, 4, 5 + i], max_new_tokens=400) for i in range(6)]
        await replica.take_in(tensors_of(replica.models["new"]), 1)
        tasks = await replica.started(*requests)
        await replica.engine.pause(PauseMode.KEEP)
        await replica.engine.commit(1)
        await replica.engine.resume()
        mixed = 0
        for request, task in zip(requests, tasks, strict=True):
            completion = await task
            counts = dict(completion.version_runs)
            if set(counts) != {0, 1}:
                continue
            mixed += 1
            prompt, tokens = list(request.prompt_token_ids), list(completion.token_ids)
            old, new = replica.models["old"], replica.models["new"]
            wanted = torch.cat([
                reference_logprobs(old, prompt, tokens[: counts[0]], request.sampling),
                logprobs_across_a_swap(old, new, prompt, tokens, counts[0]),
            ])  # fmt: skip
            assert torch.allclose(torch.tensor(completion.logprobs), wanted, atol=TOLERANCE, rtol=0)
            fresh = reference_logprobs(new, prompt, tokens, request.sampling)[counts[0] :]
            assert (torch.tensor(completion.logprobs)[counts[0] :] - fresh).abs().max() > 0.1, "it was not recomputed"
        assert mixed
        request = replica.request()
        replica.assert_sampled_from("new", request, await replica.engine.generate(request))

    try:
        replica.runner.run(go())
    finally:
        replica.close()


def test_load_counts_what_runs_and_what_waits(replica):
    async def go():
        requests = [replica.request(max_new_tokens=480) for _ in range(70)]
        tasks = replica.start(*requests)
        await asyncio.sleep(0.3)
        load = replica.engine.load()
        open_requests = sum(not t.done() for t in tasks)
        assert load.running + load.waiting == open_requests > 0 and load.running <= 64
        assert 0 <= load.free_kv_fraction < 1
        await replica.engine.abort([r.request_id for r in requests])
        idle = replica.engine.load()
        assert (idle.running, idle.waiting, idle.free_kv_fraction) == (0, 0, 1.0)

    replica.runner.run(go())


@pytest.mark.parametrize("shared", ["sglang"], indirect=True)
def test_sglang_tells_of_its_cache_and_of_requests_that_it_took_back(replica):
    """It admits requests for 0.7 of the answer that they may get, and takes one back when the cache is full."""

    async def go():
        engine = replica.engine
        at_first, total = engine.load().kv.preemptions, engine.load().kv.total_tokens
        requests = [replica.request([20 + i, *range(30, 50)], max_new_tokens=400, temperature=0.0) for i in range(6)]
        tasks, seen = replica.start(*requests), []
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.02)
            seen.append(load := engine.load())
            assert load.kv.total_tokens == total and load.running + load.waiting == sum(not t.done() for t in tasks)
        answers = [len(task.result().token_ids) for task in tasks]
        assert max(load.kv.used_tokens for load in seen) > 0.9 * total, "it was nearly full"
        assert max(load.running for load in seen) == 3 and seen[-1].kv.preemptions > at_first, answers
        idle = engine.load()
        assert (idle.running, idle.waiting, idle.kv.free_tokens) == (0, 0, total)
        assert await replica.prefix_found_of_one_asked_twice() == (600, 299), "all but the last one"

    replica.runner.run(go())


def test_sixty_four_requests_at_once_do_not_mix(replica):
    async def go():
        requests = [replica.request([20 + i, 30, 40 + i], max_new_tokens=8 + i % 9) for i in range(64)]
        completions = await asyncio.gather(*replica.start(*requests))
        for request, completion in zip(requests, completions, strict=True):
            assert len(completion.token_ids) <= request.sampling.max_new_tokens
            replica.assert_sampled_from("old", request, completion)

    replica.runner.run(go())


def gives_memory_back(replica):
    """SGLang's allocator that does is for CUDA; on CPU it goes through the same states."""
    return replica.strategy != "sglang"


async def refuses_to_work(replica):
    with pytest.raises(RuntimeError, match="wake"):
        await replica.engine.generate(replica.request())
    with pytest.raises(RuntimeError, match="wake"):
        await replica.engine.resume()


def test_a_replica_sleeps_gives_its_memory_back_and_goes_on_with_the_same_weights(replica):
    async def go():
        engine, awake = replica.engine, replica.engine.memory()
        assert awake.weights_bytes > 0 and awake.kv_cache_bytes > 0
        with pytest.raises(RuntimeError, match="pause"):
            await engine.sleep(1)
        await engine.pause(PauseMode.ABORT)
        with pytest.raises(ValueError, match="levels are"):
            await engine.sleep(3)
        await engine.sleep(1)
        asleep = engine.memory()
        assert engine.sleep_state is SleepState.ASLEEP
        assert asleep.kv_cache_bytes == 0 or not gives_memory_back(replica)
        await refuses_to_work(replica)
        with pytest.raises(RuntimeError, match="asleep"):
            await engine.begin_update(UpdatePlan(version=1, transport="shm", verify="full"))
        await engine.wake(["weights"])
        assert engine.sleep_state is SleepState.WEIGHTS_AWAKE and engine.memory().weights_bytes == awake.weights_bytes
        await refuses_to_work(replica)
        await engine.wake(["kv_cache"])
        assert engine.memory() == awake
        await engine.resume()
        request = replica.request()
        replica.assert_sampled_from("old", request, await engine.generate(request))

    replica.runner.run(go())


def test_a_replica_that_dropped_its_weights_serves_only_those_of_the_next_update(replica):
    async def go():
        engine, awake, rss = replica.engine, replica.engine.memory(), resident_bytes()
        await engine.pause(PauseMode.ABORT)
        await engine.sleep(2)
        replica.version = None
        asleep = engine.memory()
        if gives_memory_back(replica):
            assert asleep.weights_bytes == asleep.kv_cache_bytes == asleep.host_weights_bytes == 0
            assert rss - resident_bytes() > 0.5 * awake.kv_cache_bytes, "the operating system has the memory again"
        await engine.wake(["weights"])
        sender = await replica.take_in(tensors_of(replica.models["new"]), 13)
        assert await engine.finish_update() == of_trainer([sender.sent])
        await engine.commit(13)
        await engine.wake(["kv_cache"])
        assert engine.memory() == awake
        await engine.resume()
        replica.version = 13
        requests = [replica.request([7, 8, 9 + i]) for i in range(8)]
        for request, task in zip(requests, replica.start(*requests), strict=True):
            completion = await task
            replica.assert_sampled_from("new", request, completion)
            assert completion.version_runs == ((13, len(completion.token_ids)),)
        await engine.pause(PauseMode.ABORT)
        await engine.sleep(2)
        await engine.wake(["kv_cache", "weights"])
        with pytest.raises(RuntimeError, match="whole weights"):
            await engine.resume()
        replica.version = None
        await replica.push("old", 14)

    replica.runner.run(go())
