"""Failures that were reported of engines which held every byte, made again in a real engine: the canary finds each."""

import asyncio
import copy
import re
from array import array

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_engine_protocol import CONTEXT, save_tokenizer, tiny_model

from roll_async.inference.hf.engine import HfEngine
from roll_async.inference.settings import EngineSettings
from roll_async.weight_sync.canary import BANDS, Canary, CanaryOptions

LONG = CONTEXT - 1
ROWS = [[7 * i % 500 + 3 for i in range(start, start + 24)] for start in range(16)]


def dense(seed):
    return with_norms(tiny_model(seed, tied=True), seed)


def mixture(seed):
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=CONTEXT, eos_token_id=2, pad_token_id=0, initializer_range=0.1, dtype="float32",
    )  # fmt: skip
    return with_norms(transformers.Qwen3MoeForCausalLM(config).eval(), seed)


@torch.no_grad()
def with_norms(model, seed):
    """As of a trained model, whose norms are no longer 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def trained(model, by=0.002):
    """The model after an optimizer step: every weight moved a little."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.add_(by * torch.randn_like(parameter) * parameter.abs().mean())
    return model


class Trainer:
    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    async def score(self, rows):
        found = []
        for row in rows:
            ids = torch.tensor([row])
            logprobs = torch.log_softmax(self.model(ids).logits[0, :-1].float(), -1)
            found.append(array("f", logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()))
        return found


class Served:
    """A real engine of this process, and its weights by hand."""

    def __init__(self, name, model, folder):
        self.name = name
        model.save_pretrained(folder)
        save_tokenizer(folder)
        settings = EngineSettings(
            model_folder=str(folder), dtype="fp32", device="cpu", max_model_len=CONTEXT, max_running=4, seed=1
        )
        self.engine = HfEngine(settings)

    @property
    def model(self):
        return self.engine._model

    @torch.no_grad()
    def takes(self, model):
        for mine, given in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.copy_(given)

    async def score(self, rows):
        return [await self.engine.score(row) for row in rows]


def after_two_pushes(folder, first, damage, *, engines=2, adapter=False, rows=ROWS, **depths):
    """The report of the second push; `damage(engine, old)` works on the last engine, which has taken its weights in."""
    second = trained(first)

    async def go():
        served = [Served(f"engine-{i}", first, folder / str(i)) for i in range(engines)]
        for engine in served:
            await engine.engine.start()
        try:
            options = CanaryOptions(prompts=len(rows), band=BANDS["fp32"], adapter=adapter, **depths)
            trainer = Trainer(first)
            canary = Canary(rows, trainer, options)
            await canary.before_push(1)
            await canary.score_on_engines(1, served)
            whole = await canary.report()
            assert whole.alarms == () and max(whole.difference.values()) < 1e-5
            trainer.model = second
            await canary.before_push(2)
            for engine in served:
                engine.takes(second)
            damage(served[-1].model, first)
            await canary.score_on_engines(2, served)
            return await canary.report()
        finally:
            for engine in served:
                await engine.engine.close()

    return asyncio.run(go())


def nothing(model, old):
    pass


@torch.no_grad()
def version_behind(model, old):
    for mine, before in zip(model.parameters(), old.parameters(), strict=True):
        mine.copy_(before)


@torch.no_grad()
def stale_head(model, old):
    """The head was given memory of its own, and the push fills the embedding."""
    model.lm_head.weight = torch.nn.Parameter(old.model.embed_tokens.weight.detach() * 1.1)


def freed_buffer(model, old):
    model.model.rotary_emb.inv_freq.zero_()


def without_rope_scaling(model, old):
    model.model.rotary_emb.inv_freq.mul_(4)


def without_positions_from_32_on(model, old):
    rotary = model.model.rotary_emb
    turned = rotary.forward
    rotary.forward = lambda x, position_ids: turned(x, position_ids.clamp(max=31))


@torch.no_grad()
def norms_in_bfloat16(model, old):
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(parameter.bfloat16().float())


@torch.no_grad()
def permuted_experts(model, old):
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for parameter in experts.parameters():
            parameter.copy_(parameter.flip(0))


def test_two_engines_with_the_right_weights_are_no_alarm(tmp_path):
    report = after_two_pushes(tmp_path, dense(1), nothing)
    assert report.alarms == () and report.moved > 0 and max(report.difference.values()) < 1e-5


@pytest.mark.parametrize(
    ("make", "damage", "suspect"),
    [
        (dense, version_behind, "scores exactly as at version 1.*Suspect: weights"),
        (dense, stale_head, "Suspect: weights of this replica"),
        (dense, freed_buffer, "Suspect: weights of this replica"),
        (dense, without_rope_scaling, "Suspect: weights of this replica"),
        (dense, norms_in_bfloat16, "Suspect: weights of this replica"),
        (mixture, permuted_experts, "Suspect: weights of this replica"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_replica_that_computes_something_else_is_named(tmp_path, make, damage, suspect):
    report = after_two_pushes(tmp_path, make(1), damage)
    (alarm,) = report.alarms
    assert alarm.startswith("engine-1 ")
    assert re.search(suspect, alarm), alarm


@pytest.mark.parametrize("damage", [without_rope_scaling, norms_in_bfloat16])
def test_an_engine_alone_that_errs_is_suspected_of_its_numerics(tmp_path, damage):
    (alarm,) = after_two_pushes(tmp_path, dense(1), damage, engines=1).alarms
    assert "Suspect: numerics" in alarm


def test_an_engine_that_errs_far_from_the_beginning_alone_is_found_and_the_alarm_says_where(tmp_path):
    rows = [*ROWS, [7 * i % 500 + 3 for i in range(LONG)]]
    damage = without_positions_from_32_on
    report = after_two_pushes(tmp_path, dense(1), damage, engines=1, rows=rows, depths=(32, LONG))
    (alarm,) = report.alarms
    assert report.by_depth[32] < 1e-5 < 1e-3 < report.by_depth[LONG]
    assert f"in tokens 32 to {LONG} " in alarm and "Suspect: numerics of long texts (rope scaling" in alarm, alarm


def test_an_adapter_that_was_never_delivered_is_suspected_by_name(tmp_path):
    (alarm,) = after_two_pushes(tmp_path, dense(1), version_behind, engines=1, adapter=True).alarms
    assert "Suspect: adapter" in alarm
