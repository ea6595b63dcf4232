"""One real Megatron rank on gloo: Hugging Face weights in and out, splits that change nothing, exact resume."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")


from roll_async.algorithms.correction import CorrectionOptions, correct
from roll_async.algorithms.objective import LossSettings
from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.commands.certify.rank_side import WholeBatchWorker
from roll_async.config.api import load
from roll_async.config.options.policy_loss_options import PpoOptions
from roll_async.trainer.megatron.model.model_flops import model_flops
from roll_async.trainer.megatron.ranks import RankSpec
from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings
from roll_async.trainer.megatron.shares import BatchSplitter
from roll_async.trainer.megatron.worker import MOST_SKIPPED
from roll_async.trainer.protocol import PolicyRows, TokenRows
from tests.rounding import Bounds, assert_near

ROWS, WIDTH = 12, 30
BOUNDS = Bounds(layers=2, hidden=64, inner=96, length=WIDTH, rows=ROWS)
SYNC = Path(__file__).resolve().parents[2] / "configs" / "rlvr_config_sync_cpu.yaml"


def model_folder(folder, *, tied: bool, kind: str = "Qwen2") -> str:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied, initializer_range=0.2, pad_token_id=None,
        max_position_embeddings=128, dtype="float32",
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def start():
    """Start workers one after another; the process group of each is taken down before the next."""
    from roll_async.trainer.megatron import ranks

    def make(folder: str, **settings) -> WholeBatchWorker:
        stop()
        defaults = {
            "dtype": "fp32",
            "optimizer": OptimizerSettings(learning_rate=1e-2, epsilon=1e-6),  # see megatron_cases.settings_of
            "loss": LossSettings(pg_variant="ppo", pg_options=PpoOptions()),
            "micro_batch_rows": 4,
            "mini_batch_rows": ROWS,
        }
        worker = WholeBatchWorker(
            RankSpec.alone(),
            MegatronSettings(model_folder=folder, **{**defaults, **settings}),
        )
        worker.start()
        return worker

    def stop() -> None:
        if torch.distributed.is_initialized():
            ranks.leave()

    yield make
    stop()


def batch() -> tuple[TokenRows, PolicyRows]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, WIDTH + 1, (ROWS,), generator=generator)
    tokens = torch.randint(1, 64, (ROWS, WIDTH), generator=generator)
    positions = torch.arange(WIDTH)[None]
    mask = (positions < lengths[:, None]) & (positions >= 4)
    rows = TokenRows(tokens=tokens, lengths=lengths, mask=mask)
    noise = torch.randn(ROWS, WIDTH, generator=generator)
    policy = PolicyRows(
        tokens=tokens, lengths=lengths, mask=mask,
        advantages=torch.randn(ROWS, 1, generator=generator).expand(-1, WIDTH).contiguous(),
        behaviour_logprobs=-3 + 0.1 * noise, proximal_logprobs=-3 + 0.05 * noise, correction_weights=None,
        scores=torch.ones(ROWS), version_lag=torch.ones(ROWS, WIDTH, dtype=torch.int64),
    )  # fmt: skip
    return rows, policy


def assert_same_step(found, expected, before):
    """Two of (metrics, log-probs after the step), and the log-probs before it."""
    (metrics, after), (wanted, reference) = found, expected
    assert_near(metrics["trainer/loss"], wanted["trainer/loss"], BOUNDS.step, of=wanted["policy/ratio"])
    assert_near(metrics["trainer/grad_norm"], wanted["trainer/grad_norm"], BOUNDS.step)
    assert_near(after, reference, BOUNDS.moved, of=float((reference - before).abs().max()))


def plain_logprobs(folder: str, rows: TokenRows) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(rows.tokens).logits, -1)
    taken = logprobs[:, :-1].gather(-1, rows.tokens[:, 1:, None])[..., 0]
    return torch.where(rows.mask, torch.nn.functional.pad(taken, (1, 0)), 0)


@pytest.mark.parametrize(
    ("kind", "tied"), [("Qwen2", True), ("Qwen2", False), ("Qwen3", True), ("Llama", False), ("Mistral", False)]
)
def test_logprobs_equal_transformers_before_training_and_after_export(start, tmp_path, kind, tied):
    folder = model_folder(tmp_path / "in", tied=tied, kind=kind)
    worker = start(folder)
    rows, policy = batch()
    assert_near(worker.compute_logprobs(rows), plain_logprobs(folder, rows), BOUNDS.forward)
    worker.update_policy(policy, 1)
    worker.export_hf(str(tmp_path / "out"))
    trained = worker.compute_logprobs(rows)
    assert_near(trained, plain_logprobs(str(tmp_path / "out"), rows), BOUNDS.forward)
    assert (trained - plain_logprobs(folder, rows)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "split",
    [{"micro_batch_rows": 1}, {"micro_batch_rows": 12}, {"micro_batching": "dynamic", "max_tokens_per_microbatch": 96}],
)
def test_the_split_into_micro_batches_does_not_change_a_step(start, tmp_path, split):
    folder = model_folder(tmp_path / "in", tied=True)
    rows, policy = batch()
    results = []
    for settings in ({}, split):
        worker = start(folder, **settings)
        metrics = worker.update_policy(policy, 1)
        results.append((metrics, worker.compute_logprobs(rows)))
    (first, before), (second, after) = results
    assert_same_step((second, after), (first, before), plain_logprobs(folder, rows))
    assert first["policy/clip_high"] == pytest.approx(second["policy/clip_high"])


def test_a_step_tells_its_work_and_the_memory_it_took(start, tmp_path):
    folder = model_folder(tmp_path / "in", tied=True)
    worker, (_, policy) = start(folder), batch()
    began = time.perf_counter()
    worker.update_policy(policy, 1)
    seconds, metrics = time.perf_counter() - began, worker.measured
    config = HfConfig(json.loads((Path(folder) / "config.json").read_text()), "config.json")
    flops = model_flops(config, MegatronSettings(model_folder=""))
    lengths = policy.lengths.tolist()
    assert metrics["trainer/tflops_per_device"] * 1e12 * seconds >= flops.step(lengths)
    assert metrics["trainer/tokens_per_device_s"] * seconds >= sum(lengths)
    work_per_token = metrics["trainer/tflops_per_device"] * 1e12 / metrics["trainer/tokens_per_device_s"]
    assert work_per_token == pytest.approx(flops.step(lengths) / sum(lengths))
    assert metrics["memory/trainer_peak_bytes"] > 1e8 and "trainer/mfu" not in metrics


@pytest.mark.parametrize(("dtype", "band_low"), [("fp32", None), ("fp32", 0.6), ("bf16", None)])
def test_the_own_forward_as_proximal_policy_gives_the_same_weights_bit_for_bit(start, tmp_path, dtype, band_low):
    """Against log-probs scored before each step, with the same micro-batches: five steps of stale, corrected data."""
    folder = model_folder(tmp_path / "in", tied=True)
    options = CorrectionOptions(weight_level="token", weight_upper=1.5, band_low=band_low)
    rows, policy = batch()
    policy = dataclasses.replace(policy, proximal_logprobs=None)
    results = {}
    for mode in ("recompute", "reuse"):
        loss = LossSettings(pg_variant="ppo", pg_options=PpoOptions(), correction=options)
        worker = start(folder, dtype=dtype, loss=loss, scoring_rows=4)
        steps, behaviour = [], worker.compute_logprobs(rows)
        for step in range(1, 6):
            stale = dataclasses.replace(policy, behaviour_logprobs=behaviour)
            if mode == "recompute":
                proximal = worker.compute_logprobs(rows)
                weights = correct(
                    train_logprobs_BT=proximal, rollout_logprobs_BT=behaviour, mask_BT=rows.mask, options=options
                ).weights.float()
                stale = dataclasses.replace(stale, proximal_logprobs=proximal, correction_weights=weights)
            steps.append(worker.update_policy(stale, step))
        results[mode] = steps, {name: x.clone() for name, x in worker.export_named_tensors()}
    (before, expected), (after, found) = results["recompute"], results["reuse"]
    for one, other in zip(before, after, strict=True):
        assert {key: other[key] for key in one} == one
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert after[-1]["correction/kept_fraction"] < 1 or band_low is None, "rejection has something to do"
    assert after[0]["correction/kl"] == 0 != after[-1]["correction/kl"]


def test_rows_without_advantage_are_left_out_and_the_step_stays_the_same(start, tmp_path):
    folder = model_folder(tmp_path / "in", tied=True)
    rows, policy = batch()
    zero_gradient = torch.tensor([1, 4, 5, 6, 9])
    results = []
    for nothing in (0.0, 1e-35):  # the second is no zero, so it is computed, and drowns in rounding
        advantages = policy.advantages.index_fill(0, zero_gradient, nothing)
        worker = start(folder)
        metrics = worker.update_policy(dataclasses.replace(policy, advantages=advantages), 1)
        results.append((metrics, worker.compute_logprobs(rows)))
    (left_out, after), (computed, reference) = results
    assert left_out["trainer/zero_gradient_rows_share"] == pytest.approx(5 / 12)
    assert computed["trainer/zero_gradient_rows_share"] == 0
    assert_same_step((left_out, after), (computed, reference), plain_logprobs(folder, rows))


@pytest.mark.parametrize(
    "split",
    [{}, *({"micro_batching": mode, "max_tokens_per_microbatch": 96} for mode in ("dynamic", "packed"))],
    ids=["fixed", "dynamic", "packed"],
)
def test_copies_are_computed_once_and_the_step_is_that_of_all_rows(start, tmp_path, monkeypatch, split):
    """Rows of a group, as in a run: of twelve answers to three prompts five are copies, with other advantages."""
    folder = model_folder(tmp_path / "in", tied=True)
    rows, policy = batch()
    taken = torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 6, 6])
    rows = TokenRows(tokens=rows.tokens[taken], lengths=rows.lengths[taken], mask=rows.mask[taken])
    policy = dataclasses.replace(policy, tokens=rows.tokens, lengths=rows.lengths, mask=rows.mask)
    results = []
    for each_by_itself in (False, True):
        if each_by_itself:
            monkeypatch.setattr(BatchSplitter, "_sequences", lambda self, step, rows: [[row] for row in rows])
        worker = start(folder, **split)
        scored = worker.compute_logprobs(rows)
        metrics = worker.update_policy(policy, 1)
        results.append((metrics, worker.measured, scored, worker.compute_logprobs(rows)))
    (once, used, scored, after), (each, used_by_each, expected, reference) = results
    assert once["trainer/copied_rows_share"] == pytest.approx(5 / 12) and each["trainer/copied_rows_share"] == 0
    assert_near(scored, expected, BOUNDS.forward)
    assert_same_step((once, after), (each, reference), expected)
    assert (after - scored).abs().max() > 1e-2
    for key in each.keys() - {"trainer/copied_rows_share"}:
        assert_near(once[key], each[key], BOUNDS.moved, of=max(abs(each[key]), each["policy/ratio"]))
    config = HfConfig(json.loads((Path(folder) / "config.json").read_text()), "config.json")
    flops = model_flops(config, MegatronSettings(model_folder=""))
    for measured, fed in ((used, rows.lengths[[0, 3, 4, 6, 7, 8, 9]].tolist()), (used_by_each, rows.lengths.tolist())):
        work_per_token = measured["trainer/tflops_per_device"] * 1e12 / measured["trainer/tokens_per_device_s"]
        assert work_per_token == pytest.approx(flops.step(fed) / sum(fed))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_whose_gradient_is_no_number_leaves_the_weights_and_many_of_them_end_the_run(
    start, tmp_path, dtype, caplog
):
    worker = start(model_folder(tmp_path / "in", tied=True), dtype=dtype)
    _, policy = batch()
    worker.update_policy(policy, 1)
    before = {name: tensor.clone() for name, tensor in worker.export_named_tensors()}
    poisoned = dataclasses.replace(policy, advantages=torch.where(policy.mask, torch.nan, policy.advantages))
    metrics = worker.update_policy(poisoned, 2)
    assert metrics["trainer/skipped_steps"] == 1 and "a gradient is no number" in caplog.text
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.export_named_tensors())
    assert worker.update_policy(policy, 3)["trainer/skipped_steps"] == 0
    assert not all(torch.equal(tensor, before[name]) for name, tensor in worker.export_named_tensors())
    for step in range(MOST_SKIPPED - 1):
        worker.update_policy(poisoned, 4 + step)
    with pytest.raises(FloatingPointError, match=f"{MOST_SKIPPED} optimizer steps in a row were skipped"):
        worker.update_policy(poisoned, 20)


def test_a_step_without_a_token_to_train_is_none_not_even_by_the_momentum_of_others(start, tmp_path):
    worker = start(model_folder(tmp_path / "in", tied=True))
    _, policy = batch()
    worker.update_policy(policy, 1)
    before = {name: tensor.clone() for name, tensor in worker.export_named_tensors()}
    nothing = dataclasses.replace(policy, mask=torch.zeros_like(policy.mask))
    for step in range(2, 3 + MOST_SKIPPED):
        assert worker.update_policy(nothing, step)["trainer/skipped_steps"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.export_named_tensors())


def test_a_batch_without_any_advantage_takes_its_step(start, tmp_path):
    rows, policy = batch()
    worker = start(model_folder(tmp_path / "in", tied=True))
    before = worker.compute_logprobs(rows)
    metrics = worker.update_policy(dataclasses.replace(policy, advantages=torch.zeros_like(policy.advantages)), 1)
    assert metrics["trainer/grad_norm"] == 0 and metrics["trainer/zero_gradient_rows_share"] == pytest.approx(11 / 12)
    assert torch.equal(worker.compute_logprobs(rows), before)


@pytest.mark.parametrize("micro_batch_rows", [2, 12])
def test_each_part_of_the_loss_is_measured_over_its_own_tokens(start, tmp_path, micro_batch_rows):
    """Rows 0 to 5 have advantages, 6 to 8 are supervised, 9 to 11 distilled; of the last two nothing is silent."""
    folder = model_folder(tmp_path / "in", tied=True)
    rows, policy = batch()
    loss = LossSettings(pg_variant="ppo", pg_options=PpoOptions(), kl_coef=0.5, kl_estimator="k2",
                        cross_entropy_coef=2.0)  # fmt: skip
    worker = start(folder, loss=loss, micro_batch_rows=micro_batch_rows)
    logprobs = worker.compute_logprobs(rows)
    row = torch.arange(ROWS)[:, None]
    supervised, distilled = rows.mask & (row >= 6) & (row < 9), rows.mask & (row >= 9)
    parts = {"policy_mask": rows.mask & (row < 6), "cross_entropy_mask": supervised, "reference_kl_mask": distilled}
    mixed = dataclasses.replace(policy, ref_logprobs=logprobs - 0.2, advantages=policy.advantages * (row < 6), **parts)
    metrics = worker.update_policy(mixed, 1)
    shown = -float(logprobs[supervised].mean())
    assert_near(metrics["cross_entropy/loss"], shown, BOUNDS.step)
    assert_near(metrics["reference_kl/loss"], 0.02, 2 * 10 * BOUNDS.forward / 0.2)  # squares of differences of 0.2
    assert -float(worker.compute_logprobs(rows)[supervised].mean()) < shown, "what is shown becomes more likely"
    alone = start(folder, micro_batch_rows=micro_batch_rows)
    only = alone.update_policy(dataclasses.replace(mixed, mask=parts["policy_mask"], cross_entropy_mask=None), 1)
    assert_near(metrics["trainer/loss"], only["trainer/loss"] + 2.0 * shown + 0.5 * 0.02, BOUNDS.step, of=2.0 * shown)
    assert_near(metrics["policy/ratio"], only["policy/ratio"], BOUNDS.step)


@pytest.mark.parametrize("split", [{}, {"micro_batching": "packed", "max_tokens_per_microbatch": 96}])
def test_a_step_tells_the_entropy_of_each_trained_token_of_the_rows_that_are_kept(start, tmp_path, split):
    """By the weights before it, with two epochs, too; of rows without a gradient, which no rank computes, nothing."""
    folder = model_folder(tmp_path / "in", tied=True)
    rows, policy = batch()
    kept, row = torch.arange(ROWS) < 5, torch.arange(ROWS)[:, None]
    asked = dataclasses.replace(policy, kept=kept, advantages=policy.advantages * (row != 3))
    worker = start(folder, loss=LossSettings(pg_variant="ppo", pg_options=PpoOptions(), ppo_epochs=2), **split)
    plain = worker.update_policy(dataclasses.replace(asked, kept=None), 1)
    assert worker.entropies is None
    worker = start(folder, loss=LossSettings(pg_variant="ppo", pg_options=PpoOptions(), ppo_epochs=2), **split)
    assert worker.update_policy(asked, 1) == plain, "nothing else becomes different"
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(rows.tokens).logits
    log_p = torch.log_softmax(logits, -1)
    wanted = torch.nn.functional.pad(-(log_p.exp() * log_p).sum(-1)[:, :-1], (1, 0))
    told = rows.mask & (row < 5) & (row != 3)
    assert torch.equal(~worker.entropies.isnan(), told)
    assert_near(worker.entropies[told], wanted[told], 10 * BOUNDS.forward, of=1.0)  # powers of logits up to 10


def test_squares_are_the_sum_of_all_squared_probabilities(start, tmp_path):
    folder = model_folder(tmp_path / "in", tied=True)
    rows, _ = batch()
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(rows.tokens).logits
    wanted = torch.nn.functional.pad(torch.softmax(logits, -1).square().sum(-1)[:, :-1], (1, 0))
    found = start(folder).compute_squares(rows)
    assert_near(found, torch.where(rows.mask, wanted, 0), 10 * BOUNDS.forward, of=1.0)  # powers of logits up to 10


def test_three_steps_save_load_three_steps_equal_six_steps_bit_for_bit(start, tmp_path):
    folder = model_folder(tmp_path / "in", tied=True)
    _, policy = batch()
    worker = start(
        folder, optimizer=OptimizerSettings(learning_rate=1e-3, schedule="cosine", warmup_steps=2, total_steps=6)
    )
    for step in range(1, 4):
        worker.update_policy(policy, step)
    worker.save(str(tmp_path / "step_3"), 3, b"state of the loop")
    straight = [worker.update_policy(policy, step) for step in range(4, 7)]
    other = start(
        folder, optimizer=OptimizerSettings(learning_rate=1e-3, schedule="cosine", warmup_steps=2, total_steps=6)
    )
    assert other.load(str(tmp_path / "step_3")) == b"state of the loop"
    assert [other.update_policy(policy, step) for step in range(4, 7)] == straight


def test_a_step_that_was_skipped_is_none_of_adams_after_a_resume_either(start, tmp_path):
    folder, (_, policy) = model_folder(tmp_path / "in", tied=True), batch()
    worker = start(folder)
    worker.update_policy(policy, 1)
    worker.update_policy(dataclasses.replace(policy, mask=torch.zeros_like(policy.mask)), 2)
    worker.save(str(tmp_path / "step_2"), 2, b"")
    straight = [worker.update_policy(policy, step) for step in (3, 4)]
    other = start(folder)
    other.load(str(tmp_path / "step_2"))
    assert [other.update_policy(policy, step) for step in (3, 4)] == straight


def test_a_parameter_without_state_in_a_checkpoint_begins_as_it_is_with_steps_of_the_learning_rate():
    from roll_async.trainer.megatron.state.optimizer_state import ParameterState

    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    main = torch.zeros(2, requires_grad=True)
    adam = torch.optim.Adam([main], lr=0.1)
    ParameterState(parameter=parameter, main=main, optimizer=adam, start=0, group=None).restore({}, 2000)
    for expected in ([0.9, 1.9], [0.8, 1.8]):
        main.grad = torch.ones(2)
        adam.step()
        assert torch.allclose(main, torch.tensor(expected), atol=1e-3)


OPTIMIZER_KEYS = (
    "learning_rate=0.002", "lr_scheduler_type=linear", "lr_scheduler_type=cosine", "warmup_steps=2", "weight_decay=0.1",
    "adam_beta1=0.5", "adam_beta2=0.9", "adam_epsilon=0.001", "max_grad_norm=0.01", "ppo_epochs=2",
)  # fmt: skip


def test_every_key_of_the_optimizer_reaches_the_weights(start, tmp_path):
    """From the config to what a rank has learned after three steps: with any one of them cut, the weights are those of
    its default."""
    folder = model_folder(tmp_path / "in", tied=True)
    common = [f"pretrain={folder}", "max_steps=4", "ppo_epochs=1", "actor_train.model_args.dtype=fp32"]
    plain = ("learning_rate=0.001", "lr_scheduler_type=constant", "warmup_steps=0", "weight_decay=0", "adam_beta1=0.9",
             "adam_beta2=0.999", "adam_epsilon=1e-8", "max_grad_norm=1.0")  # fmt: skip

    def weights(*changes):
        keys = [key if key.startswith("ppo") else f"actor_train.training_args.{key}" for key in (*plain, *changes)]
        config = load(SYNC, [*common, *keys])
        settings = MegatronSettings.of(config, config.actor_train)
        worker = start(folder, **{f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)[1:]})
        for step in range(1, 4):
            worker.update_policy(batch()[1], step)
        return torch.cat([tensor.flatten() for _, tensor in worker.export_named_tensors()])

    untouched = weights()
    assert untouched.equal(weights()), "the steps repeat to the last bit"
    found = {key: (weights(key) - untouched).abs().max().item() for key in OPTIMIZER_KEYS}
    assert min(found.values()) > 1e-6, found


def test_torchs_adam_is_the_fused_one_and_steps_as_the_plain_one_does(start, tmp_path):
    from roll_async.trainer.megatron.state.optimizer_state import parts_of

    folder = model_folder(tmp_path / "in", tied=True)
    rows, _ = batch()

    def weights_after_three_steps(fused):
        worker = start(folder, optimizer=OptimizerSettings(learning_rate=1e-3, weight_decay=0.1, epsilon=1e-6))
        for part in parts_of(worker._optimizer):
            for group in part.optimizer.param_groups:
                assert group["fused"] is True
                group["fused"] = fused
        for _ in range(3):
            worker.supervised_update(rows.tokens, rows.lengths, rows.mask)
        return {name: tensor.clone() for name, tensor in worker.export_named_tensors()}

    fused, plain = (weights_after_three_steps(choice) for choice in (True, False))
    for name, tensor in fused.items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-4, atol=1e-5)


def test_bf16_keeps_fp32_main_parameters_and_learns(start, tmp_path):
    worker = start(
        model_folder(tmp_path / "in", tied=True), dtype="bf16", optimizer=OptimizerSettings(learning_rate=3e-3)
    )
    rows, _ = batch()
    losses = [worker.supervised_update(rows.tokens, rows.lengths, rows.mask) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.5
