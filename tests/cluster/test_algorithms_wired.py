"""Every policy loss, advantage estimator, source of log-probs, role and mix of domains: some steps on real parts."""

import json
import math
import os
import shutil
from itertools import cycle, islice
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("megatron.core")
pytest.importorskip("vllm")

from safetensors.torch import load_file, save_file

from roll_async.algorithms.advantages import ADVANTAGES
from roll_async.algorithms.policy_losses import POLICY_LOSSES
from roll_async.cluster.runtime import ray_runtime
from roll_async.config.api import load
from roll_async.prompts.tokenizer import load_tokenizer
from tests.echo_server import echo_server
from tests.patience import patient
from tools.sweep import Sweep

STEPS = 3
TWO_STEPS = "max_steps=2"
"""Enough for a wire: the second step trains what was sampled before the first."""
AGENTIC = {"agentic_reinforce", "step_reinforce", "gigpo"}
"""Estimators over the turns of an episode: the config refuses them outside agentic pipelines."""
SHIPPED = ["vanilla", "tis", "cispo", "topr", "kimi15"]
"""Losses with an off-policy config of their own."""
LOSSES = [name for name in POLICY_LOSSES if name not in SHIPPED]
ESTIMATORS = [name for name in ADVANTAGES if name not in AGENTIC | {"gae"}]
NUM_PAIRS = max(len(LOSSES), len(ESTIMATORS))
PAIRS = list(zip(*(islice(cycle(names), NUM_PAIRS) for names in (LOSSES, ESTIMATORS)), strict=True))
CRITIC = (
    "algorithm.adv_estimator=gae",
    "critic={world_size: 1, model_args: {dtype: fp32},"
    " training_args: {learning_rate: 1.0e-3, per_device_train_batch_size: 32},"
    " strategy_args: {strategy_name: megatron_train,"
    " strategy_config: {transformer_impl: local, use_distributed_optimizer: false}}}",
)
REFERENCE = "reference={model_args: {dtype: fp32}, strategy_args: {strategy_name: megatron_infer}}"
SUMS = "sums: {type: exact_match, tag_included: [sums]}"
THIRDS = "thirds: {type: spread_reward.two_or_three, tag_included: [thirds]}"
DISTINCT = "distinct: {type: spread_reward.checksum, tag_included: [distinct]}"
CODE = "code: {type: code_sandbox, tag_included: [code], timeout: 20, sandbox: {isolation: best_effort}}"
ROLES = (
    *CRITIC,
    REFERENCE,
    f"rewards={{addition: {{type: spread_reward.digit_parity, tag_included: [addition]}}, {SUMS}, {THIRDS}, {DISTINCT},"
    f" {CODE}}}",
)
NAMES = ("same", "flat", "far")
"""Teachers: the model that the run starts from, one that finds all tokens equally likely, and one behind an address."""
SMALL = (
    "rollout_batch_size=8",
    "response_length=40",
    "num_return_sequences_in_group=4",
    "actor_train.training_args.per_device_train_batch_size=32",
    "actor_train.training_args.gradient_accumulation_steps=1",
    f"max_steps={STEPS}",
    "eval_steps=0",
    "save_steps=0",
    "ledger.enable=false",
    "rewards={addition: {type: spread_reward.digit_parity, num_workers: 1}}",  # a barely trained model is never right
)

NO_TIES = "rewards={distinct: {type: spread_reward.checksum, tag_included: [addition, sums, thirds]}}"
"""With right or wrong alone one run of ten has no group of four with one best answer, and grpo_passk no gradient."""


@pytest.fixture(scope="module")
def teachers(demo_assets, tmp_path_factory):
    """The section `teachers`."""
    flat = tmp_path_factory.mktemp("teachers") / "flat"
    shutil.copytree(demo_assets / "model", flat)
    (weights,) = flat.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"].zero_()
    save_file(tensors, weights, {"format": "pt"})

    def ranks(model):
        args = f"{{dtype: fp32, model_name_or_path: {model}}}"
        return f"{{model_args: {args}, strategy_args: {{strategy_name: megatron_infer}}}}"

    with echo_server(load_tokenizer(str(demo_assets / "model")).decode) as server:
        far = f"{{address: {server.url}/v1, model: big}}"
        yield f"teachers={{same: {ranks(demo_assets / 'model')}, flat: {ranks(flat)}, far: {far}}}"


@pytest.fixture(scope="module")
def run(demo_assets, teachers, tmp_path_factory, request):
    output = tmp_path_factory.mktemp("wired")
    rows = [json.loads(line) for line in (demo_assets / "train.jsonl").read_text().splitlines()[:300]]
    tags = ("addition", "sums", "thirds")
    (output / "train.jsonl").write_text(
        "".join(json.dumps({**row, "tag": tags[i % 3], "teacher": NAMES[i % 3]}) + "\n" for i, row in enumerate(rows))
    )
    test = "def check(candidate):\n    assert candidate(1) == 1"
    program = {"tag": "code", "teacher": "same", "test": test, "entry_point": "same"}
    (output / "roles.jsonl").write_text(  # a role that any run needs is started first, and wants a row of its domain
        (output / "train.jsonl").read_text()
        + json.dumps({**program, "messages": rows[0]["messages"]})
        + "\n"
        + json.dumps({**rows[0], "tag": "distinct", "teacher": "same"})
        + "\n"
    )

    def config(name, overrides, file="rlvr_config_async_cpu"):
        places = (
            f"pretrain={demo_assets}/model",
            f"actor_train.data_args.file_name={output}/train.jsonl",
            f"validation.data_args.file_name={output}/train.jsonl",
            f"output_dir={output}",
            f"exp_name={name}",
        )
        return load(f"configs/{file}.yaml", (*places, *SMALL, *overrides), "rlvr")

    inherited = os.environ.get("PYTHONPATH")
    request.addfinalizer(lambda: os.environ.update(PYTHONPATH=inherited) if inherited else os.environ.pop("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), inherited)))
    of_roles = f"actor_train.data_args.file_name={output}/roles.jsonl"
    with (
        ray_runtime(num_processes=8, env={"HF_HUB_OFFLINE": "1"}) as runtime,
        Sweep(config("roles", (*ROLES, teachers, of_roles)), runtime) as sweep,
    ):

        def go(name, *overrides, file="rlvr_config_async_cpu"):
            wanted = config(name, overrides, file)
            metrics = sweep.run(wanted, timeout_s=patient(120))
            assert [m["step"] for m in metrics] == list(range(1, wanted.max_steps + 1))
            assert all(math.isfinite(v) for m in metrics for v in m.values())
            assert max(m["trainer/grad_norm"] for m in metrics) > 0, "no step moved the weights"
            return metrics

        yield go


def assert_trained_on_stale_samples(metrics):
    assert 1 <= metrics[-1]["staleness/max"] <= 2, "nothing was off-policy, or it was too old"
    assert metrics[-1]["correction/rho_min"] < 0.999, "old weights and new ones sampled alike"


@pytest.mark.parametrize(("variant", "estimator"), PAIRS)
def test_every_policy_loss_and_every_estimator_without_a_critic_train_on_stale_samples(run, variant, estimator):
    """Side by side, because a run costs seconds; the losses that are missing here have a config of their own below."""
    algorithm = (f"algorithm.pg_variant={variant}", f"algorithm.adv_estimator={estimator}")
    metrics = run(f"{variant}_{estimator}", *algorithm, NO_TIES, "async_generation_ratio=2", TWO_STEPS)
    assert_trained_on_stale_samples(metrics)
    assert any(m["advantages/std"] > 0 for m in metrics)


def test_a_loss_and_an_estimator_of_the_users_own_train_on_stale_samples(run):
    own = (
        "algorithm.pg_variant=own_algorithms.weighted",
        "algorithm.pg_options={ratio_base: behaviour, scale: 2.0}",
        "algorithm.adv_estimator=own_algorithms.lead",
    )
    metrics = run("own", *own, NO_TIES, "async_generation_ratio=2", TWO_STEPS)
    assert 1 <= metrics[-1]["staleness/max"] <= 2 and any(m["advantages/std"] > 0 for m in metrics)
    assert all(m["policy/taken"] == 1.0 and m["policy/ratio"] > 0 for m in metrics), "its metric, and those of all"


def test_gae_trains_actor_and_critic(run):
    metrics = run("gae", *CRITIC, TWO_STEPS)
    assert all(m["critic/grad_norm"] > 0 for m in metrics)


@pytest.mark.parametrize(
    ("proximal", "variant"),
    [
        ("recompute", "decoupled_ppo"),
        ("interpolate", "decoupled_ppo"),
        ("behaviour", "decoupled_ppo"),
        ("interpolate", "tis"),
    ],
)
def test_every_source_of_proximal_logprobs_trains(run, proximal, variant):
    """The other one, auto, is the default that every loss above trains with."""
    sources = (f"algorithm.pg_variant={variant}", f"algorithm.proximal_logprobs={proximal}")
    run(f"{proximal}_{variant}", *sources, "async_generation_ratio=2", TWO_STEPS)


@pytest.mark.parametrize("variant", SHIPPED)
def test_the_shipped_offpolicy_configs_run_two_batches_ahead(run, variant):
    metrics = run(f"offpolicy_{variant}", NO_TIES, TWO_STEPS, file=f"rlvr_offpolicy_{variant}_cpu")
    assert_trained_on_stale_samples(metrics)


def test_a_reference_model_of_its_own_anchors_the_actor(run):
    rate = "actor_train.training_args.learning_rate=0.003"
    first, *rest = run("reference", REFERENCE, rate, "algorithm.kl_loss_coef=0.01", "async_generation_ratio=0")
    assert abs(first["policy/reference_kl"]) < 1e-6, "the run starts at its reference"
    assert all(m["policy/reference_kl"] > 1e-7 for m in rest)


def test_every_row_is_distilled_from_the_teacher_that_its_column_names(run, teachers, demo_assets):
    metrics = run(
        "teachers",
        teachers,
        "algorithm.distill_coef=0.5",
        "async_generation_ratio=0",
        "actor_train.training_args.learning_rate=0.003",
    )
    vocabulary = json.loads((demo_assets / "model" / "config.json").read_text())["vocab_size"]
    assert sum(m["distill/same/token_share"] for m in metrics) > 0, "none of 24 prompts is its own"
    for m in metrics:
        assert sum(m[f"distill/{name}/token_share"] for name in NAMES) == pytest.approx(1)
        # The cross-entropy of a sampled token is at least 0, and what is flat has log(vocabulary) for each.
        assert 0 < m.get("distill/flat/kl", 1.0) < math.log(vocabulary)
        assert m["distill/outages"] == 0
    same = [m["distill/same/kl"] for m in metrics if "distill/same/kl" in m]
    assert "distill/same/kl" not in metrics[0] or abs(same[0]) < 1e-4, "the run starts at this teacher"
    assert any(m.get("distill/far/kl", 0) != 0 for m in metrics)


def test_supervised_and_distilled_rows_ride_in_the_batch(run):
    metrics = run(
        "parts",
        REFERENCE,
        "rewards={addition: {type: spread_reward.digit_parity, tag_included: [addition]},"
        " sums: {type: supervised, tag_included: [sums]}, thirds: {type: distilled, tag_included: [thirds]}}",
        "algorithm.kl_loss_coef=0.1",
        "async_generation_ratio=0",
        "actor_train.training_args.learning_rate=0.003",
    )
    losses = [m["cross_entropy/loss"] for m in metrics]
    assert losses[-1] < losses[0], "the answers that are shown become more likely"
    assert metrics[-1]["reference_kl/loss"] > 1e-7 and all("policy/reference_kl" not in m for m in metrics)
    assert all(m["trainer/grad_norm"] > 0 for m in metrics)


def test_a_reference_anchors_lora_adapters_and_the_engine_gets_them_merged(run):
    metrics = run(
        "lora",
        REFERENCE,
        "actor_train.model_args.lora_rank=4",
        "weight_sync.adapters=merged",  # the engines of all these runs are started without adapters
        "algorithm.kl_loss_coef=0.01",
        "async_generation_ratio=0",
        "actor_train.training_args.learning_rate=0.003",
    )
    first, *rest = metrics
    assert abs(first["policy/reference_kl"]) < 1e-6
    assert all(m["policy/reference_kl"] > 1e-7 for m in rest)
    # Synchronous: engine and trainer agree only if the engine got the weights with the adapters merged in.
    assert all(abs(m["correction/kl"]) < 1e-4 for m in metrics)


def test_the_shipped_dapo_config_uses_every_part_of_dapo(run):
    metrics = run(
        "dapo",
        "num_return_sequences_in_group=2",  # of two verdicts half the pairs are equal
        "actor_train.training_args.per_device_train_batch_size=4",
        "actor_train.training_args.learning_rate=0.003",
        "overlong_buffer.len=36",  # from the fourth token on: no run is without an answer of that length
        file="dapo_cpu",
    )
    assert all(m["trainer/optimizer_steps"] == 4 for m in metrics), "with one step the ratio is 1"
    assert max(m["policy/clip_high"] for m in metrics) > 0 and max(m["policy/clip_low"] for m in metrics) > 0
    assert min(m["reward/overlong_penalty"] for m in metrics) < 0 < max(m["reward/overlong_share"] for m in metrics)
    assert metrics[-1]["groups/filtered"] == metrics[-1]["groups/dropped_equal"] > 0


def test_rows_of_programs_are_judged_in_a_run_and_malformed_ones_are_refused_by_line(run, tmp_path, caplog):
    """HumanEval's, LiveCodeBench's and PRIME's columns beside the additions; the model writes no program."""
    check = "def check(candidate):\n    assert candidate(1, 2) == 3"
    verl = {"style": "rule", "ground_truth": json.dumps({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"})}
    live = {"public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}])}
    rows = [
        {"test": check, "entry_point": "add"},
        {**live, "metadata": json.dumps({"func_name": "add"})},
        {"reward_model": verl},
        {"test": check},
        live,
        {"reward_model": {**verl, "ground_truth": json.dumps({"inputs": ["1"], "outputs": [], "fn_name": "add"})}},
    ]
    file = tmp_path / "rows.jsonl"
    shared = {"tag": "code", "messages": [{"role": "user", "content": "1+2="}]}
    sums = [{"tag": "addition", "ground_truth": "3", "messages": [{"role": "user", "content": f"{n}+2="}]}
            for n in range(9)]  # fmt: skip
    file.write_text("".join(json.dumps({**shared, **row}) + "\n" for row in rows + sums))
    metrics = run(
        "code",
        f"rewards={{addition: {{type: spread_reward.digit_parity, tag_included: [addition]}}, {CODE}}}",
        f"actor_train.data_args.file_name={file}",
        "actor_train.data_args.domain_interleave_probs={addition: 0.5, code: 0.5}",
        "async_generation_ratio=0",
    )
    assert [m["reward/domains/code/share"] for m in metrics] == [0.5] * STEPS
    assert all(m["reward/domains/code/mean"] == 0 for m in metrics) and metrics[-1]["groups/failed"] == 0
    assert metrics[-1]["rollout/reward_errors"] == metrics[-1]["rollout/reward_outages"] == 0
    for line in (4, 5, 6):
        assert f"skipped {file}:{line}: " in caplog.text
    assert not any(f"{file}:{line}: " in caplog.text for line in (1, 2, 3, 7))


def test_overlong_shaping_and_the_group_filter_publish_what_they_did(run):
    metrics = run(
        "overlong",
        "algorithm.overlong_buffer={enable: true, len: 34, penalty_factor: 0.5}",  # from the seventh token on
        "algorithm.filter_groups={enable: true, metric: acc, max_num_gen_batches: 0}",
    )
    for m in metrics:
        assert 0 < m["reward/overlong_share"] <= 1 and -0.5 <= m["reward/overlong_penalty"] < 0
        assert m["reward/mean"] >= 0, "the raw score is published, without the penalty"
        assert m["groups/seen"] == m["groups/kept"] + m["groups/dropped_equal"] and m["groups/dropped_invalid"] == 0
    assert metrics[-1]["groups/kept"] >= 8 * len(metrics)


def test_two_domains_share_the_batch_as_asked_and_each_is_judged_by_its_own_reward(run):
    metrics = run(
        "mixed",
        f"rewards={{{SUMS}, {THIRDS}}}",
        "actor_train.data_args.domain_interleave_probs={sums: 0.25, thirds: 0.75}",
        "async_generation_ratio=0",  # a batch is the next eight prompts, in whatever order they end
        "eval_steps=3",
        "val_batch_size=12",
    )
    for m in metrics:
        assert (m["reward/domains/sums/share"], m["reward/domains/thirds/share"]) == (0.25, 0.75)
        sums, thirds = m["reward/domains/sums/mean"], m["reward/domains/thirds/mean"]
        assert 0 <= sums <= 1 and 2 < thirds < 3 and m["reward/metrics/thirds"] == pytest.approx(thirds - 2)
        assert m["reward/mean"] == pytest.approx(0.25 * sums + 0.75 * thirds)
    last = metrics[-1]
    assert last["validation/unscored"] == 0 and last["validation/samples"] == 12
    assert last["validation/domains/sums/samples"] + last["validation/domains/thirds/samples"] == 12
    assert last["validation/domains/thirds/reward"] >= 2 > 1 >= last["validation/domains/sums/reward"]
