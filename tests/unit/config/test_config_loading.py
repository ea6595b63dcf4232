"""Errors C001 to C020 with their exact messages and places, and what is accepted instead."""

# ruff: noqa: E501 - one case per line: messages are compared whole

import json
import os

import pytest

from roll_async.config.api import ConfigError, dump, load, load_with_warnings

TRAIN = "actor_train.strategy_args.strategy_config"
CPU_WORKER = {"strategy_args": {"strategy_name": "megatron_infer"}}
STAGES = "actor_train.training_args"

RLVR_CASES = [
    ("C001", {"max_step": 3}, "max_step: unknown key; did you mean 'max_steps'?"),
    ("C001", {f"{STAGES}.learning_rat": 3}, f"{STAGES}.learning_rat: unknown key; did you mean '{STAGES}.learning_rate'?"),
    ("C001", {"tensor_model_parallel_size": 2}, "tensor_model_parallel_size: unknown key; did you mean 'actor_train.strategy_args.strategy_config.tensor_model_parallel_size'?"),
    ("C001", {"ledger.zzzzzzzzzzzz": 2}, "ledger.zzzzzzzzzzzz: unknown key; ledger has: enable, path, fsync"),
    ("C001", {"se\u0435d": 2}, "se\u0435d: unknown key; did you mean 'seed'? (contains U+0435 CYRILLIC SMALL LETTER IE)"),
    ("C001", {f"{TRAIN}.extra": {"sequence_parallel": True}}, f"{TRAIN}.extra.sequence_parallel: unknown key; did you mean '{TRAIN}.sequence_parallel'?"),
    ("C001", {"algorithm": {"pg_options": {"tis_upper_bound": 2}}}, "algorithm.pg_options.tis_upper_bound: unknown key; algorithm.pg_options has: ratio_base, ratio_level, clip_low, clip_high, dual_clip"),
    ("C001", {"algorithm": {"adv_options": {"lam": 1}}}, "algorithm.adv_options.lam: unknown key; algorithm.adv_options has: normalise_std, epsilon"),
    ("C003", {"seed": "3"}, 'seed: expected int, got str "3"; remove the quotes'),
    ("C003", {"seed": True}, "seed: expected int, got bool true"),
    ("C003", {"seed": 2.0}, "seed: expected int, got float 2.0; write 2"),
    ("C003", {"seed": None}, "seed: expected int, got null null; give a value or remove the key"),
    ("C003", {"pretrain": 7}, "pretrain: expected str, got int 7; quote it"),
    ("C003", {"async_generation_ratio": "1e-6"}, 'async_generation_ratio: expected float, got str "1e-6"; remove the quotes'),
    ("C003", {"tracking": {"trace": "yes"}}, 'tracking.trace: expected bool, got str "yes"; write true'),
    ("C003", {"tracking": [1]}, "tracking: expected map, got list [1]"),
    ("C003", {"ledger": None}, "ledger: expected map, got null null; give a value or remove the key"),
    ("C003", {"actor_infer.generating_args.stop_strings": "a"}, 'actor_infer.generating_args.stop_strings: expected list, got str "a"; write a list of items'),
    ("C003", {"actor_infer.generating_args.stop_strings": ["a", 3]}, "actor_infer.generating_args.stop_strings.1: expected str, got int 3; quote it"),
    ("C003", {"system_envs": {"A": 1}}, "system_envs.A: expected str, got int 1; quote it"),
    ("C003", {"async_training": {"staleness": {"soft_versions": 0.5}}}, "async_training.staleness.soft_versions: expected int, got float 0.5; it counts weight versions; for a fraction of a batch use async_generation_ratio"),
    ("C004", {"actor_train.model_args": {"dtype": "bf15"}}, 'actor_train.model_args.dtype: "bf15" is not one of bf16 | fp16 | fp32; did you mean \'bf16\'?'),
    ("C004", {"actor_infer.strategy_args.strategy_config.block_size": 17}, "actor_infer.strategy_args.strategy_config.block_size: 17 is not one of 8 | 16 | 32 | 64 | 128"),
    ("C004", {"actor_train.data_args": {"file_name": "a.json", "template": "qwen25"}}, 'actor_train.data_args.template: "qwen25" is not one of native | qwen2_5 | qwen3 | chatml | base; did you mean \'qwen2_5\'?'),
    ("C004", {"pipeline": "rlv"}, 'pipeline: "rlv" is not one of rlvr | agentic | sft | dpo; did you mean \'rlvr\'?'),
    ("C004", {"rewards": {"math": {"type": "math_rul"}}}, 'rewards.math.type: "math_rul" is not one of math_rule | math_service | code_sandbox | llm_judge | ifeval | ifeval_strict | multiple_choice | qa | exact_match | supervised | distilled; did you mean \'math_rule\'?'),
    ("C005", {"seed": -1}, "seed: -1 must be >= 0"),
    ("C005", {"seed": 1 << 63}, "seed: 9223372036854775808 must be an integer of 64 bits"),
    ("C005", {"actor_infer.generating_args.num_beams": 2}, "actor_infer.generating_args.num_beams: 2 must be 1"),
    ("C005", {"actor_infer.generating_args.top_k": 0}, "actor_infer.generating_args.top_k: 0 must be -1 or >= 1"),
    ("C005", {"actor_infer.generating_args.top_p": 0}, "actor_infer.generating_args.top_p: 0 must be in (0, 1]"),
    ("C005", {"algorithm": {"pg_options": {"dual_clip": 1}}}, "algorithm.pg_options.dual_clip: 1 must be > 1"),
    ("C005", {"tracking": {"prometheus_port": 65536}}, "tracking.prometheus_port: 65536 must be in [1, 65535]"),
    ("C005", {"tracking": {"tracker_kwargs": {"a": {"b": [1 << 64]}}}}, "tracking.tracker_kwargs.a.b: 18446744073709551616 must be an integer of 64 bits"),
    ("C005", {"rewards": {"1a": {"type": "qa"}}}, 'rewards: "1a" must be a name matching [A-Za-z_][A-Za-z0-9_.-]*'),
    ("C005", {"actor_train.data_args": {"file_name": "a.csv"}}, 'actor_train.data_args.file_name: "a.csv" must be a .json, .jsonl or .parquet file'),
    ("C005", {"actor_train.data_args": {"file_name": []}}, "actor_train.data_args.file_name: [] must be at least one file"),
    ("C005", {"actor_train.data_args": {"file_name": "a.json", "prompt": "q", "messages": "m"}}, 'actor_train.data_args.prompt: "q" must be null while messages is set'),
    ("C006", {"reference": {}, "token_kl_coef": 1}, "reference.strategy_args: required and not set; give strategy_name and strategy_config"),
    ("C006", {"actor_train.data_args": {}}, "actor_train.data_args.file_name: required and not set; add it"),
    ("C006", {"rewards": {"mine": {}}}, "rewards.mine.type: required and not set; give one of math_rule | math_service | code_sandbox | llm_judge | ifeval | ifeval_strict | multiple_choice | qa | exact_match | supervised | distilled or a dotted path"),
    ("C006", {"rewards": {"math_service": {}}}, "rewards.math_service.service: required and not set; give api_url"),
    ("C006", {"rewards": {"llm_judge": {}}}, "rewards.llm_judge.judge: required and not set; give api_url and model"),
    ("C006", {"algorithm": {"correction": {"rejections": [{"statistic": "k1", "high": 2}]}}}, "algorithm.correction.rejections.0.aggregation: required and not set; add it"),
    ("C017", {"actor_train.device_mapping": "4"}, 'actor_train.device_mapping: "4" is not a device list; write a list of ints, list(range(a,b)), range(a,b) or a-b'),
    ("C017", {"actor_train.device_mapping": "__import__('os')"}, "actor_train.device_mapping: \"__import__('os')\" is not a device list; write a list of ints, list(range(a,b)), range(a,b) or a-b"),
    ("C017", {"actor_train.device_mapping": [True]}, "actor_train.device_mapping: [true] is not a device list; write a list of ints, list(range(a,b)), range(a,b) or a-b"),
    ("C018", {"actor_train.device_mapping": []}, "actor_train.device_mapping: []: empty"),
    ("C018", {"actor_train.device_mapping": "range(4,4)"}, 'actor_train.device_mapping: "range(4,4)": empty'),
    ("C018", {"actor_train.device_mapping": [1, 2, 1]}, "actor_train.device_mapping: [1, 2, 1]: device 1 twice"),
    ("C018", {"actor_train.device_mapping": "range(-1,3)"}, 'actor_train.device_mapping: "range(-1,3)": negative device -1'),
    ("C018", {"actor_train.device_mapping": "range(99999999)"}, 'actor_train.device_mapping: "range(99999999)": more than 65536 devices'),
    ("C018", {"actor_train.device_mapping": [65536]}, "actor_train.device_mapping: [65536]: device 65536 is above 65535"),
    ("C019", {"pipeline": "rlvr", "custom_envs": {}}, "custom_envs: is a key of agentic configs; this one is rlvr because pipeline is rlvr"),
    ("C019", {"pipeline": "rlvr", "train_env_manager": {}}, "train_env_manager: is a key of agentic configs; this one is rlvr because pipeline is rlvr"),
    ("C020", {"actor_infer.training_args": {}}, "actor_infer.training_args: has no effect on role actor_infer; remove it"),
    ("C020", {"actor_train.generating_args": {}}, "actor_train.generating_args: has no effect on role actor_train; remove it"),
    ("C020", {"actor_infer.logits_in_fp32": True}, "actor_infer.logits_in_fp32: has no effect on role actor_infer; remove it"),
    ("C020", {"actor_train.strategy_args": {"strategy_name": "vllm"}}, "actor_train.strategy_args.strategy_name: has no effect on role actor_train; use megatron_train"),
    ("C020", {"rewards": {"llm_judge": {"num_workers": 2, "judge": {"api_url": "http://x/v1", "model": "m"}}}}, "rewards.llm_judge.num_workers: has no effect on role llm_judge; remove it, or set max_concurrent"),
    ("C020", {"rewards": {"ifeval": {"answer_format": "boxed"}}}, "rewards.ifeval.answer_format: has no effect on role ifeval; remove it"),
    ("C020", {"rewards": {"math_rule": {"sandbox": {}}}}, "rewards.math_rule.sandbox: has no effect on role math_rule; remove it"),
]  # fmt: skip
AGENTIC_CASES = [
    ("C019", {"prompt_length": 3}, "prompt_length: is a key of rlvr configs; this one is agentic because custom_envs is set"),
    ("C004", {"custom_envs": {"A": {"env_type": "frozen_lak"}}}, 'custom_envs.A.env_type: "frozen_lak" is not one of frozen_lake | sokoban | countdown | math | qa | text_game | gymnasium | minigrid | textarena | reasoning_gym | command | http_agent | webshop | code; did you mean \'frozen_lake\'?'),
    ("C006", {"custom_envs": {"A": {}}}, "custom_envs.A.env_type: required and not set; add it"),
    ("C019", {"pipeline": "agentic", "actor_train.data_args": {"template_kwargs": {}, "id": "i"}}, "actor_train.data_args.id: is a key of rlvr configs; this one is agentic because pipeline is agentic"),
    ("C003", {"actor_train.data_args": {"template_kwargs": "think"}}, 'actor_train.data_args.template_kwargs: expected map, got str "think"'),
    ("C019", {"pipeline": "agentic", "actor_train.data_args": {}}, "actor_train.data_args: is a key of rlvr configs; this one is agentic because pipeline is agentic"),
]  # fmt: skip


def found(call, *args, **kwargs) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return [f"{d.id} {d.key}: {d.message}" for d in caught.value.diagnostics if d.is_error]


@pytest.mark.parametrize(("id", "edits", "message"), RLVR_CASES, ids=[c[0] for c in RLVR_CASES])
def test_a_broken_key_of_an_rlvr_config_gets_one_error(files, id, edits, message):
    errors = found(load, files.rlvr(edits))
    if id == "C020" and "strategy_args" in message:
        errors = [e for e in errors if "strategy_config" not in e]
    assert errors == [f"{id} {message}"]


@pytest.mark.parametrize(("id", "edits", "message"), AGENTIC_CASES, ids=[c[0] for c in AGENTIC_CASES])
def test_a_broken_key_of_an_agentic_config_gets_one_error(files, id, edits, message):
    assert found(load, files.agentic(edits)) == [f"{id} {message}"]


def test_a_missing_section_is_reported_at_the_top(files):
    errors = found(load, files.rlvr({"pretrain": files.Remove, "actor_infer": files.Remove}))
    remedy = "required and not set; give a Hugging Face name or a folder"
    assert errors == [f"C006 pretrain: {remedy}", "C006 actor_infer: required and not set; add the section"]


def test_the_kind_a_command_fixes_wins_and_is_the_reason(files):
    errors = found(load, files.agentic(), pipeline="rlvr")
    reason = "this one is rlvr because the command fixes pipeline rlvr"
    assert f"C019 custom_envs: is a key of agentic configs; {reason}" in errors
    assert "C006 actor_train.data_args: required and not set; give the prompt files in data_args.file_name" in errors


# ---- text ---------------------------------------------------------------------------------------------------------

TEXT_CASES = [
    ("a: 1\nb:\n  c: 1\n  c: 2\n", "run.yaml:4: error C007: b.c: key 'c' is given twice (lines 3 and 4); keep one"),
    ("", "run.yaml:1: error C008: (file): not readable as YAML: it is empty"),
    ("# only a comment\n", "run.yaml:1: error C008: (file): not readable as YAML: it is empty"),
    ("- a\n", "run.yaml:1: error C008: (file): not readable as YAML: the top is a list, not a map"),
    ("a: 1\n---\nb: 2\n", "run.yaml:2: error C008: (file): not readable as YAML: it holds two documents"),
    (b"a: 1\nb: \xff\n", "run.yaml:2: error C008: (file): not readable as YAML: not UTF-8 (invalid start byte)"),
    (b"\xff\xfea\x00", "run.yaml:1: error C008: (file): not readable as YAML: not UTF-8 (invalid start byte)"),
    ("a: 1\nb: \0\n", "run.yaml:2: error C008: (file): not readable as YAML: contains a NUL character"),
    ("a: 1\n1: 2\n", "run.yaml:2: error C008: (file): not readable as YAML: key '1' is not a string; quote it"),
    ("true: 2\n", "run.yaml:1: error C008: (file): not readable as YAML: key 'true' is not a string; quote it"),
    ("? [a]\n: 2\n", "run.yaml:1: error C008: (file): not readable as YAML: a key is not a string"),
    ("a: *x\n", "run.yaml:1: error C008: (file): not readable as YAML: undefined alias 'x'"),
    ("a: {<<: 3}\n", "run.yaml:1: error C008: (file): not readable as YAML: '<<' needs a map or a list of maps"),
    ("a:\n  b: !!python/object:os.system x\n", "run.yaml:2: error C009: a.b: YAML tag '!!python/object:os.system' is not allowed; write plain maps, lists and scalars"),
    ("a: !env X\n", "run.yaml:1: error C009: a: YAML tag '!env' is not allowed; write plain maps, lists and scalars"),
    ("a: !!str 1\n", "run.yaml:1: error C009: a: YAML tag '!!str' is not allowed; write plain maps, lists and scalars"),
    ("a: &x\n  b: *x\n", "run.yaml:2: error C010: a.b: too large: alias 'x' inside itself exceeds 32 levels"),
    ("a: " + "[" * 32 + "]" * 32, "run.yaml:1: error C010: a" + ".0" * 31 + ": too large: depth exceeds 32"),
    ("a: [" + "1," * 100_000 + "]", "run.yaml:1: error C010: a.99998: too large: number of values exceeds 100000"),
    ("a: " + "x" * 65537, "run.yaml:1: error C010: a: too large: string exceeds 64 KiB"),
    ("a: 1\n#" + "x" * (1 << 20), "run.yaml:1: error C010: (file): too large: file exceeds 1 MiB"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line"), TEXT_CASES, ids=[str(i) for i in range(len(TEXT_CASES))])
def test_text_that_is_no_config_gets_one_line(files, text, line, monkeypatch):
    files.text(text)
    monkeypatch.chdir(files.folder)
    with pytest.raises(ConfigError) as caught:
        load("run.yaml")
    assert str(caught.value) == line


def test_syntax_errors_carry_the_line(files):
    with pytest.raises(ConfigError) as caught:
        load(files.text("a: 1\nb: [1, 2\nc: 3\n"))
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.id, diagnostic.line) == ("C008", 3)
    assert diagnostic.message.startswith("not readable as YAML: while parsing a flow sequence ")


def test_what_is_no_regular_file_is_not_opened(files):
    os.mkfifo(files.folder / "pipe.yaml")
    assert found(load, files.folder / "pipe.yaml") == ["C008 (file): not readable as YAML: not a file"]
    assert found(load, files.folder) == ["C008 (file): not readable as YAML: not a file"]
    assert found(load, files.folder / "none.yaml") == ["C008 (file): not readable as YAML: No such file or directory"]
    assert found(load, "a\0b") == ["C008 (file): not readable as YAML: no such file"]


def test_a_billion_laughs_stop_at_the_limit(files):
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    text += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    (error,) = found(load, files.text(text))
    assert error.endswith("too large: number of values exceeds 100000")


def test_scalars_are_those_of_yaml_1_2(files):
    text = (
        "\ufeff{i: 012, plus: +3, hex: 0x10, oct: 0o7, e: 1e-6, dot: .5, yes: yes, on: on, time: 1:30, day: 2026-01-01, "
        "t: True, n: ~, none: , word: null, under: 1_000, q: '1', minus: -}\n"
    )
    config = load(files.rlvr(), [f"tracking.tracker_kwargs={text.strip().removeprefix(chr(0xFEFF))}"])
    assert config.tracking.tracker_kwargs == {
        "i": 12, "plus": 3, "hex": "0x10", "oct": "0o7", "e": 1e-6, "dot": 0.5, "yes": "yes", "on": "on", "time": "1:30",
        "day": "2026-01-01", "t": True, "n": None, "none": None, "word": None, "under": "1_000", "q": "1", "minus": "-",
    }  # fmt: skip


def test_a_byte_order_mark_is_skipped(files):
    with open(files.rlvr(), "rb") as stream:
        raw = stream.read()
    assert load(files.text(b"\xef\xbb\xbf" + raw, "bom.yaml")).pretrain == "model"


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "1e999"])
def test_numbers_that_are_not_finite_are_read_and_refused(files, text):
    (error,) = found(load, files.rlvr(), [f"async_generation_ratio={text}"])
    assert error.startswith("C005 async_generation_ratio: ")
    assert error.endswith(" must be a finite number")


def test_merge_keys_may_be_overridden(files):
    files.rlvr()
    merged = files.text(
        "vars:\n  a: &a {trace: false, tracker_kwargs: {x: 1}}\n  b: &b {trace: true, rollout_dump_dir: d}\n"
        "defaults: [run]\ntracking: {<<: [*a, *b], tracker_kwargs: {y: 2}}\n",
        "merged.yaml",
    )
    tracking = load(merged).tracking
    assert (tracking.trace, tracking.rollout_dump_dir, tracking.tracker_kwargs) == (False, "d", {"y": 2})


# ---- overrides ----------------------------------------------------------------------------------------------------


def test_overrides_apply_from_left_to_right_and_create_what_is_missing(files):
    config = load(files.rlvr(), ["seed=1", "seed=2", "fault.rpc_timeout=5", "actor_train.device_mapping=0-3"])
    assert (config.seed, config.fault.rpc_timeout, config.actor_train.device_mapping) == (2, 5.0, (0, 1, 2, 3))


def test_null_clears(files):
    config = load(
        files.rlvr({"seed": 7}),
        ["seed=null", "algorithm.correction.weight_upper=null", "response_length=~", "sequence_length=40"],
    )
    assert (config.seed, config.algorithm.correction.weight_upper, config.response_length) == (42, None, 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed", "seed: expected KEY=VALUE"),
        ("seed=", "seed: expected KEY=VALUE; use KEY=null to clear"),
        ("=3", "(file): expected KEY=VALUE"),
        ("a..b=3", "a..b: expected KEY=VALUE"),
        ("1a=3", "1a: expected KEY=VALUE"),
        ("defaults=[a]", "defaults: expected KEY=VALUE; defaults are read from files only"),
    ],
)
def test_what_is_no_override_is_refused(files, text, message):
    assert found(load, files.rlvr(), [text]) == [f"C015 {message}"]


def test_errors_of_overrides_name_the_override(files):
    with pytest.raises(ConfigError) as caught:
        load(files.rlvr(), ["seed=x", "fault.rpc_timeout=0"])
    assert (
        str(caught.value).splitlines()
        == [
            "<override fault.rpc_timeout=0>: error C005: fault.rpc_timeout: 0 must be > 0",
            '<override seed=x>: error C003: seed: expected int, got str "x"',
        ][::-1]
    )
    with pytest.raises(ConfigError, match=r"^<override seed=\[1>: error C008: \(file\): not readable as YAML: "):
        load(files.rlvr(), ["seed=[1"])
    (error,) = found(load, files.rlvr(), ["actor_train.device_mapping.0=3"])
    assert error.startswith('C017 actor_train.device_mapping: {"0": 3} is not a device list')


# ---- includes -----------------------------------------------------------------------------------------------------


def test_includes_merge_in_order_and_self_has_its_place(files):
    files.rlvr({"seed": 1, "system_envs": {"A": "1", "B": "1"}, "max_steps": 1})
    files.text("seed: 2\nsystem_envs: {B: '2'}\n", "sub/over.yaml")
    last = files.text("defaults: [run@_here_, sub/over.yaml]\nmax_steps: 3\n", "last.yaml")
    first = files.text("defaults: [_self_, run, sub/over]\nmax_steps: 3\n", "first.yaml")
    config = load(last)
    assert (config.seed, config.max_steps, config.system_envs) == (2, 3, {"A": "1", "B": "2"})
    assert config.exp_name == "last"
    assert load(first).max_steps == 1


def test_a_file_is_found_beside_a_folder_of_the_same_name(files):
    files.rlvr({"seed": 5})
    (files.folder / "run").mkdir()
    assert load(files.text("defaults: [run]\n", "top.yaml")).seed == 5


def test_includes_that_can_not_be_are_refused(files):
    os.mkfifo(files.folder / "pipe")
    files.text("defaults: [b]\n", "a.yaml")
    files.text("defaults: [a.yaml]\n", "b.yaml")
    for number in range(10):
        files.text(f"defaults: [deep{number + 1}]\n", f"deep{number}.yaml")
    files.text("seed: 1\n", "deep10.yaml")
    cases = {
        "nowhere": "not found",
        "/no/such/folder/file": "not found",
        "pipe": "not a regular file",
        "a": "cycle a.yaml -> b.yaml -> a.yaml",
        "deep0": "more than 8 levels deep",
    }
    for name, why in cases.items():
        (error,) = found(load, files.text(f"defaults:\n  - {name}\n"))
        shown = {"a": "a.yaml", "deep0": "deep8"}.get(name, name)
        assert error == f"C014 defaults.0: cannot include '{shown}': {why}"
    assert found(load, files.text("defaults: [_self_, _self_]\n")) == [
        "C014 defaults.1: cannot include '_self_': given twice"
    ]
    assert found(load, files.text("defaults: a\n")) == ['C003 defaults: expected list, got str "a"']
    assert found(load, files.text("defaults: [3]\n")) == ["C003 defaults.0: expected str, got int 3"]


def test_an_include_is_a_file_beside_the_config_an_absolute_path_or_the_name_of_a_shipped_config(files):
    shipped = load(files.text("defaults: [fully_async_cpu]\n", "own.yaml"))
    assert shipped.async_training.require_batches == 1 and shipped.pretrain == "./output/demo_assets/model"
    named_alike = load(files.text("defaults: [fully_async_cpu.yaml]\nmax_steps: 7\n", "fully_async_cpu.yaml"))
    assert named_alike.max_steps == 7 and named_alike.async_training.require_batches == 1
    assert load(files.text("defaults: [fully_async_cpu]\n", "own.yaml")).max_steps == 7, "the one beside it comes first"
    assert load(files.text(f"defaults: [{files.folder}/own]\n", "sub/other.yaml")).max_steps == 7
    (error,) = found(load, files.text("defaults: [sub/rlvr_config_async]\n", "own.yaml"))
    assert error.endswith("cannot include 'sub/rlvr_config_async': not found"), "names of shipped files have no folder"


def test_an_error_names_the_file_and_line_of_the_key(files, monkeypatch):
    files.rlvr()
    files.text("# a comment\nledger:\n  fsync: always\n", "part.yaml")
    files.text("defaults: [run, part]\n", "top.yaml")
    monkeypatch.chdir(files.folder)
    with pytest.raises(ConfigError) as caught:
        load("top.yaml")
    assert str(caught.value) == ('part.yaml:3: error C004: ledger.fsync: "always" is not one of group | step | never')


def test_files_that_include_each_other_twice_end_at_the_limit(files):
    for number in range(8):
        files.text(f"defaults: [{', '.join([f'w{number + 1}'] * 9)}]\n", f"w{number}.yaml")
    files.text("seed: 1\n", "w8.yaml")
    (error,) = found(load, files.folder / "w0.yaml")
    assert error.startswith("C010 defaults.")
    assert error.endswith(": too large: number of includes exceeds 1000")


# ---- references ---------------------------------------------------------------------------------------------------


def test_references_keep_types_chain_and_join(files):
    edits = {
        "vars": {"n": 3, "name": "${vars.part}-${vars.n}", "part": "x", "env": {"A": "${vars.name}"}, "on": True},
        "seed": "${vars.n}",
        "exp_name": "$${literal} ${vars.name} ${vars.on}",
        "system_envs": "${vars.env}",
        "actor_train.system_envs": "${actor_infer.system_envs}",
        "actor_infer.system_envs": {"B": "${system_envs.A}"},
    }
    config = load(files.rlvr(edits))
    assert (config.seed, config.exp_name) == (3, "${literal} x-3 true")
    assert config.system_envs == {"A": "x-3"}
    assert config.actor_train.system_envs == {"B": "x-3"}


REFERENCE_CASES = [
    ("${pretrian}", "C011 exp_name: ${pretrian} names no key of this config; did you mean 'pretrain'?"),
    ("${seed}", None),
    ("${exp_name}", "C012 exp_name: interpolation cycle: exp_name -> exp_name"),
    ("${oc.env:HOME}", "C013 exp_name: '${oc.env:HOME}' is not supported; only ${dotted.key} is"),
    ("${.x}", "C013 exp_name: '${.x}' is not supported; only ${dotted.key} is"),
    ("${x:-1}", "C013 exp_name: '${x:-1}' is not supported; only ${dotted.key} is"),
    ("a ${b", "C013 exp_name: '${b' is not supported; only ${dotted.key} is"),
    (
        "a ${actor_infer.strategy_args}",
        'C003 exp_name: expected scalar, got map {"strategy_name": "vllm", "strategy_config": {}}',
    ),
]


@pytest.mark.parametrize(("text", "message"), REFERENCE_CASES, ids=[c[0] for c in REFERENCE_CASES])
def test_references_that_can_not_be_are_refused(files, text, message):
    if message is None:
        (error,) = found(load, files.rlvr({"exp_name": text}))
        assert error.startswith("C011 exp_name: ${seed} names no key of this config; at its top it has: pretrain, "), (
            "defaults are not visible"
        )
    else:
        assert found(load, files.rlvr({"exp_name": text})) == [message]


def test_a_cycle_names_its_members(files):
    edits = {"vars": {"a": "${vars.b}", "b": "x ${vars.c.d}", "c": {"d": "${vars.a}"}}}
    errors = found(load, files.rlvr(edits))
    assert "C012 vars.a: interpolation cycle: vars.b -> vars.c.d -> vars.a -> vars.b" in errors


def test_references_can_not_make_a_config_explode(files):
    maps = {
        "v0": {"a": 1, "b": 2},
        **{f"v{i}": {"a": f"${{vars.v{i - 1}}}", "b": f"${{vars.v{i - 1}}}"} for i in range(1, 28)},
    }
    assert any(e.endswith("number of values exceeds 100000") for e in found(load, files.rlvr({"vars": maps})))
    texts = {"v0": "x" * 100, **{f"v{i}": f"${{vars.v{i - 1}}}" * 10 for i in range(1, 9)}}
    assert any(e.endswith("string exceeds 64 KiB") for e in found(load, files.rlvr({"vars": texts})))
    chain = {f"v{i}": f"${{vars.v{i + 1}}}" for i in range(3000)}
    assert any(e.endswith("chain of references exceeds 64") for e in found(load, files.rlvr({"vars": chain})))
    deep: object = 1
    for _ in range(20):
        deep = {"k": deep}
    for levels, is_good in ((10, True), (11, False)):
        nested: object = "${vars.a}"
        for _ in range(levels):
            nested = {"x": nested}
        path = files.rlvr({"vars": {"a": deep, "b": nested}})
        if is_good:
            load(path)
        else:
            (error,) = found(load, path)
            assert error.startswith("C010 vars.a.k") and error.endswith(": too large: depth exceeds 32")


# ---- trackers -----------------------------------------------------------------------------------------------------


def test_one_tracker_or_several_and_what_belongs_to_one_of_them(files):
    one = load(files.rlvr({"tracking": {"track_with": "wandb", "tracker_kwargs": {"project": "p"}}})).tracking
    assert one.track_with == ("wandb",) and one.kwargs_of("wandb") == {"project": "p"}
    kwargs = {"project": "p", "wandb": {"tags": ["a"], "project": "q"}, "trackio": {"group": "g"}}
    path = files.rlvr({"tracking": {"track_with": ["wandb", "swanlab"], "tracker_kwargs": kwargs}})
    several = load(path).tracking
    assert several.track_with == ("wandb", "swanlab")
    assert several.kwargs_of("wandb") == {"project": "q", "tags": ["a"]}
    assert several.kwargs_of("swanlab") == {"project": "p"}
    assert load(path, ["tracking.track_with=[]"]).tracking.track_with == ()
    assert load(path, ["track_with=null"]).tracking.track_with == ("tensorboard",)
    assert load(files.text(dump(load(path)), "again.yaml")) == load(path)


@pytest.mark.parametrize(
    ("tracking", "error"),
    [
        ({"track_with": "wanbd"}, 'C004 tracking.track_with: "wanbd" is not one of tensorboard | wandb | mlflow | '),
        ({"track_with": ["wandb", 3]}, "C003 tracking.track_with.1: expected str, got int 3; quote it"),
        ({"track_with": ["stdout", "stdout"]}, 'C005 tracking.track_with: ["stdout", "stdout"] must be each name once'),
        ({"tracker_kwargs": {"wandb": "offline"}}, "C003 tracking.tracker_kwargs.wandb: expected map, got str "),
    ],
)
def test_what_is_no_tracker_or_no_map_of_one_is_refused(files, tracking, error):
    (said,) = found(load, files.rlvr({"tracking": tracking}))
    assert said.startswith(error)


# ---- other names --------------------------------------------------------------------------------------------------

ALIASES = [
    ({"max_concurrent_per_server": 9}, "async_training.max_concurrent_per_server", 9),
    ({"max_running_requests": 9}, "async_training.max_concurrent_per_server", 9),
    ({"batch_creation_interval": 9}, "async_training.batch_creation_interval", 9.0),
    ({"n_resp_per_prompt": 4, "num_return_sequences_in_group": "-"}, "num_return_sequences_in_group", 4),
    ({"actor_rollout_ref": {"rollout": {"n": 4}}, "num_return_sequences_in_group": "-"}, "num_return_sequences_in_group", 4),
    ({"actor_rollout_ref": {"actor": {"clip_ratio_high": 0.28}}}, "algorithm.pg_options.clip_high", 0.28),
    ({"clip_ratio_low": 0.1}, "algorithm.pg_options.clip_low", 0.1),
    ({"algorithm": {"pg_clip_low": 0.1}}, "algorithm.pg_options.clip_low", 0.1),
    ({"actor_rollout_ref": {"actor": {"loss_agg_mode": "seq-mean-token-sum"}}}, "algorithm.loss_agg_mode", "seq-mean-token-sum"),
    ({"gamma": 0.5, "adv_estimator": "reinforce"}, "algorithm.adv_options.gamma", 0.5),
    ({"data": {"train_batch_size": 8}, "rollout_batch_size": "-"}, "rollout_batch_size", 8),
    ({"data": {"gen_batch_size": 8}}, "algorithm.filter_groups.gen_batch_size", 8),
    ({"data": {"max_prompt_length": 8}, "prompt_length": "-"}, "prompt_length", 8),
    ({"reward_model": {"overlong_buffer": {"enable": True, "len": 8}}}, "algorithm.overlong_buffer.len", 8),
    ({"actor_train.pg_variant": "gspo"}, "algorithm.pg_variant", "gspo"),
    ({"actor_train.model_update_frequency": 2}, "async_training.trigger_parameter_sync_step", 2),
    ({"pg_variant": "tis", "tis_upper_bound": 3}, "algorithm.pg_options.tis_upper_bound", 3.0),
    ({"pg_variant": "cispo", "actor_train.cispo_epsilon_low": 3}, "algorithm.pg_options.cispo_epsilon_low", 3.0),
    ({"max_grad_norm": 3}, "actor_train.training_args.max_grad_norm", 3.0),
    ({"track_with": "stdout"}, "tracking.track_with", ("stdout",)),
    ({"track_with": ["wandb", "stdout"]}, "tracking.track_with", ("wandb", "stdout")),
    ({"resume_from_checkpoint": "latest"}, "checkpoint.resume_from", "latest"),
    ({"max_ckpt_to_keep": 2}, "checkpoint.max_to_keep", 2),
    ({"checkpoint_config": {"output_dir": "x"}}, "checkpoint.output_dir", "x"),
    ({"model_update_buffer_size_mb": 2}, "weight_sync.bucket_size_mb", 2),
    ({"rpc_timeout": 2}, "fault.rpc_timeout", 2.0),
    ({"actor_train.model_args": {"flash_attn": "sdpa"}}, "actor_train.model_args.attn_implementation", "sdpa"),
    ({"actor_infer.strategy_args": {"strategy_name": "sglang", "strategy_config": {"tp_size": 2}}}, "actor_infer.strategy_args.strategy_config.tensor_parallel_size", 2),
]  # fmt: skip


@pytest.mark.parametrize(("edits", "canonical", "value"), ALIASES, ids=[c[1] for c in ALIASES])
def test_another_name_means_the_canonical_key_and_warns(files, edits, canonical, value):
    loaded = load_with_warnings(files.rlvr({k: files.Remove if v == "-" else v for k, v in edits.items()}))
    here: object = loaded.config
    for name in canonical.split("."):
        here = getattr(here, name)
    assert here == value
    (message,) = [d.message for d in loaded.warnings if d.id == "W01"]
    target = message.partition(" is another name of ")[2].strip("'")
    assert canonical == target or canonical.startswith(f"{target}.")


def test_pg_clip_means_both_bounds(files):
    options = load(files.rlvr({"pg_clip": 0.3})).algorithm.pg_options
    assert (options.clip_low, options.clip_high) == (0.3, 0.3)


def test_algorithm_keys_at_the_top_level_do_not_warn(files):
    loaded = load_with_warnings(files.rlvr({"adv_estimator": "rloo", "overlong_buffer": {"len": 3}}))
    assert loaded.warnings == ()
    assert loaded.config.algorithm.adv_estimator == "rloo"


def test_a_cleared_section_clears_what_stands_under_its_short_name_too(files):
    path = files.rlvr({"adv_estimator": "rloo", "algorithm": {"pg_variant": "gspo"}})
    algorithm = load(path, ["algorithm=null"]).algorithm
    assert (algorithm.adv_estimator, algorithm.pg_variant) == ("grpo", "ppo")


def test_two_names_with_different_values_are_refused(files, monkeypatch):
    files.text(json.dumps({**files.RLVR, "seed": 1}) + "\n")
    files.text("defaults: [run]\nadv_estimator: rloo\nalgorithm:\n  adv_estimator: grpo\n", "two.yaml")
    monkeypatch.chdir(files.folder)
    canonical = "algorithm.adv_estimator"
    assert found(load, "two.yaml") == [
        f"C016 {canonical}: also given as 'adv_estimator' (two.yaml:2) with another value; keep '{canonical}'"
    ]
    assert found(load, "two.yaml", ["adv_estimator=grpo"]), "an override does not mend a file that contradicts itself"


def test_device_counts_become_device_ids(files):
    gone = {"actor_train.device_mapping": files.Remove, "actor_infer.device_mapping": files.Remove}
    blocks = {"trainer": {"nnodes": 2, "n_gpus_per_node": 4, "device": "cuda"}, "rollout": {"n_gpus_per_node": 2}}
    config = load(files.rlvr({**gone, **blocks, "rollout_batch_size": 8}))
    assert config.actor_train.device_mapping == (0, 1, 2, 3, 8, 9, 10, 11), "nodes of num_gpus_per_node 8, half used"
    assert config.actor_infer.device_mapping == (16, 17), "a node of its own"
    assert config.num_nodes == 3
    written_out = {"actor_train.device_mapping": [0, 1], "actor_infer.device_mapping": files.Remove}
    assert load(files.rlvr({**written_out, "rollout": blocks["rollout"]})).actor_infer.device_mapping == (8, 9)
    sixteen = {"trainer": {"n_gpus_per_node": 16}, "rollout": {"n_gpus_per_node": 1}, "rollout_batch_size": 16}
    config = load(files.rlvr({**gone, **sixteen}))
    assert (config.num_gpus_per_node, config.actor_infer.device_mapping) == (16, (16,))
    assert found(load, files.rlvr({**gone, **blocks, "num_gpus_per_node": 2})) == [
        "C005 trainer.n_gpus_per_node: 4 must be <= num_gpus_per_node 2"
    ]
    on_cpu = {"trainer": {"n_gpus_per_node": 2, "device": "cpu"}, "rollout": {"n_gpus_per_node": 3, "device": "cpu"}}
    config = load(files.rlvr({**gone, **on_cpu}))
    assert (config.actor_train.world_size, config.actor_infer.num_servers) == (2, 3)
    (error,) = found(load, files.rlvr({"trainer": {"n_gpus_per_node": 2}}))
    assert error.startswith("C016 actor_train.device_mapping: also given as 'trainer' (")
    big = {**gone, "trainer": {"nnodes": 1 << 40, "n_gpus_per_node": 1 << 40}}
    assert found(load, files.rlvr(big)) == ["C018 trainer: 1208925819614629174706176: more than 65536 devices"]
    for block, message in (
        ({"n_gpus_per_node": 0}, "C005 trainer.n_gpus_per_node: 0 must be >= 1"),
        ({"nnodes": "2", "n_gpus_per_node": 1}, 'C003 trainer.nnodes: expected int, got str "2"'),
        (
            {"n_gpus_per_node": 1, "device": "tpu"},
            'C004 trainer.device: "tpu" is not one of cpu | cuda',
        ),
        ({"nnodes": 2}, "C006 trainer.n_gpus_per_node: required and not set; give the devices of a node"),
    ):
        assert found(load, files.rlvr({**gone, "trainer": block})) == [message]


REFUSED = [
    ("actor_train.worker_cls", "follows from the role, pg_variant and strategy; remove it"),
    ("actor_train.num_gpus_per_worker", "follows from the role, pg_variant and strategy; remove it"),
    ("async_training.partial_rollout", "use async_training.interrupt.mode: resume (true) or wait (false)"),
    ("use_pg_clip_range", "set algorithm.pg_options.clip_low and clip_high"),
    ("dual_clip_loss", "set algorithm.pg_options.dual_clip to a number (ROLL's is 1 + 2*pg_clip) or null"),
    ("kl_penalty", "set kl_loss_coef > 0 or token_kl_coef > 0; kl_estimator (kl = k1, mse = k2)"),
    ("importance_sampling", "use algorithm.pg_options.ratio_level (seq = sequence)"),
    ("enable_reference", "derived; use algorithm.proximal_logprobs: recompute or behaviour"),
    ("train_infer_correction", "use algorithm.correction"),
    ("response_filter_config", "use algorithm.filter_groups"),
    ("difficulty_mask", "use algorithm.difficulty_low and difficulty_high"),
    ("whiten_rewards", "use norm_mean_type and norm_std_type: batch"),
    ("is_use_additional_prompts", "use algorithm.filter_groups.gen_batch_size"),
    ("actor_train.use_sequence_packing", "use micro_batching and max_tokens_per_microbatch"),
    ("profiler_timeline", "no choice to make here; remove it"),
    ("checkpoint_config.type", "no choice to make here; remove it"),
    ("num_nodes", "no choice to make here; remove it"),
    (
        "actor_train.offload_nccl",
        "weights stay on their devices; remove it, or use optimizer_cpu_offload for the optimizer's state",
    ),
    ("val_greedy", "was never read; remove it"),
    ("actor_train.data_args.dataset_dir", "write paths in file_name"),
    ("actor_train.data_args.interleave_probs", "use domain_interleave_probs"),
    ("actor_infer.generating_args.do_sample", "temperature 0 is greedy"),
    ("actor_infer.generating_args.max_length", "max_new_tokens is the limit"),
    ("actor_infer.generating_args.length_penalty", "no beam search"),
    ("actor_train.training_args.num_train_epochs", "max_steps ends the run"),
    ("actor_train.training_args.bf16", "use model_args.dtype"),
    ("actor_rollout_ref.actor.ppo_epoch", "the nearest key is algorithm.ppo_epochs"),
    ("trainer.save_step", "the nearest key is save_steps"),
]


@pytest.mark.parametrize(("key", "reason"), REFUSED, ids=[c[0] for c in REFUSED])
def test_a_key_of_roll_or_verl_is_refused_with_the_reason(files, key, reason):
    assert found(load, files.rlvr({key: 1})) == [f"C002 {key}: not a key of roll_async: {reason}"]


def test_format_penalty_belongs_to_the_environment(files):
    errors = found(load, files.agentic({"train_env_manager": {"format_penalty": 1}}))
    assert errors == [
        "C002 train_env_manager.format_penalty: not a key of roll_async: was never read; put it in env_config"
    ]


# ---- the report ---------------------------------------------------------------------------------------------------


def test_a_line_is_one_line_of_bounded_length(files):
    with pytest.raises(ConfigError) as caught:
        load(files.rlvr({"a\u2028b" + "x" * 900: 1, "exp_name": ["\n" * 200]}))
    lines = [str(d) for d in caught.value.diagnostics]
    assert len(lines) == 2 and all(len(line) <= 1500 and line.isprintable() for line in lines)
    assert "\\u2028" in lines[0]
    assert len(lines[1].partition("got list ")[2]) == 80


def test_a_file_full_of_errors_is_reported_by_its_first_thousand(files):
    with pytest.raises(ConfigError) as caught:
        load(files.rlvr({f"key{i}": i for i in range(5000)}))
    assert len(caught.value.diagnostics) == 1000


def test_a_default_is_reported_at_the_nearest_written_section(files, monkeypatch):
    files.text("defaults: [run]\n\nasync_training:\n  trigger_parameter_sync_step: 10\n", "k.yaml")
    files.rlvr()
    monkeypatch.chdir(files.folder)
    with pytest.raises(ConfigError) as caught:
        load("k.yaml")
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.id, diagnostic.file, diagnostic.line) == ("C133", "k.yaml", 3)
