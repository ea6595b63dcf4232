"""Replay of recorded expert choices: what an engine records, and what the trainer makes of it, in every layout."""

import asyncio
from array import array

import pytest

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

import megatron_cases as cases
import torch

from roll_async.inference.backends import create_engine
from roll_async.inference.settings import EngineSettings
from roll_async.schema import ExpertRows, GenerateRequest, SamplingParams, join_records
from roll_async.trainer.protocol import TokenRows
from tests.rounding import assert_near

NUM_EXPERTS, TOP_K, NUM_LAYERS = 4, 2, 4
FULL = {"recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}
LAYOUTS = {
    "P2, recompute full": (2, {"parallel": {"pipeline": 2}, **FULL}),
    "P2 V2, recompute full": (2, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, **FULL}),
    "E2, dynamic": (2, {"parallel": {"expert": 2}, "micro_batching": "dynamic", "max_tokens_per_microbatch": 96}),
    "T2 E2 S, allgather": (
        2,
        {"parallel": {"tensor": 2, "expert": 2, "sequence_parallel": True}, "moe_dispatcher": "allgather"},
    ),
    "C2": (2, {"parallel": {"context": 2}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cases.model_folder(tmp_path_factory.mktemp("model"), "MoE")


@pytest.fixture(scope="module")
def model(folder):
    return transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Routers:
    """The routers of a Transformers model: notes what they choose, or makes them choose what is given."""

    def __init__(self, model, given=None):
        gates = [layer.mlp.gate for layer in model.model.layers]
        self.given, self.chosen = given, [None] * len(gates)
        self.hooks = [gate.register_forward_hook(self.hook(layer)) for layer, gate in enumerate(gates)]

    def hook(self, layer):
        def run(gate, inputs, output):
            logits, weights, experts = output
            if self.given is not None:
                experts = torch.where(self.given[:, layer] >= 0, self.given[:, layer], experts)
                weights = logits.softmax(-1).gather(1, experts)
                weights = weights / weights.sum(-1, keepdim=True)
            self.chosen[layer] = experts
            return logits, weights, experts

        return run

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def read(model, tokens, given=None):
    """([t] log-prob of every token but the first, [t,L,K] experts) of one row under Transformers."""
    with Routers(model, given) as routers:
        logits = model(tokens[None]).logits[0].float()
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0], torch.stack(routers.chosen, 1)


def records_of(rows, of_row):
    """ExpertRows of all positions but each row's last; the third row has no record at all."""
    counts = [0 if b == 2 else int(n) - 1 for b, n in enumerate(rows.lengths)]
    ids = torch.cat([of_row(b)[:n] for b, n in enumerate(counts)])
    return ExpertRows(ids=ids.to(torch.uint8), num_positions=torch.tensor(counts))


@pytest.fixture(scope="module")
def own(model):
    """What the model chooses by itself."""
    rows, _ = cases.batch()
    return records_of(rows, lambda b: read(model, rows.tokens[b, : rows.lengths[b]])[1])


@pytest.fixture(scope="module")
def random():
    """Any two experts per token and layer."""
    rows, generator = cases.batch()[0], torch.Generator().manual_seed(5)

    def of_row(b):
        keys = torch.rand(int(rows.lengths[b]), NUM_LAYERS, NUM_EXPERTS, generator=generator)
        return keys.topk(TOP_K).indices

    return records_of(rows, of_row)


def same(found, expected):
    assert_near(found["before"], expected["before"], cases.BOUNDS.forward)
    cases.assert_same_losses([found["step"]], [expected["step"]])
    assert_near(found["step"]["trainer/grad_norm"], expected["step"]["trainer/grad_norm"], cases.BOUNDS.step)
    moved = float((expected["after"] - expected["before"]).abs().max())
    assert_near(found["after"], expected["after"], cases.BOUNDS.moved, of=moved)


@pytest.fixture(scope="module")
def replayed(rank_pool, folder):
    def run(world_size, experts, **settings):
        settings = cases.settings_of(folder, router_replay=experts is not None, **settings)
        return rank_pool.run(cases.replay, world_size, settings=settings, experts=experts)[0]

    return run


@pytest.fixture(scope="module")
def one_rank(replayed, random):
    return replayed(1, random)


def test_the_models_own_choice_replayed_is_the_same_step_bit_for_bit(replayed, own):
    plain, found = replayed(1, None), replayed(1, own)
    assert (found["before"] == plain["before"]).all() and (found["after"] == plain["after"]).all()
    for key in ("trainer/loss", "trainer/grad_norm"):
        assert found["step"][key] == plain["step"][key]
    rows, _ = cases.batch()
    assert found["step"]["router/agreement"] == 1.0
    fed = len(own.ids) / found["step"]["router/replayed_share"]  # with padding
    assert int(rows.lengths.sum()) <= round(fed) < 2 * int(rows.lengths.sum())


def test_another_choice_is_taken_and_the_row_without_a_record_chooses_itself(model, random, one_rank):
    rows, _ = cases.batch()
    start = 0
    for b, count in enumerate(random.num_positions.tolist()):
        given = torch.full((int(rows.lengths[b]), NUM_LAYERS, TOP_K), -1)
        given[:count] = random.ids[start : start + count]
        start += count
        tokens = rows.tokens[b, : rows.lengths[b]]
        wanted, _ = read(model, tokens, given)
        mask = rows.mask[b, 1 : rows.lengths[b]]
        found, largest = one_rank["before"][b, 1 : rows.lengths[b]], float(one_rank["before"].abs().max())
        assert_near(found[mask], wanted[mask], cases.BOUNDS.forward, of=largest)
        differs = (wanted - read(model, tokens)[0])[mask].abs().max()
        assert differs > 0.1 or count == 0
    assert one_rank["step"]["router/agreement"] < 0.8


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_replays_as_one_rank_does(replayed, random, one_rank, name):
    world_size, settings = LAYOUTS[name]
    found = replayed(world_size, random, **settings)
    same(found, one_rank)
    assert found["step"]["router/agreement"] == pytest.approx(one_rank["step"]["router/agreement"], abs=1e-6)


def test_records_of_another_model_and_a_model_without_experts_are_refused(rank_pool, folder, random, tmp_path):
    settings = cases.settings_of(folder, router_replay=True)
    wrong = ExpertRows(ids=random.ids[:, :3], num_positions=random.num_positions)
    with pytest.raises(RuntimeError, match="recorded experts have 3 layers with 2 experts per token"):
        rank_pool.run(cases.replay, 1, settings=settings, experts=wrong)
    dense = cases.settings_of(cases.model_folder(tmp_path, "dense"), router_replay=True)
    with pytest.raises(RuntimeError, match="router_replay=true, but the model has no experts"):
        rank_pool.run(cases.replay, 1, settings=dense, experts=random)


def generate(folder, dtype, drive, strategy="hf_infer"):
    """What `drive(engine)` returns on a started engine that records."""

    async def run():
        engine = create_engine(
            strategy,
            EngineSettings(
                model_folder=folder, dtype=dtype, device="cpu", max_model_len=64, max_running=8, record_experts=True
            ),
        )
        await engine.start()
        try:
            return await drive(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def ask(name, prompt, tokens, recorded_positions=0):
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=array("i", prompt),
        sampling=SamplingParams(max_new_tokens=tokens),
        recorded_positions=recorded_positions,
    )


def as_tensor(record):
    return torch.frombuffer(record.ids, dtype=torch.uint8).view(-1, record.num_layers, record.top_k).long()


@pytest.mark.parametrize("strategy", ["hf_infer", "sglang"])
def test_the_engine_records_what_its_routers_chose_also_over_an_interruption(folder, model, strategy, request):
    """vLLM's CPU build records nothing."""
    if strategy == "sglang":
        request.getfixturevalue("sglang_on_cpu")

    async def drive(engine):
        scored = strategy == "hf_infer"  # as the canary does, before there is any batch and beside it
        if scored:
            await engine.score([1, 2, 3])
        whole = asyncio.gather(*(engine.generate(ask(f"r{i}", range(1 + i, 9), 20)) for i in range(6)))
        first = asyncio.ensure_future(engine.generate(ask("a", [5, 6, 7], 60)))
        while engine.progress("a", 0) is None:
            if scored:
                await engine.score(list(range(1, 30)))
            await asyncio.sleep(0.001)
        await engine.abort(["a"])
        piece = await first
        prompt = [5, 6, 7, *piece.token_ids]
        known = piece.experts.num_positions
        assert known == len(prompt) - 1
        rest = await engine.generate(ask("b", prompt, 5, known))
        return await whole, (prompt, piece, rest)

    completions, (prompt, piece, rest) = generate(folder, "fp32", drive, strategy)
    rows = [([*range(1 + i, 9), *x.token_ids], x.experts) for i, x in enumerate(completions)]
    rows.append(([*prompt, *rest.token_ids], join_records([piece.experts, rest.experts])))
    for tokens, record in rows:
        assert record.num_positions == len(tokens) - 1
        _, chosen = read(model, torch.tensor(tokens))
        # As sets: nearly equal logits may come in either order.
        assert (as_tensor(record).sort(-1).values == chosen[:-1].sort(-1).values).float().mean() > 0.999


def test_with_replay_the_trainer_is_nearer_to_an_engine_of_lower_precision(rank_pool, folder):
    """bfloat16 flips a part of the choices; a token whose experts are other ones has another distribution."""

    async def drive(engine):
        return await asyncio.gather(*(engine.generate(ask(f"r{i}", [3 + i, 9, 20], 40)) for i in range(16)))

    completions = generate(folder, "bf16", drive)
    width = max(3 + len(x.token_ids) for x in completions)
    tokens, behaviour = torch.zeros(16, width, dtype=torch.int64), torch.zeros(16, width)
    for b, x in enumerate(completions):
        row = torch.tensor([3 + b, 9, 20, *x.token_ids])
        tokens[b, : len(row)], behaviour[b, 3 : len(row)] = row, torch.tensor(x.logprobs)
    lengths = torch.tensor([3 + len(x.token_ids) for x in completions])
    mask = (torch.arange(width)[None] >= 3) & (torch.arange(width)[None] < lengths[:, None])
    experts = ExpertRows(
        ids=torch.cat([as_tensor(x.experts) for x in completions]).to(torch.uint8),
        num_positions=torch.tensor([x.experts.num_positions for x in completions]),
    )
    gaps = {}
    for name, record in (("own", None), ("replayed", experts)):
        settings = cases.settings_of(folder, router_replay=True)
        rows = TokenRows(tokens=tokens, lengths=lengths, mask=mask, experts=record)
        found = rank_pool.run(cases.score, 1, settings=settings, rows=rows)[0]
        gaps[name] = (found - behaviour)[mask].abs().mean().item()
    print(gaps)
    assert gaps["replayed"] < 0.7 * gaps["own"]
