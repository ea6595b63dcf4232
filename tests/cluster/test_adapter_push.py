"""Adapters pushed alone: a Megatron trainer in several layouts, and real engines that hold them beside the weights."""

import asyncio
import copy
from array import array

import pytest

pytest.importorskip("megatron.core")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import megatron_cases as cases
from test_engine_protocol import LIBRARY, TOLERANCE, Replica, tiny_model

from roll_async.inference.protocol import PauseMode
from roll_async.weight_sync.adapters import AdapterShape
from roll_async.weight_sync.bucket import Bucket, Content, UpdatePlan, adapter_half, is_adapter
from roll_async.weight_sync.canary import BANDS, Canary, CanaryOptions
from roll_async.weight_sync.digest import of_trainer
from roll_async.weight_sync.transfer import TensorPart, open_sender

RANK, VERSIONS = 4, 4
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = {"lora_rank": RANK, "lora_alpha": 12.0, "optimizer": {"learning_rate": 0.01}}
LAYOUTS = {
    "T2 S": (2, {"tensor": 2, "sequence_parallel": True}),
    "P2": (2, {"pipeline": 2}),
    "D2": (2, {}),
}
ENGINES = {
    "vllm": ("vllm", {}),
    "hf_infer": ("hf_infer", {}),
}


class Trained:
    """What the ranks of one layout sent of each version, the rows' log-probs, and models made of it."""

    def __init__(self, answers):
        self.versions = [[sent for sent, _ in versions] for versions in zip(*answers, strict=True)]
        self.logprobs = [logprobs for _, logprobs in answers[0]]
        self.rows, _ = cases.batch()

    def whole(self, version):
        """Tensors of one version, put together."""
        found = {}
        for name, shape, cut, tensor in (part for rank in self.versions[version] for part in rank):
            whole = found.setdefault(name, torch.full(shape, torch.nan))
            place = whole if cut is None else whole.narrow(cut.dim, cut.start, cut.stop - cut.start)
            assert place.isnan().all(), f"{name} was sent twice"
            place.copy_(tensor)
        assert not any(x.isnan().any() for x in found.values())
        return found

    @torch.no_grad()
    def model(self, version):
        """The adapters of a version merged into the weights."""
        halves = self.whole(version)
        model = tiny_model(1, True)
        for name, weight in model.named_parameters():
            a, b = (halves.get(adapter_half(name, half)) for half in ("lora_A", "lora_B"))
            if a is not None:
                weight.add_(b @ a)
        return model

    def row(self, number):
        return self.rows.tokens[number, : self.rows.lengths[number]].tolist()

    def assert_equal(self, scores, version):
        for number, found in scores.items():
            inside = self.rows.mask[number, 1 : self.rows.lengths[number]]
            wanted = self.logprobs[version][number, 1 : self.rows.lengths[number]][inside]
            difference = (torch.tensor(found)[inside] - wanted).abs().max()
            assert difference < TOLERANCE, f"version {version}, row {number}: {difference}"


@pytest.fixture(scope="module")
def trained(rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(1, True).save_pretrained(folder)

    known = {}

    def train(layout=None):
        if layout not in known:
            size, parallel = (1, {}) if layout is None else LAYOUTS[layout]
            settings = cases.settings_of(str(folder), parallel=parallel, **LORA)
            known[layout] = Trained(rank_pool.run(cases.adapter_versions, size, settings=settings, versions=VERSIONS))
        return known[layout]

    return train


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_sends_the_same_halves_each_once(trained, layout):
    one, other = trained(), trained(layout)
    for version in range(VERSIONS):
        expected, found = one.whole(version), other.whole(version)
        assert expected.keys() == found.keys()
        assert all(is_adapter(name) for name in found) == (version > 0)
        for name, tensor in expected.items():
            assert torch.allclose(found[name], tensor, atol=2e-3), f"{name} of version {version}"
    first, last = one.whole(1), one.whole(VERSIONS - 1)
    assert all(not torch.equal(first[name], tensor) for name, tensor in last.items()), "every half trains"


class Pushed(Replica):
    """A replica that holds adapters, and the ranks that send to it."""

    def __init__(self, strategy, folder, trained, **changes):
        models = {version: trained.model(version) for version in range(VERSIONS)}  # an engine draws random numbers, too
        super().__init__(strategy, folder, True, adapter=AdapterShape(rank=RANK, layers=LAYERS), **changes)
        self.name, self.trained, self.ends, self.models = "engine-0", trained, {}, models

    async def give(self, version, content, *, label=None, left_out=()):
        """Transfer one version and prove it; the bytes sent."""
        label = version if label is None else label
        plan = UpdatePlan(version=label, transport="shm", verify="full", layout=self.layout, content=content)
        ranks = list(self.trained.versions[version])
        if content is Content.WHOLE and version:  # the frozen weights are those of the first
            frozen = ([part for part in rank if not is_adapter(part[0])] for rank in self.trained.versions[0])
            ranks = [[*weights, *mine] for weights, mine in zip(frozen, ranks, strict=True)]
        for number, rank in enumerate(ranks):
            parts = [TensorPart(name=n, shape=s, cut=c, tensor=t) for n, s, c, t in rank if n not in left_out]
            self.ends[number] = open_sender(
                plan, parts, source=number, block_bytes=100_000, previous=self.ends.get(number)
            )
        await self.engine.begin_update(plan)
        index = num_bytes = 0
        while blocks := tuple(b for end in self.ends.values() if (b := end.next_block()) is not None):
            bucket = Bucket(index=index, blocks=blocks)
            await self.engine.load_bucket(bucket)
            index, num_bytes = index + 1, num_bytes + bucket.num_bytes
        assert await self.engine.finish_update() == of_trainer([end.sent for end in self.ends.values()])
        return num_bytes

    async def serve(self, version, content, **options):
        num_bytes = await self.give(version, content, **options)
        await self.engine.pause(PauseMode.ABORT)
        await self.engine.commit(options.get("label") or version)
        await self.engine.resume()
        return num_bytes

    async def assert_serves(self, version):
        scores = {number: await self.engine.score(self.trained.row(number)) for number in range(4)}
        self.trained.assert_equal(scores, version)

    async def score(self, rows):
        return [await self.engine.score(row) for row in rows]

    def close(self):
        super().close()
        for end in self.ends.values():
            end.close()


@pytest.fixture(scope="module", params=ENGINES)
def replica(request, trained, tmp_path_factory):
    """An engine of every kind behind a trainer of two tensor ranks."""
    strategy, changes = ENGINES[request.param]
    pytest.importorskip(LIBRARY[strategy])
    made = Pushed(strategy, tmp_path_factory.mktemp("engine"), trained("T2 S"), sleep_level=2, **changes)
    yield made
    made.close()


def test_engine_and_trainer_agree_after_each_push_and_no_prefix_of_an_older_adapter_is_used(replica):
    prompt = [3 + i for i in range(96)]

    async def go():
        whole = await replica.serve(0, Content.WHOLE)
        for version in range(VERSIONS):
            if version:
                assert await replica.serve(version, Content.ADAPTERS) < whole / 4
            await replica.assert_serves(version)
            for _ in range(2):  # the second finds the prompt in the cache
                request = replica.request(prompt, temperature=1.0, max_new_tokens=12)
                (task,) = replica.start(request)
                completion = await task
                replica.assert_sampled_from(version, request, completion)
                assert completion.version_runs == ((version, len(completion.token_ids)),)

    replica.runner.run(go())


def test_a_transfer_that_is_not_committed_changes_nothing(replica):
    async def go():
        await replica.serve(0, Content.WHOLE)
        await replica.give(2, Content.ADAPTERS)
        await replica.assert_serves(0)
        await replica.serve(1, Content.ADAPTERS)
        await replica.assert_serves(1)

    replica.runner.run(go())


def test_an_adapter_that_lacks_a_half_is_refused_and_never_served(replica):
    async def go():
        await replica.serve(0, Content.WHOLE)
        lost = adapter_half("model.layers.1.mlp.up_proj.weight", "lora_B")
        with pytest.raises(RuntimeError, match="incomplete.*up_proj.lora_B"):
            await replica.give(1, Content.ADAPTERS, left_out=(lost,))
            await replica.engine.pause(PauseMode.ABORT)
            await replica.engine.commit(1)
        await replica.engine.pause(PauseMode.ABORT)
        await replica.serve(2, Content.WHOLE)
        await replica.assert_serves(2)

    replica.runner.run(go())


def test_weights_kept_asleep_take_an_adapter_and_dropped_ones_refuse_it(replica):
    async def go():
        await replica.serve(0, Content.WHOLE)
        for level in (1, 2):
            await replica.engine.pause(PauseMode.ABORT)
            await replica.engine.sleep(level)
            await replica.engine.wake(["weights"])
            if level == 2:
                with pytest.raises(RuntimeError, match="the weights that they add to are not held"):
                    await replica.give(2, Content.ADAPTERS)
            await replica.give(level, Content.WHOLE if level == 2 else Content.ADAPTERS)
            await replica.engine.commit(level)
            await replica.engine.wake(["kv_cache"])
            await replica.engine.resume()
            await replica.assert_serves(level)

    replica.runner.run(go())


def test_a_request_that_is_kept_goes_on_under_the_new_adapter(replica):
    if not replica.engine.capabilities.keep_in_place:
        pytest.skip("this engine aborts requests at a push")

    async def go():
        await replica.serve(0, Content.WHOLE, label=10)
        request = replica.request(temperature=1.0, max_new_tokens=200)
        (task,) = replica.start(request)
        while replica.engine.progress(request.request_id, 0) is None and not task.done():
            await asyncio.sleep(0.01)
        await replica.give(3, Content.ADAPTERS, label=11)
        await replica.engine.pause(PauseMode.KEEP)
        await replica.engine.commit(11)
        await replica.engine.resume()
        completion = await task
        assert [version for version, _ in completion.version_runs] in ([10, 11], [10])
        return completion.version_runs

    runs = [replica.runner.run(go()) for _ in range(5)]
    assert any(len(found) == 2 for found in runs), "no request lived through a push"


class Source:
    """Scores with a model, as the trainer does."""

    @torch.no_grad()
    async def score(self, rows):
        found = []
        for row in rows:
            logprobs = torch.log_softmax(self.model(torch.tensor([row])).logits[0, :-1], -1)
            found.append(array("f", logprobs.gather(-1, torch.tensor(row)[1:, None])[:, 0].tolist()))
        return found


def test_the_canary_names_an_adapter_that_was_proved_and_never_delivered(replica, monkeypatch):
    if replica.strategy != "vllm" or replica.layout.tensor > 1:
        pytest.skip("the fault is made in this process")
    from roll_async.inference.vllm import worker_extension as vllm_worker_extension

    rows = [replica.trained.row(number) for number in range(8)]
    source = Source()
    canary = Canary(rows, source, CanaryOptions(prompts=8, band=BANDS["fp32"], adapter=True))

    async def check(version, content):
        source.model = copy.deepcopy(replica.models[version])
        await canary.before_push(version)
        await replica.serve(version, content)
        await canary.score_on_engines(version, [replica])
        return (await canary.report()).alarms

    async def go():
        assert await check(0, Content.WHOLE) == ()
        assert await check(1, Content.ADAPTERS) == ()
        with monkeypatch.context() as patch:
            patch.setattr(vllm_worker_extension, "set_adapter", lambda manager, tensors: None)
            (alarm,) = await check(2, Content.ADAPTERS)
        assert "scores exactly as at version 1" in alarm and "Suspect: adapter" in alarm
        assert await check(3, Content.ADAPTERS) == ()

    replica.runner.run(go())


@pytest.mark.parametrize("places", ["apart", "shared"])
def test_a_run_pushes_adapters_alone_and_stays_on_policy(launcher, monkeypatch, places):
    """Apart on CPU, where `auto` chooses it, to an engine of two tensor-parallel ranks; and in turns on a pretended
    GPU, where engines keep the frozen weights.
    """
    pytest.importorskip("vllm")
    where = ("actor_infer.strategy_args.strategy_config.tensor_parallel_size=2",)
    if places == "shared":
        monkeypatch.setenv("ROLL_ASYNC_PRETENDED_GPUS", "1")
        where = ("actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]", "weight_sync.adapters=alone")
    code, output = launcher.run(
        "async_generation_ratio=0",
        "max_steps=3",
        "rewards={length: {type: tests.cluster.length_reward.LengthReward}}",  # never alike: each step changes weights
        "actor_train.model_args.lora_rank=4",
        "actor_train.training_args.learning_rate=0.003",
        *where,
    )
    assert code == 0, output
    metrics = launcher.metrics()
    assert [m["step"] for m in metrics] == [1, 2, 3]
    for m in metrics:
        assert abs(m["correction/rho_max"] - 1) < 1e-3 and m.get("weights/canary_alarms", 0) == 0
        assert m.get("weights/canary_difference", 0) < 1e-4
    assert metrics[-1].get("weights/canary_moved", 1) > 0
    sent = [m["weights/sent_bytes"] for m in metrics if "weights/sent_bytes" in m]
    whole = (launcher.assets / "model" / "model.safetensors").stat().st_size
    assert sent and max(sent) < whole / 2, "after the first push, before step 1, adapters travel alone"
