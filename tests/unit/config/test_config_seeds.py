"""The YAML of the documents this project started from loads as it stands there."""

import os
import textwrap
from pathlib import Path

import pytest
import yaml

from roll_async.config.api import load, load_with_warnings
from roll_async.config.loading.build import to_plain
from roll_async.config.loading.devices import parse_devices
from roll_async.config.loading.names import ALGORITHM_FIELDS
from roll_async.config.schema import AgenticConfig, RLVRConfig
from roll_async.config.yaml.diagnostics import ConfigError

ROOT = Path(__file__).resolve().parents[3]
AGENTIC_EXAMPLE = """\
# Enable asynchronous training
async_generation_ratio: 1

# Other related configuration
rollout_batch_size: 1024
val_batch_size: 1024
sequence_length: 8192

# Training parameters
max_steps: 1024
save_steps: 10000
logging_steps: 1
eval_steps: 10

# PPO parameters
ppo_epochs: 1
adv_estimator: "grpo"
whiten_advantages: true

# Model configuration
pretrain: Qwen/Qwen2.5-0.5B-Instruct
reward_pretrain: Qwen/Qwen2.5-0.5B-Instruct

# Role configuration
actor_train:
  model_args:
    attn_implementation: fa2
    disable_gradient_checkpointing: false
    dtype: bf16
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 128
    warmup_steps: 10
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 1
      expert_model_parallel_size: 1
      use_distributed_optimizer: true
      recompute_granularity: full
  device_mapping: list(range(0,4))
  infer_batch_size: 2

actor_infer:
  model_args:
    disable_gradient_checkpointing: true
    dtype: bf16
  generating_args:
    max_new_tokens: 128
    top_p: 0.99
    top_k: 100
    num_beams: 1
    temperature: 0.99
    num_return_sequences: 1
  strategy_args:
    strategy_name: vllm
    strategy_config:
      gpu_memory_utilization: 0.8
      block_size: 16
      load_format: auto
  device_mapping: list(range(4,8))
"""
RLVR_EXAMPLE = """\
# Enable asynchronous training
async_generation_ratio: 1

# Other related configuration
rollout_batch_size: 64
prompt_length: 2048
response_length: 8192

# Training parameters
max_steps: 1000
save_steps: 100
logging_steps: 1

# RLVR specific parameters
is_num_return_sequences_expand: true
num_return_sequences_in_group: 8
ppo_epochs: 1
adv_estimator: "reinforce"

# Model configuration
pretrain: /data/cpfs_0/common/models/Qwen2.5-7B
reward_pretrain: /data/cpfs_0/common/models/Qwen2.5-7B

# Role configuration
actor_train:
  model_args:
    dtype: bf16
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 64
    warmup_steps: 1
  data_args:
    template: qwen2_5
    file_name:
      - data/math_deepmath_deal.jsonl
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 1
      sequence_parallel: true
      use_distributed_optimizer: true
  device_mapping: list(range(0,16))
  infer_batch_size: 2

actor_infer:
  model_args:
    dtype: fp16
  generating_args:
    max_new_tokens: ${response_length}
    top_p: 0.99
    top_k: 100
    num_beams: 1
    temperature: 0.99
    num_return_sequences: ${num_return_sequences_in_group}
  strategy_args:
    strategy_name: sglang
    strategy_config:
      mem_fraction_static: 0.85
      load_format: dummy
  device_mapping: list(range(16,24))
  infer_batch_size: 1
"""
ASYNC_TRAINING = """\
async_training:
  # Freshness control
  staleness_threshold: 3              # sample freshness threshold
  max_staleness_allowed: 5            # maximum staleness allowed for a sample

  # Queue management
  max_queue_size: 1000               # maximum size of the message queue
  min_batch_count: 1                 # minimum number of batches taken each time
  batch_timeout: 30.0                # timeout for taking a batch

  # Generation control
  generation_timeout: 30.0           # timeout of a single generation
  batch_generation_interval: 0.1     # interval between batch generations

  # Parameter synchronization
  max_sync_retries: 3                # maximum number of parameter synchronization retries
  sync_timeout: 30.0                 # synchronization timeout
  sync_retry_delay: 1.0              # retry delay
"""
RESOURCES = """\
trainer:
  n_gpus_per_node: 4                 # number of GPUs on each training node
  nnodes: 2                          # number of training nodes
  device: cuda

rollout:
  n_gpus_per_node: 2                 # number of GPUs on each rollout node
  nnodes: 1                          # number of rollout nodes
"""
DAPO = (
    """\
actor_rollout_ref:
  actor:
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
""",
    """\
data:
  gen_batch_size: 1536
  train_batch_size: 512
algorithm:
  filter_groups:
    enable: True
    metric: acc # score / seq_reward / seq_final_reward / ...
    max_num_gen_batches: 10 # a non-positive value means no limit
""",
    """\
actor_rollout_ref:
  actor:
    loss_agg_mode: "token-mean" # / "seq-mean-token-sum" / "seq-mean-token-mean"
    # Note: "token-mean" is the default behavior
""",
    """\
data:
  max_response_length: 20480 # 16384 + 4096
reward_model:
  overlong_buffer:
    enable: True
    len: 4096
    penalty_factor: 1.0
""",
)
WORKERS = """\
pretrain: Qwen/Qwen2.5-7B
actor_train:
  data_args: {file_name: data.jsonl}
  strategy_args: {strategy_name: megatron_train}
actor_infer:
  strategy_args: {strategy_name: vllm}
"""
DEVICES = """\
actor_train: {device_mapping: 0-7}
actor_infer: {device_mapping: 8-9}
"""


@pytest.fixture
def workers(files) -> None:
    files.text(WORKERS, "workers.yaml")
    files.text(DEVICES, "devices.yaml")


def test_the_agentic_example_loads_verbatim(files):
    config = load(files.text(AGENTIC_EXAMPLE))
    assert isinstance(config, AgenticConfig)
    assert config.async_generation_ratio == 1.0 and config.is_async
    assert (config.groups_per_batch, config.samples_per_batch, config.optimizer_steps_per_batch) == (128, 1024, 1)
    assert (config.num_servers, config.staleness_bound, config.actor_train.mini_batch_size) == (4, 1, 1024)
    assert config.actor_train.device_mapping == (0, 1, 2, 3)
    assert config.algorithm.whiten_advantages is True
    assert config.custom_envs["FrozenLake"].env_type == "frozen_lake"
    assert config.custom_envs["FrozenLake"].max_tokens_per_step == 128


def test_the_rlvr_example_loads_verbatim(files):
    loaded = load_with_warnings(files.text(RLVR_EXAMPLE))
    config = loaded.config
    assert isinstance(config, RLVRConfig)
    assert (config.sequence_length, config.actor_infer.generating_args.max_new_tokens) == (10240, 8192)
    assert config.actor_infer.generating_args.num_return_sequences == 8
    assert (config.data_parallel_size, config.mini_batch_size, config.optimizer_steps_per_batch) == (8, 512, 1)
    assert (config.num_servers, config.num_nodes, config.colocated) == (8, 3, False)
    assert config.actor_infer.strategy_args.strategy_config.context_length == 10240
    assert config.rewards["math_rule"].type == "math_rule"
    assert [d.id for d in loaded.warnings] == ["W03", "W04", "W12", "W12"]


def leaves(tree: dict, path: str = "") -> list[tuple[str, object]]:
    """Dotted path and value of every key that holds one."""
    found: list[tuple[str, object]] = []
    for key, value in tree.items():
        found += leaves(value, f"{path}{key}.") if isinstance(value, dict) else [(f"{path}{key}", value)]
    return found


@pytest.mark.parametrize("text", [AGENTIC_EXAMPLE, RLVR_EXAMPLE], ids=["agentic", "rlvr"])
def test_every_value_of_an_example_is_in_the_config_under_its_own_key(files, text):
    """No key is accepted and dropped, renamed or converted: the canonical tree has each as it was written."""
    shown = to_plain(load(files.text(text)))
    written = leaves(yaml.safe_load(text))
    assert len(written) in (42, 40)
    for path, value in written:
        section = shown["algorithm"] if path in ALGORITHM_FIELDS else shown
        for key in path.split("."):
            section = section[key]
        if path.endswith("device_mapping"):
            section, value = parse_devices(section)[0], parse_devices(value)[0]
        elif isinstance(value, str) and value.startswith("${"):
            value = shown[value[2:-1]]
        elif path.endswith("file_name"):
            section, value = [section] if isinstance(section, str) else section, list(value)
        assert section == (float(value) if isinstance(section, float) else value), path


def test_what_is_not_written_is_what_the_documents_call_the_default(files, workers):
    config = load(files.text("defaults: [workers]\nresponse_length: 64\n"))
    assert config.async_generation_ratio == 0 and not config.is_async
    assert config.algorithm.loss_agg_mode == "token-mean"


@pytest.mark.parametrize("prefix", [True, False])
def test_the_async_training_block_loads_verbatim(files, workers, prefix):
    """Ratio 2 with a push every second step admits 5 versions, the bound the document gives. Its keys are also read
    without their section, as the document's advice names them.
    """
    text = "defaults: [workers, devices]\nasync_generation_ratio: 2\nrollout_batch_size: 8\nresponse_length: 64\n"
    block = ASYNC_TRAINING if prefix else textwrap.dedent(ASYNC_TRAINING.partition("\n")[2])
    loaded = load_with_warnings(files.text(text + block), ["async_training.trigger_parameter_sync_step=2"])
    section = loaded.config.async_training
    assert (section.staleness.soft_versions, section.staleness.max_versions) == (3, 5)
    assert (section.max_queue_size, section.require_batches, section.batch_timeout) == (1000, 1, 30.0)
    assert (section.generation_timeout, section.batch_creation_interval) == (30.0, 0.1)
    assert (section.max_sync_retries, section.sync_timeout, section.sync_retry_delay) == (3, 30.0, 1.0)
    assert {d.id for d in loaded.warnings} == {"W01", "W12"}


def test_keys_of_ones_own_stand_over_the_shipped_config(files):
    base = os.path.relpath(ROOT / "configs" / "fully_async_cpu", files.folder)
    own = "async_training:\n  staleness_threshold: 5\n  max_queue_size: 2000\n  generation_timeout: 60.0\n"
    section = load(files.text(f"defaults: [{base}]\n{own}")).async_training
    assert (section.staleness.soft_versions, section.max_queue_size, section.generation_timeout) == (5, 2000, 60.0)
    assert section.require_batches == 1, "what is not written stays"


def test_the_resource_block_becomes_devices_trainer_first(files, workers):
    config = load(
        files.text("defaults: [workers]\nrollout_batch_size: 8\nresponse_length: 64\n" + RESOURCES),
        ["num_gpus_per_node=4"],
    )
    assert config.actor_train.device_mapping == tuple(range(8))
    assert config.actor_infer.device_mapping == (8, 9)
    assert config.num_nodes == 3


def test_the_dapo_keys_load_together(files, workers):
    for number, block in enumerate(DAPO):
        files.text(block, f"dapo{number}.yaml")
    names = ", ".join(f"dapo{number}" for number in range(len(DAPO)))
    text = f"defaults: [workers, devices, {names}]\nadv_estimator: grpo\n"
    config = load(files.text(text), ["actor_rollout_ref.rollout.n=16", "data.max_prompt_length=2048"])
    assert isinstance(config, RLVRConfig)
    options = config.algorithm.pg_options
    assert (options.clip_low, options.clip_high) == (0.2, 0.28)
    filtering = config.algorithm.filter_groups
    assert (filtering.enable, filtering.metric, filtering.max_num_gen_batches, filtering.gen_batch_size) == (
        True,
        "acc",
        10,
        1536,
    )
    assert config.rollout_batch_size == 512
    assert config.algorithm.loss_agg_mode == "token-mean"
    assert (config.prompt_length, config.response_length, config.samples_per_group) == (2048, 20480, 16)
    assert config.algorithm.overlong_buffer.enable and config.algorithm.overlong_buffer.len == 4096


@pytest.mark.parametrize("metric", ["score", "acc", "seq_reward", "seq_final_reward", "format"])
def test_any_number_a_reward_reports_can_filter(files, workers, metric):
    text = f"defaults: [workers]\nresponse_length: 9\nalgorithm: {{filter_groups: {{metric: {metric}}}}}\n"
    assert load(files.text(text)).algorithm.filter_groups.metric == metric


def test_the_keys_of_async_dapo_load(files, workers):
    keys = "n_resp_per_prompt: 16\nbatch_creation_interval: 10\nmax_concurrent_per_server: 512\n"
    config = load(files.text("defaults: [workers]\nresponse_length: 64\n" + keys))
    assert config.samples_per_group == 16
    assert (config.async_training.batch_creation_interval, config.async_training.max_concurrent_per_server) == (
        10.0,
        512,
    )


MODES = [
    ("synchronous", 0, 1, "resume", 0),
    ("one step off", 1, 1, "wait", 1),
    ("ahead by a ratio", 2.5, 1, "resume", 3),
    ("stream off-policy", 0, 3, "wait", 2),
    ("fully async, stale samples", 0.5, 4, "wait", 5),
    ("fully async, partial rollout", 0.5, 4, "keep", 5),
]


@pytest.mark.parametrize(("name", "ratio", "k", "interrupt", "bound"), MODES, ids=[m[0] for m in MODES])
def test_every_mode_is_a_set_of_keys(files, workers, name, ratio, k, interrupt, bound):
    text = (
        f"defaults: [workers, devices]\nresponse_length: 64\nasync_generation_ratio: {ratio}\n"
        f"async_training: {{trigger_parameter_sync_step: {k}, require_batches: 1, interrupt: {{mode: {interrupt}}}}}\n"
    )
    config = load(files.text(text))
    assert config.staleness_bound == config.async_training.staleness.max_versions == bound
    assert config.is_async == (ratio > 0)


def test_threshold_alarms_are_set_on_the_key_metrics_by_the_keys_under_which_they_are_published(files, workers):
    text = "defaults: [workers, devices]\nrollout_batch_size: 8\nresponse_length: 64\n"
    limits = "{fully_async/stale_samples_ratio: 0.5, fully_async/sync_failures: 0}"
    wanted = {"fully_async/stale_samples_ratio": 0.5, "fully_async/sync_failures": 0.0}
    assert load(files.text(text + f"tracking: {{alarms: {limits}}}\n")).tracking.alarms == wanted
    assert load(files.text(text), [f"tracking.alarms={limits}"]).tracking.alarms == wanted
    with pytest.raises(ConfigError, match="C003.*tracking.alarms.idle/trainer: expected float"):
        load(files.text(text + "tracking: {alarms: {idle/trainer: high}}\n"))
