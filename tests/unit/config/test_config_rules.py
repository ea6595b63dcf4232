"""Every cross-field rule and warning, with its exact message."""

# ruff: noqa: E501 - one case per line: messages are compared whole

import math

import pytest

from roll_async.config.api import ConfigError, load, load_with_warnings
from roll_async.config.prompt_templates import PLACEHOLDERS
from roll_async.config.schema import roles_in_turns, roles_on_same_devices
from roll_async.inference.settings import EngineSettings
from roll_async.pipelines.protocol import RunPlan

DEV = "device_mapping"
TRAIN = "actor_train.strategy_args.strategy_config"
INFER = "actor_infer.strategy_args.strategy_config"
SGLANG = {"strategy_name": "sglang", "strategy_config": {"context_length": 39}}
SERVED = {"address": "http://host:8000/v1", "model": "big"}
MEGATRON_INFER = {"strategy_args": {"strategy_name": "megatron_infer"}, "device_mapping": "range(8,12)"}
CRITIC = {"strategy_args": {"strategy_name": "megatron_train"}, "device_mapping": "range(8,12)"}
DATA = {"file_name": "held_out.jsonl"}
KNOWN = ", ".join(PLACEHOLDERS) + "; a literal brace is written twice"
REJECT = {"statistic": "k1", "aggregation": "token"}
IN_PARTS = {"rollout_batch_size": 16, "async_training.require_batches": 1}
"""Four mini-batches, each trained as a part of its own."""

RLVR_CASES = [
    ("C101", {"sequence_length": 50}, "sequence_length: 50 is not prompt_length 10 + response_length 30 = 40; drop one of the three"),
    ("C102", {"response_length": None}, "response_length: set response_length or sequence_length"),
    ("C102", {"response_length": None, "sequence_length": 10}, "response_length: set response_length or sequence_length"),
    ("C103", {"actor_infer.generating_args.max_new_tokens": 31}, "actor_infer.generating_args.max_new_tokens: 31 exceeds response_length 30"),
    ("C103", {"eval_steps": 1, "validation": {"data_args": DATA, "generating_args": {"max_new_tokens": 31}}}, "validation.generating_args.max_new_tokens: 31 exceeds response_length 30"),
    ("C104", {f"{INFER}.max_model_len": 39}, f"{INFER}.max_model_len: 39 is below sequence_length 40"),
    ("C104", {"actor_infer.strategy_args": SGLANG}, f"{INFER}.context_length: 39 is below sequence_length 40"),
    ("C105", {"overlong_buffer": {"enable": True, "len": 30}}, "algorithm.overlong_buffer.len: 30 must lie between 1 and response_length 30 - 1"),
    ("C105", {"overlong_buffer": {"enable": True}}, "algorithm.overlong_buffer.len: 0 must lie between 1 and response_length 30 - 1"),
    ("C106", {"actor_train.micro_batching": "packed", "actor_train.max_tokens_per_microbatch": 39}, "actor_train.max_tokens_per_microbatch: 39 cannot hold one sequence of sequence_length 40"),
    ("C106", {"actor_train.micro_batching": "dynamic"}, "actor_train.max_tokens_per_microbatch: null cannot hold one sequence of sequence_length 40"),
    ("C107", {"response_length": 31, f"{TRAIN}.tensor_model_parallel_size": 2, f"{TRAIN}.sequence_parallel": True}, "sequence_length: 41 is not divisible by 2 (actor_train: tensor parallel 2 with sequence_parallel); use 42"),
    ("C107", {"response_length": 32, f"{TRAIN}.context_parallel_size": 2}, "sequence_length: 42 is not divisible by 4 (actor_train: 2 * context parallel 2); use 44"),
    ("C110", {"actor_train.world_size": 3}, "actor_train.world_size: 3 contradicts 4 devices in device_mapping; drop world_size"),
    ("C111", {"async_generation_ratio": 1, "actor_infer.device_mapping": "range(2,6)"}, "actor_infer.device_mapping: devices [2, 3] are also in actor_train.device_mapping; async_generation_ratio=1 needs separate devices: move one, or set async_generation_ratio: 0"),
    ("C111", {"async_generation_ratio": 0.5, "reference": {**MEGATRON_INFER, DEV: [7]}, "kl_loss_coef": 0.1}, "actor_infer.device_mapping: devices [7] are also in reference.device_mapping; async_generation_ratio=0.5 needs separate devices: move one, or set async_generation_ratio: 0"),
    ("C112", {"actor_infer.device_mapping": "range(2,6)"}, "actor_infer.device_mapping: overlaps actor_train.device_mapping in part ([2, 3]); make them equal, nested or disjoint"),
    ("C113", {f"{TRAIN}.tensor_model_parallel_size": 3}, "actor_train.device_mapping: 4 ranks are not divisible by tensor 3 * pipeline 1 * context 1 = 3"),
    ("C114", {f"{TRAIN}.expert_model_parallel_size": 3}, "actor_train.device_mapping: 4 ranks are not divisible by expert tensor 1 * expert 3 * pipeline 1 = 3"),
    ("C115", {f"{INFER}.tensor_parallel_size": 3}, "actor_infer.device_mapping: 4 devices are not divisible by tensor 3 * pipeline 1 = 3"),
    ("C116", {f"{TRAIN}.virtual_pipeline_model_parallel_size": 2}, f"{TRAIN}.virtual_pipeline_model_parallel_size: 2 needs pipeline_model_parallel_size > 1"),
    ("C117", {"num_gpus_per_node": 2, f"{TRAIN}.tensor_model_parallel_size": 4}, f"{TRAIN}.tensor_model_parallel_size: 4 exceeds num_gpus_per_node 2"),
    ("C117", {"num_gpus_per_node": 2, f"{INFER}.tensor_parallel_size": 4}, f"{INFER}.tensor_parallel_size: 4 exceeds num_gpus_per_node 2"),
    ("C121", {"rollout_batch_size": 5}, "rollout_batch_size: 5 groups * 2 samples = 10 samples per step, not divisible by the mini-batch 8 = per_device_train_batch_size 1 * gradient_accumulation_steps 2 * data parallel 4; use 4"),
    ("C123", {"num_return_sequences_in_group": 1, "rollout_batch_size": 8}, "num_return_sequences_in_group: 1 is too small for adv_estimator grpo; at least 2 samples per group"),
    ("C123", {"num_return_sequences_in_group": 1, "rollout_batch_size": 8, "adv_estimator": "reinforce", "norm_std_type": "group", "filter_groups": {"enable": True}}, "num_return_sequences_in_group: 1 is too small for norm_std_type group, filter_groups; at least 2 samples per group"),
    ("C124", {"actor_infer.generating_args.num_return_sequences": 3}, "actor_infer.generating_args.num_return_sequences: 3 differs from num_return_sequences_in_group 2; drop it"),
    ("C126", {"rollout_batch_size": 16, "async_training.require_batches": 3}, "async_training.require_batches: 3 does not divide the 4 mini-batches of a step"),
    ("C126", {"num_return_sequences_in_group": 16, "async_training.require_batches": 4}, "async_training.require_batches: 4 needs whole groups in a mini-batch of 8 samples; 16 per group"),
    ("C128", {"actor_train.data_args.domain_interleave_probs": {"math_rule": 0.5}}, "actor_train.data_args.domain_interleave_probs: sum is 0.5, not 1"),
    ("C128", {"actor_train.data_args.domain_interleave_probs": {"other": 1}}, "actor_train.data_args.domain_interleave_probs: domain 'other' is not in rewards"),
    ("C129", {"filter_groups": {"gen_batch_size": 3}}, "algorithm.filter_groups.gen_batch_size: 3 is below the 4 groups of a batch"),
    ("C130", {"rewards": {"math_rule": {"tag_included": ["a"]}, "qa": {"tag_included": ["a"]}}}, "rewards: tag 'a' is in domains math_rule and qa"),
    ("C130", {"rewards": {"math_rule": {"tag_included": ["a"], "style_included": ["rule"]}, "qa": {"tag_included": ["a"], "style_included": ["rule", "model"]}}}, "rewards: tag 'a' is in domains math_rule and qa"),
    ("C130", {"rewards": {"math_rule": {"tag_included": ["a"]}, "qa": {}}}, "rewards: domain qa has no tag_included"),
    ("C131", {"async_training.trigger_parameter_sync_step": 4, "async_training.staleness": {"max_versions": 2}}, "async_training.staleness.max_versions: 2 is below 3, which trigger_parameter_sync_step=4 alone produces"),
    ("C132", {"async_generation_ratio": 2.5, "async_training.staleness": {"max_versions": 2}}, "async_training.staleness.max_versions: 2 is below the 3 versions that async_generation_ratio=2.5 admits; with policy wait lower async_generation_ratio or raise it"),
    ("C133", {"async_generation_ratio": 9}, "async_training.staleness.max_versions: 9 versions (async_generation_ratio=9, trigger_parameter_sync_step=1) is more than 8, where training is known to degrade; set async_training.staleness.allow_above_8: true to accept it"),
    ("C134", {"async_generation_ratio": 1, "actor_infer.generating_args.logprobs": False}, "actor_infer.generating_args.logprobs: false, but async_generation_ratio=1 needs behaviour log-probs; set it to true"),
    ("C134", {"pg_variant": "tis", "actor_infer.generating_args.logprobs": False}, "actor_infer.generating_args.logprobs: false, but ratio_base behaviour needs behaviour log-probs; set it to true"),
    ("C134", {"proximal_logprobs": "behaviour", "actor_infer.generating_args.logprobs": False}, "actor_infer.generating_args.logprobs: false, but proximal_logprobs behaviour needs behaviour log-probs; set it to true"),
    ("C134", {"actor_infer.generating_args.logprobs": False}, "actor_infer.generating_args.logprobs: false, but algorithm.correction needs behaviour log-probs; set it to true"),
    ("C135", {"async_training.max_queue_size": 3}, "async_training.max_queue_size: 3 cannot hold the 4 groups of one batch; the trainer would wait forever"),
    ("C136", {"actor_infer.strategy_args": {"strategy_name": "hf_infer"}, "async_generation_ratio": 1, "async_training.interrupt": {"mode": "keep"}}, "async_training.interrupt.mode: keep is not possible with hf_infer; use resume"),
    ("C137", {"async_generation_ratio": 1, "is_num_return_sequences_expand": False}, "is_num_return_sequences_expand: false cannot be resumed with async_training.interrupt.mode=resume; set it to true or use wait"),
    ("C005", {"template_time": "yesterday"}, 'template_time: "yesterday" is no date and time; write 2026-11-26T05:01:12 or null'),
    ("C141", {"adv_estimator": "gae"}, "critic: required by adv_estimator gae"),
    ("C142", {"kl_loss_coef": 0.1}, "reference: required by algorithm.kl_loss_coef=0.1"),
    ("C142", {"rewards": {"distilled": {}}}, "algorithm.kl_loss_coef: 0 leaves rewards.distilled (distilled) without a loss; use > 0"),
    ("C142", {"token_kl_coef": 1}, "reference: required by algorithm.token_kl_coef=1"),
    ("C142", {"distill_coef": 0.5}, "teacher: required by algorithm.distill_coef=0.5"),
    ("C156", {"distill_coef": 0.5, "teacher": MEGATRON_INFER, "teachers": {"maths": MEGATRON_INFER}}, "teacher: cannot be combined with teachers.maths; keep one"),
    ("C156", {"distill_coef": 0.5, "teachers": {"far": {**SERVED, "address": "host:8000"}}}, "teachers.far.address: 'host:8000' is no address; write http://HOST:PORT/v1"),
    ("C156", {"distill_coef": 0.5, "teachers": {"far": SERVED}, "actor_infer.generating_args": {"temperature": 0.7}}, "teachers.far.address: a server gives log-probs of the whole distribution; set actor_infer.generating_args.temperature: 1, or give a folder in place of the address"),
    ("C156", {"distill_coef": 0.5, "teachers": {"far": SERVED}, "actor_infer.generating_args": {"top_k": 5}}, "teachers.far.address: a server gives log-probs of the whole distribution; set actor_infer.generating_args.top_k: -1, or give a folder in place of the address"),
    ("C020", {"distill_coef": 0.5, "teachers": {"maths": {**MEGATRON_INFER, "router_replay": True}}}, "teachers.maths.router_replay: has no effect on role teacher; remove it"),
    ("C001", {"distill_coef": 0.5, "teachers": {"far": {**SERVED, "device_mapping": [1]}}}, "teachers.far.device_mapping: unknown key; did you mean 'actor_train.device_mapping'?"),
    ("C143", {"max_len_mask": True, "overlong_buffer": {"enable": True, "len": 4}}, "algorithm.max_len_mask: true cannot be combined with overlong_buffer.enable; keep one"),
    ("C144", {"adv_estimator": "gigpo"}, "algorithm.adv_estimator: gigpo is for agentic configs"),
    ("C144", {"algorithm": {"pg_options": {"ratio_level": "segment"}}}, "algorithm.pg_options.ratio_level: segment is for agentic configs"),
    ("C145", {"eval_steps": 5}, "validation: required by eval_steps=5"),
    ("C153", {"actor_infer.device_mapping": "range(0,4)", "eval_steps": 5, "validation": {"data_args": DATA, "mode": "share"}}, "validation.mode: share needs engines that run all the time, and actor_train shares their devices; use pause"),
    ("C153", {"actor_infer.device_mapping": "range(0,4)", "eval_steps": 5, "validation": {"data_args": DATA, "mode": "replicas"}}, "validation.mode: replicas needs engines that run all the time, and actor_train shares their devices; use pause"),
    ("C154", {"eval_steps": 5, "validation": {"data_args": DATA, "mode": "replicas", "num_replicas": 4}}, "validation.num_replicas: 4 leaves none of actor_infer's 4 replicas for training; use 3"),
    ("C103", {"eval_steps": 1, "validation": {"data_args": DATA, "sets": {"long": {"generating_args": {"max_new_tokens": 31}}}}}, "validation.sets.long.generating_args.max_new_tokens: 31 exceeds response_length 30"),
    ("C128", {"eval_steps": 1, "validation": {"data_args": DATA, "sets": {"more": {"data_args": {**DATA, "domain_interleave_probs": {"other": 1}}}}}}, "validation.sets.more.data_args.domain_interleave_probs: domain 'other' is not in rewards"),
    ("C155", {"eval_steps": 1, "validation": {"data_args": DATA, "sets": {"main": {"generating_args": {"num_return_sequences": 2}}}}}, "validation.sets.main: 'main' is the name of the main set in the results of roll-async eval; choose another name"),
    ("C146", {"pg_variant": "tis", "correction": {"weight_level": "token"}}, "algorithm.correction.weight_level: token would correct twice: tis with ratio_base behaviour already carries the behaviour policy; set it to none"),
    ("C146", {"pg_variant": "decoupled_ppo", "correction": {"weight_level": "sequence"}}, "algorithm.correction.weight_level: sequence would correct twice: decoupled_ppo with ratio_base proximal already carries the behaviour policy; set it to none"),
    ("C147", {"actor_train.micro_batching": "packed", "actor_train.max_tokens_per_microbatch": 40, "actor_train.router_replay": True}, "actor_train.micro_batching: packed cannot be combined with router_replay"),
    ("C148", {f"{TRAIN}.recompute_granularity": "full", "actor_train.model_args": {"disable_gradient_checkpointing": True}}, "actor_train.model_args.disable_gradient_checkpointing: true contradicts recompute_granularity=full"),
    ("C149", {"actor_infer.generating_args.temperature": 0}, "actor_infer.generating_args.temperature: 0 is greedy: every sample of a group would be equal; use > 0"),
    ("C150", {"correction": {"band_low": 3, "band_high": 2.5}}, "algorithm.correction: 3 exceeds 2.5"),
    ("C150", {"correction": {"weight_lower": 2.5}}, "algorithm.correction: 2.5 exceeds 2"),
    ("C150", {"pg_variant": "tis", "tis_lower_bound": 2}, "algorithm.pg_options: 2 exceeds 1"),
    ("C150", {"pg_variant": "clip_cov", "algorithm": {"pg_options": {"cov_low": 6}}}, "algorithm.pg_options: 6 exceeds 5"),
    ("C150", {"correction": {"rejections": [{**REJECT, "low": 2, "high": 1}]}}, "algorithm.correction.rejections.0: 2 exceeds 1"),
    ("C150", {"proximal_logprobs": "behaviour", "correction": {"weight_level": "token"}}, "algorithm.correction: all weights would be 1"),
    ("C152", {"proximal_logprobs": "reuse", "ppo_epochs": 2}, "algorithm.proximal_logprobs: reuse is not possible with 2 optimizer steps on the rows of a forward pass; use auto"),
    ("C152", {"proximal_logprobs": "reuse", "correction": {"normalise": "token"}}, "algorithm.proximal_logprobs: reuse is not possible with correction.normalise token, which needs them before the step; use auto"),
    ("C152", {"proximal_logprobs": "interpolate", "correction": {"normalise": "token"}}, "algorithm.proximal_logprobs: interpolate is not possible with correction.normalise token, which needs them before the step; use auto"),
    ("C151", {"async_training.generation_timeout": 1800}, "async_training.generation_timeout: 1800 is never reached: fault.stall_timeout ends the wait after 1800; use < 1800, or raise fault.stall_timeout"),
    ("C151", {"fault.stall_timeout": 60, "fault.env_timeout": 100}, "fault.env_timeout: 100 is never reached: fault.stall_timeout ends the wait after 60; use < 60, or raise fault.stall_timeout"),
    ("C151", {"async_training.interrupt.timeout": 400}, "async_training.interrupt.timeout: 400 is never reached: async_training.sync_timeout ends the wait after 300; use < 300, or raise async_training.sync_timeout"),
    ("C005", {"pg_variant": "clip_cov", "algorithm": {"pg_options": {"cov_low": 5}}}, "algorithm.pg_options.cov_low: 5 must be < cov_high 5"),
    ("C005", {"correction": {"rejections": [{"statistic": "k3", "aggregation": "token", "low": 1, "high": 2}]}}, "algorithm.correction.rejections.0.low: 1 must be null with statistic k3"),
    ("C006", {"correction": {"rejections": [REJECT]}}, "algorithm.correction.rejections.0.high: required and not set; a rule needs a bound"),
]  # fmt: skip
AGENTIC_CASES = [
    ("C156", {"distill_coef": 0.5, "teachers": {"far": SERVED, "B": MEGATRON_INFER}}, "teachers: none has the name of the tag FrozenLake; name one like each tag, or use a single"),
    ("C103", {"actor_infer.generating_args.max_new_tokens": 1024}, "actor_infer.generating_args.max_new_tokens: 1024 leaves no room in sequence_length 1024"),
    ("C121", {"rollout_batch_size": 24, "actor_train.training_args": {"gradient_accumulation_steps": 4}}, "rollout_batch_size: 3 groups * 8 samples = 24 samples per step, not divisible by the mini-batch 16 = per_device_train_batch_size 1 * gradient_accumulation_steps 4 * data parallel 4; use 32"),
    ("C121", {"custom_envs.FrozenLake": {"env_type": "frozen_lake", "manager": "step", "max_steps": 3}, "actor_train.training_args": {"gradient_accumulation_steps": 13}}, "rollout_batch_size: 2 groups * 8 trajectories of at most 3 turns = 48 samples per step at most, never as many as the mini-batch 52 = per_device_train_batch_size 1 * gradient_accumulation_steps 13 * data parallel 4; use 24"),
    ("C122", {"rollout_batch_size": 20}, "rollout_batch_size: 20 is not divisible by group_size 8"),
    ("C122", {"val_env_manager": {"group_size": 3}}, "val_batch_size: 16 is not divisible by group_size 3"),
    ("C123", {"train_env_manager": {"group_size": 1}}, "train_env_manager.group_size: 1 is too small for adv_estimator grpo; at least 2 samples per group"),
    ("C124", {"actor_infer.generating_args.num_return_sequences": 2}, "actor_infer.generating_args.num_return_sequences: 2 differs from the agentic value 1; drop it"),
    ("C125", {"train_env_manager": {"tags": ["Sokoban"]}}, "train_env_manager.tags.0: 'Sokoban' is not in custom_envs"),
    ("C153", {"async_generation_ratio": 0, "actor_infer.device_mapping": "range(0,4)", "val_env_manager": {"mode": "share"}}, "val_env_manager.mode: share needs engines that run all the time, and actor_train shares their devices; use pause"),
    ("C125", {"val_env_manager": {"generating_args": {"max_new_tokens": 65}}}, "val_env_manager.generating_args.max_new_tokens: 65 has no effect: max_tokens_per_step of a world limits its turns; remove it"),
    ("C154", {"val_env_manager": {"mode": "replicas", "num_replicas": 4}, "eval_steps": 1}, "val_env_manager.num_replicas: 4 leaves none of actor_infer's 4 replicas for training; use 3"),
    ("C125", {"val_env_manager": {"num_env_groups": 20}}, "val_batch_size: 16 is below the 20 trajectories of val_env_manager.num_groups_partition, of which some would never be measured; use 20"),
    ("C125", {"train_env_manager": {"num_groups_partition": [2, 0], "tags": ["FrozenLake", "B"]}, "custom_envs.B": {"env_type": "sokoban"}}, "train_env_manager.tags.1: 'B' gets none of the 2 groups; raise num_env_groups, or leave it out"),
    ("C125", {"val_env_manager": {"group_size_redundancy": 1}}, "val_env_manager.group_size_redundancy: 1 would leave out the slowest trajectories, and a validation counts them all; set it to 0"),
    ("C125", {"custom_envs.FrozenLake.history_length": 2}, "custom_envs.FrozenLake.history_length: 2 is for manager: step; with traj all turns are shown, set it to 0"),
    ("C125", {"custom_envs.B": {"env_type": "sokoban"}, **{f"{m}_env_manager": {"tags": ["FrozenLake"]} for m in ("train", "val")}}, "custom_envs.B: the tags of neither train_env_manager nor val_env_manager name it; name it, or set it to null"),
    ("C125", {"custom_envs.run": {"env_type": "sokoban"}}, "custom_envs.run: agent/run/ are the metrics of the whole run; choose another tag"),
    ("C125", {"custom_envs.FrozenLake.agent_template": "{observation} {turns}"}, f"custom_envs.FrozenLake.agent_template: unknown placeholder {{turns}}; known are: {KNOWN}"),
    ("C125", {"custom_envs.FrozenLake.agent_template": "{}"}, f"custom_envs.FrozenLake.agent_template: unknown placeholder {{}}; known are: {KNOWN}"),
    ("C125", {"custom_envs.FrozenLake.agent_template": "{observation"}, "custom_envs.FrozenLake.agent_template: cannot be filled: expected '}' before end of string; a literal brace is written twice"),
    ("C125", {"custom_envs.FrozenLake.agent_system_template": "\\boxed{answer}"}, f"custom_envs.FrozenLake.agent_system_template: unknown placeholder {{answer}}; known are: {KNOWN}"),
    ("C125", {"val_env_manager": {"num_groups_partition": [8, 8]}}, "val_env_manager.num_groups_partition: [8, 8] must have 1 entries with sum 16"),
]  # fmt: skip


def errors(path: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return [f"{d.id} {d.key}: {d.message}" for d in caught.value.diagnostics if d.is_error]


@pytest.mark.parametrize(("id", "edits", "message"), RLVR_CASES, ids=[c[0] for c in RLVR_CASES])
def test_an_rlvr_config_that_breaks_one_rule_gets_one_error(files, id, edits, message):
    assert errors(files.rlvr(edits)) == [f"{id} {message}"]


def test_a_key_of_a_served_teacher_that_is_misspelt_is_not_taken_for_one_of_ranks(files):
    first, second = errors(files.rlvr({"teachers": {"far": {"adress": "http://far:8000", "model": "m"}}}))
    assert first == "C001 teachers.far.adress: unknown key; did you mean 'teachers.far.address'?"
    assert second.startswith("C006 teachers.far.address: required")


@pytest.mark.parametrize(("id", "edits", "message"), AGENTIC_CASES, ids=[c[0] for c in AGENTIC_CASES])
def test_an_agentic_config_that_breaks_one_rule_gets_one_error(files, id, edits, message):
    assert errors(files.agentic(edits)) == [f"{id} {message}"]


def test_the_bases_of_these_tests_are_good(files):
    assert load_with_warnings(files.rlvr()).warnings == ()
    assert load_with_warnings(files.agentic()).warnings == ()


def test_worlds_may_be_validated_beside_training(files):
    config = load(files.agentic({"val_env_manager": {"mode": "share"}, "eval_steps": 5}))
    assert RunPlan.of(config, first_step=1).validation_mode == "share"
    assert RunPlan.of(load(files.agentic()), first_step=1).validation_mode == "pause"


def test_a_template_may_hold_braces_that_are_none_of_its_placeholders(files):
    templates = {"agent_system_template": '{"a": {"b": 1}} \\boxed{your answer here}', "agent_template": "{{x}}"}
    load(files.agentic({f"custom_envs.FrozenLake.{name}": text for name, text in templates.items()}))


def test_every_rule_of_the_contract_is_among_the_cases():
    numbers = [*range(101, 108), *range(110, 118), *range(121, 127), *range(128, 138), *range(141, 151)]
    covered = {case[0] for case in (*RLVR_CASES, *AGENTIC_CASES)}
    assert covered >= {f"C{n}" for n in numbers if n != 127}


def test_all_errors_of_the_phase_come_at_once_in_order(files):
    found = errors(files.rlvr({"response_length": None, "adv_estimator": "gae", "actor_train.world_size": 9}))
    assert [line.split()[0] for line in found] == ["C102", "C110", "C141"]


W = [
    ("W02", {"async_generation_ratio": 1, "correction": {"weight_level": "none"}}, "algorithm.correction.weight_level: the ratio is always 1: one optimizer step per batch, ratio_base proximal, proximal_logprobs auto and correction.weight_level none; staleness is not corrected"),
    ("W02", {**IN_PARTS, "async_generation_ratio": 1, "correction": {"weight_level": "none"}}, "algorithm.correction.weight_level: the ratio is always 1: one optimizer step per part of a batch (async_training.require_batches), ratio_base proximal, proximal_logprobs auto and correction.weight_level none; staleness is not corrected"),
    ("W03", {"actor_infer.model_args": {"dtype": "fp16"}}, "actor_infer.model_args.dtype: actor_infer dtype fp16 differs from actor_train dtype bf16: expect log-prob mismatch"),
    ("W04", {"actor_infer.generating_args.top_p": 0.9}, "actor_infer.generating_args.top_p: top_p=0.9, top_k=-1 sample from a truncated distribution; log-probs are renormalised over the kept tokens on both sides"),
    ("W05", {f"{TRAIN}.sequence_parallel": True}, f"{TRAIN}.sequence_parallel: sequence_parallel has no effect with tensor_model_parallel_size 1"),
    ("W06", {"reference": MEGATRON_INFER}, "reference: reference is configured but nothing uses it"),
    ("W06", {"critic": CRITIC}, "critic: critic is configured but nothing uses it"),
    ("W06", {"teacher": MEGATRON_INFER}, "teacher: teacher is configured but nothing uses it"),
    ("W06", {"teachers": {"far": SERVED}}, "teachers: teachers is configured but nothing uses it"),
    ("W06", {"validation": {"data_args": DATA}}, "validation: validation is configured but nothing uses it"),
    ("W07", {"async_generation_ratio": 2, "async_training.staleness": {"policy": "drop", "max_versions": 1}}, "async_training.staleness.policy: policy drop will discard work by design: max_versions 1 is below the 2 versions admitted"),
    ("W08", {"async_training.staleness": {"max_versions": 3}}, "async_training.staleness: no effect with async_generation_ratio 0 and trigger_parameter_sync_step 1"),
    ("W08", {"async_training.interrupt": {"mode": "wait"}}, "async_training.interrupt: no effect with async_generation_ratio 0 and trigger_parameter_sync_step 1"),
    ("W10", {"pg_variant": "kimi15"}, "algorithm.pg_options.ratio_base: the penalty of kimi15 is zero: with one optimizer step per batch the weights are those of ratio_base proximal; set it to behaviour, or take several optimizer steps"),
    ("W10", {**IN_PARTS, "pg_variant": "kimi15"}, "algorithm.pg_options.ratio_base: the penalty of kimi15 is zero: with one optimizer step per part of a batch (async_training.require_batches) the weights are those of ratio_base proximal; set it to behaviour, or take several optimizer steps"),
    ("W15", {"rollout_batch_size": 128, "actor_train.training_args": {"per_device_train_batch_size": 1}}, "actor_train.training_args.gradient_accumulation_steps: not set, so each batch is 64 optimizer steps of 4 samples; 64 makes it one"),
    ("W09", {"actor_infer.device_mapping": None}, "actor_infer.device_mapping: actor_infer runs on CPU (device_mapping is null) while actor_train uses devices"),
]  # fmt: skip


@pytest.mark.parametrize(("id", "edits", "message"), W, ids=[c[0] for c in W])
def test_an_odd_config_gets_one_warning_and_loads(files, id, edits, message):
    warnings = load_with_warnings(files.rlvr(edits)).warnings
    assert [f"{d.id} {d.key}: {d.message}" for d in warnings] == [f"{id} {message}"]


def test_resident_roles_share_devices_at_any_ratio_and_are_awake_restarted_and_validated_all_the_time(files):
    shared = {"actor_infer.device_mapping": "range(0,4)", "eval_steps": 5, "validation": {"data_args": DATA}}
    turns = load(files.rlvr(shared))
    assert (roles_in_turns(turns), turns.restarts_per_engine) == (("actor_train",), 0)
    assert EngineSettings.of(turns, replica=0, restart=0).sleep_level == 2
    shared |= {
        "colocation": "resident",
        "async_generation_ratio": 1,
        "validation": {"data_args": DATA, "mode": "share"},
    }
    config = load(files.rlvr(shared))
    assert (roles_in_turns(config), config.restarts_per_engine) == ((), config.fault.max_engine_restarts)
    assert EngineSettings.of(config, replica=0, restart=0).sleep_level == 0
    with pytest.raises(ConfigError, match="overlaps actor_train.device_mapping in part"):
        load(files.rlvr(shared | {"actor_infer.device_mapping": "range(2,6)"}))


def test_a_short_run_starts_without_cuda_graphs_unless_the_key_says_otherwise(files):
    def eager(**edits):
        return EngineSettings.of(load(files.rlvr(edits)), replica=0, restart=0).enforce_eager

    assert eager(max_steps=10) is True and eager(max_steps=11) is False and eager() is False
    written = {f"{INFER}.enforce_eager": False}
    assert eager(max_steps=2, **written) is False and eager(**{f"{INFER}.enforce_eager": True}) is True


def test_the_default_time_outs_stand_beside_any_end_of_the_run(files):
    """3600 s and 1800 s: silent engines are found by their silence. Other values have to be reachable (C151)."""
    generation, stall = "async_training.generation_timeout", "fault.stall_timeout"
    for edits in ({}, {stall: 60.0}, {generation: 3600.0}, {generation: 1799.0}, {generation: 4000.0, stall: 4001.0}):
        assert load_with_warnings(files.rlvr(edits)).warnings == ()


def test_keys_that_this_run_does_not_read_are_told_where_somebody_wrote_them(files):
    def told(edits):
        found = load_with_warnings(files.rlvr(edits)).warnings
        return {d.key: d.message for d in found if d.id == "W12"}

    size, queue = "actor_infer.infer_batch_size", "async_training.max_queue_size"
    assert told({}) == {}
    assert told({"reward_pretrain": "other"}) == {
        "reward_pretrain": "no effect: it is the critic's model, and there is no critic"
    }
    resident, asleep = {"colocation": "resident"}, "actor_infer.strategy_args.strategy_config.extra"
    assert told(resident) == {"colocation": "no effect: no role shares a device with actor_infer"}
    resident |= {"actor_infer.device_mapping": "range(0,4)", asleep: {"enable_sleep_mode": True}}
    assert told(resident) == {f"{asleep}.enable_sleep_mode": "no effect: engines never sleep with colocation: resident"}
    shown, kept = "tracking.samples_every", "tracking.samples_per_step"
    assert told({shown: 5, kept: 0}) == {shown: "no effect: no samples are kept to show: samples_per_step is 0"}
    assert told({shown: 5}) == told({shown: 5, kept: 0, "tracking.rollout_dump_dir": "samples"}) == {}
    assert told({size: 4}) == {size: "no effect: vllm forms its batches itself"}
    assert told({size: 4, "actor_infer.strategy_args": {"strategy_name": "hf_infer"}}) == {}
    assert "lets more than" in told({"async_generation_ratio": 1, queue: 100_000})[queue]
    soft = "async_training.staleness.soft_versions"
    assert told({"async_generation_ratio": 2, "async_training.staleness": {"soft_versions": 2}}) == {}
    assert told({"async_generation_ratio": 2, "async_training.staleness": {"soft_versions": 3}}) == {
        soft: "no effect: no sample is older than max_versions 2"
    }


def test_what_the_trainer_waits_for_is_a_rule_of_whole_groups(files):
    """A mini-batch of 8 samples holds 4 groups of 2: streaming works; the default waits for all mini-batches."""
    config = load(files.rlvr({"rollout_batch_size": 16, "async_training.require_batches": 2}))
    assert config.async_training.require_batches == 2
    assert load(files.rlvr({"rollout_batch_size": 16})).async_training.require_batches == 4


@pytest.mark.parametrize("ratio", [0, 0.1, 0.5, 1, 2.5, 3])
@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_the_staleness_bound_is_the_closed_formula_in_exact_arithmetic(files, ratio, k):
    edits = {
        "async_generation_ratio": ratio,
        "async_training": {"trigger_parameter_sync_step": k, "staleness": {"allow_above_8": True}},
    }
    config = load(files.rlvr(edits))
    tenths = (10 + round(ratio * 10)) * k
    assert config.staleness_bound == -(-tenths // 10) - 1 == config.async_training.staleness.max_versions
    assert config.async_training.max_queue_size == math.ceil(tenths * config.groups_per_batch / 10)
    if k == 1:
        assert config.staleness_bound == math.ceil(ratio)


@pytest.mark.parametrize("accumulated", [3, 40])
def test_a_batch_of_turns_need_not_be_a_multiple_of_the_mini_batch(files, accumulated):
    """16 trajectories of 1 to 10 turns against mini-batches of 12 and 160."""
    training = {"gradient_accumulation_steps": accumulated}
    edits = {"custom_envs.FrozenLake.manager": "step", "actor_train.training_args": training}
    assert load(files.agentic(edits)).custom_envs["FrozenLake"].manager == "step"


@pytest.mark.parametrize(
    ("edits", "level"),
    [
        ({}, "token"),
        ({"pg_variant": "tis"}, "none"),
        ({"pg_variant": "decoupled_ppo"}, "none"),
        ({"pg_variant": "vanilla"}, "token"),
        ({"pg_variant": "kimi15"}, "token"),
        ({"algorithm": {"pg_options": {"ratio_base": "behaviour"}}}, "none"),
        ({"proximal_logprobs": "behaviour"}, "none"),
    ],
)
def test_the_default_weight_level_never_corrects_twice(files, edits, level):
    assert load(files.rlvr(edits)).algorithm.correction.weight_level == level


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ({}, None),
        ({"ppo_epochs": 2}, "2 optimizer steps on the rows of a forward pass"),
        ({"token_kl_coef": 0.1, "reference": MEGATRON_INFER}, "token_kl_coef, which needs them before the step"),
        ({"distill_coef": 0.1, "teacher": MEGATRON_INFER}, "distill_coef, which needs them before the step"),
        ({"adv_estimator": "optimal_token_baseline"}, "adv_estimator optimal_token_baseline, which needs them before the step"),
        ({"pg_variant": "kl_cov"}, "pg_variant kl_cov, which needs them before the step"),
        ({"pg_variant": "m2po"}, "pg_variant m2po, which needs them before the step"),
        ({"actor_train.model_args": {"lora_rank": 4, "lora_dropout": 0.1}}, "lora_dropout, whose training forward pass is not the policy"),
        ({f"{TRAIN}.extra": {"attention_dropout": 0.0, "hidden_dropout": 0.1}}, "hidden_dropout, whose training forward pass is not the policy"),
        ({f"{TRAIN}.extra": {"attention_dropout": 0.1}}, "attention_dropout, whose training forward pass is not the policy"),
        ({f"{TRAIN}.extra": {"attention_dropout": 0, "hidden_dropout": 0.0}}, None),
        ({"correction": {"band_low": 0.5}}, None),
        ({"kl_loss_coef": 0.1, "reference": MEGATRON_INFER}, None),
    ],
)  # fmt: skip
def test_auto_takes_the_steps_own_log_probs_unless_something_needs_them_before(files, edits, reason):
    config = load(files.rlvr(edits))
    assert config.algorithm.proximal_logprobs == "auto" and config.proximal_needed_early == reason
    assert config.source_of_proximal == ("reuse" if reason is None else "recompute")
    explicit = load(files.rlvr({**edits, "proximal_logprobs": "recompute"}))
    assert explicit.source_of_proximal == "recompute"


def test_parts_of_one_mini_batch_reuse_their_own_forward(files):
    edits = {"actor_train.training_args": {"gradient_accumulation_steps": 1}, "async_training.require_batches": 1}
    config = load(files.rlvr(edits))
    assert config.mini_batches_per_batch > 1 and config.source_of_proximal == "reuse"


@pytest.mark.parametrize(
    ("edits", "sets"),
    [
        ({}, ["actor"]),
        ({"reference": MEGATRON_INFER, "critic": {**CRITIC, DEV: "range(12,16)"}}, ["actor", "reference", "critic"]),
        ({"reference": {**MEGATRON_INFER, DEV: "range(0,4)"}, "critic": CRITIC}, ["actor reference", "critic"]),
        ({"reference": MEGATRON_INFER, "teacher": {**MEGATRON_INFER, DEV: [11]}, "critic": {**CRITIC, DEV: [0]}}, ["actor critic", "reference teacher"]),
        ({"reference": {**MEGATRON_INFER, DEV: [0]}, "critic": {**CRITIC, DEV: [9]}, "teacher": {**MEGATRON_INFER, DEV: [0, 9]}}, ["actor critic reference teacher"]),
        ({"actor_train.device_mapping": None, "reference": {**MEGATRON_INFER, DEV: None}}, ["actor", "reference"]),
        ({"actor_train.device_mapping": None, "actor_train.model_args": {"lora_rank": 4}, "reference": {**MEGATRON_INFER, DEV: None}}, ["actor reference"]),
    ],
    ids=["alone", "apart", "shared", "in pairs", "by way of a third", "processes", "the actor without adapters"],
)  # fmt: skip
def test_roles_with_devices_in_common_are_told_from_those_with_devices_of_their_own(files, edits, sets):
    found = roles_on_same_devices(load(files.rlvr(edits)))
    assert sorted(" ".join(sorted(names)).replace("_train", "") for names in found) == sorted(sets)
