"""What a user types wrongly: each command ends with exit code 2 and one line with the remedy, and makes nothing."""

import re

import pytest

from roll_async.cli import main

pytest.importorskip("megatron.core")

CONFIG = "rlvr_config_async_cpu"

CONFIGS = {
    "": "no config given; use --config",
    "--config": "'--config' needs a value",
    "--config nowhere": "neither a file here nor a shipped config; shipped are",
    "--config nowhere.yaml": "neither a file here nor a shipped config",
    "--config rlvr_config_async_cpi": "did you mean 'rlvr_config_async_cpu'?",
    "--config folder": "folder:1: .* not a file",
    "--config empty.yaml": "empty.yaml:1: .* it is empty",
    "--config list.yaml": "list.yaml:1: .* the top is a list",
    "--config tab.yaml": "tab.yaml:2: .* cannot start any token",
    "--config twice.yaml": "twice.yaml:2: .* given twice",
    "--config bytes.yaml": "bytes.yaml:1: .* not UTF-8",
    "--config CONFIG max_stepz=3": "unknown key; did you mean 'max_steps'?",
    "--config CONFIG max_steps=three": "max_steps: expected int",
    "--config CONFIG max_steps=-1": "max_steps: -1 must be >= 1",
    "--config CONFIG max_steps": "'max_steps' is neither an option nor KEY=VALUE",
    "--config CONFIG max_steps=": "use KEY=null to clear",
    "--config CONFIG =3": "'=3' is neither an option nor KEY=VALUE",
    "--config CONFIG --force": "unknown option '--force'",
    "--config CONFIG CONFIG": "is neither an option nor KEY=VALUE",
    "--config CONFIG pretrain=./nowhere TRAIN HELD_OUT": "model folder ./nowhere does not exist",
    "--config CONFIG MODEL actor_train.data_args.file_name=x.jsonl HELD_OUT": "data file x.jsonl does not exist",
    "--config CONFIG async_generation_ratio=-1": "async_generation_ratio: -1 must be >= 0",
    "--config CONFIG async_generation_ratio=nan": "async_generation_ratio: expected float",
    "--config CONFIG algorithm.pg_variant=ppoo": "did you mean 'ppo'?",
    "--config CONFIG algorithm.adv_estimator=gpro": "did you mean 'grpo'?",
    "--config CONFIG algorithm.pg_variant=my_loss.none": "there is no module my_loss in",
    "--config CONFIG rewards.addition.type=exactmatch": "did you mean 'exact_match'?",
    "--config CONFIG actor_infer.strategy_args.strategy_name=vlm": "did you mean 'vllm'?",
    "--config CONFIG actor_train.training_args.learning_rate=fast": "learning_rate: expected float",
    "--config CONFIG rollout_batch_size=0": "rollout_batch_size: 0 must be >= 1",
    "--config CONFIG num_return_sequences_in_group=1.5": "expected int, got float 1.5",
    "--config CONFIG actor_train.device_mapping=range(0,": "is not a device list",
    "--config CONFIG tracking.track_with=wandbb": "did you mean 'wandb'?",
    "--config CONFIG MODEL TRAIN HELD_OUT checkpoint.resume_from=nowhere": "nowhere: no such folder",
}
"""After `roll-async run`."""

OTHERS = {
    "nothing": "unknown command 'nothing'; there are demo",
    "runn": "did you mean 'run'?",
    "--vers": "Did you mean '--version'?",
    "validate": "no config given",
    "validate nowhere": "neither a file here nor a shipped config",
    "validate list.yaml": "the top is a list",
    "show nowhere": "neither a file here nor a shipped config",
    "show CONFIG --memory --device-gb -3": "-3.0 is not in the range",
    "show CONFIG --memory --device-gb many": "'many' is not a valid number",
    "plan nowhere": "neither a file here nor a shipped config",
    "plan CONFIG max_steps=x": "max_steps: expected int",
    "simulate nowhere": "neither a file here nor a shipped config",
    "simulate CONFIG --steps 0": "0 is not in the range",
    "simulate CONFIG --seed x": "'x' is not a valid integer",
    "convert": "Missing argument 'SOURCE'",
    "convert nowhere out": "nowhere: no such folder",
    "port nowhere": "No such file or directory",
    "port list.yaml": "the top is a list",
    "new full --model ./nowhere --data gsm8k": "--gpus: needed where nobody can be asked",
    "new full --model Qwen/Qwen2.5-0.5B-Instruct --data gsm8k --gpus 1": "full",
    "new mine --model Qwen/Qwen2.5-0.5B-Instruct --data x.jsonl --gpus 1": "x.jsonl",
    "new mine --model ./nowhere --data gsm8k --gpus 1": "nowhere",
    "new mine --gpus x": "'x' is not a valid integer",
    "doctor --jsn": "unknown option '--jsn'",
    "runs nowhere": "nowhere is no folder",
    "view": "Missing argument 'RUN...'",
    "view nowhere": "nowhere is no folder: give the folder of a run",
    "view folder": "folder has neither run.json nor metrics.jsonl",
    "view folder --port 99999999": "99999999 is not in the range",
    "status nowhere": "nowhere is no folder",
    "status folder": "neither run.json nor metrics.jsonl",
    "compare nowhere folder": "nowhere is no folder",
    "compare folder": "Missing argument 'B'",
    "samples nowhere": "nowhere is no folder",
    "samples folder --step -1": "-1 is not in the range",
    "samples folder -n 0": "0 is not in the range",
    "scale": "Missing argument 'RUN'",
    "scale nowhere 2": "unexpected extra argument",
    "eval": "Missing argument 'TARGET'",
    "eval nowhere --config nowhere": "neither a file here nor a shipped config",
    "rollout --config nowhere": "neither a file here nor a shipped config",
    "rollout --config CONFIG": "rlvr has no worlds to run; rollout takes agentic configs, eval the others",
    "certify qwen33": "did you mean 'qwen3'?",
    "certify gpt2": "no family or folder 'gpt2'; families: qwen2",
    "certify GPT2ForCausalLM": "architecture GPT2ForCausalLM has no entry",
    "certify folder": "folder has no config.json; name a family",
    "certify qwen3 --engine vlm": "'vlm' is not one of",
    "certify qwen3 --pages list.yaml": "--pages list.yaml: .*",
    "serve-policy": "Missing argument 'MODEL'",
    "serve-policy folder": "model folder folder does not exist or holds no config.json",
    "serve-policy folder --port x": "'x' is not a valid integer",
    "serve-policy folder --engine vlm": "'vlm' is not one of",
    "serve-policy folder --host 0.0.0.0": "give a token with --token-env NAME",
    "launch CONFIG --to slum": "'slum' is not one of",
    "launch --to slurm": "expected one config, got 0",
    "launch nowhere --to slurm": "neither a file here nor a shipped config",
    "sft nowhere": "neither a file here nor a shipped config",
    "sft CONFIG": "sft has no engines: .* which is rlvr, by roll-async run",
    "sft sft_demo_cpu max_steps=x": "max_steps: expected int",
    "dpo dpo_demo_cpu beta=-1": "beta: -1 must be > 0",
    "demo max_stepz=1": "unknown key; did you mean 'max_steps'?",
    "demo --smal": "unknown option '--smal'",
    "demo --small --assets-only agents": "--small: of the demo's own model only",
    "demo --assets-only chess": "'chess' is not one of 'addition', 'agents', 'word_problems', 'gsm8k', 'images'",
    "bench nowhere": "no script nowhere; there are",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with files that no command can use."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, content in {
        "empty.yaml": b"",
        "list.yaml": b"- 1\n",
        "tab.yaml": b"a:\n\tb: 1\n",
        "twice.yaml": b"seed: 1\nseed: 2\n",
        "bytes.yaml": b"\xff\xfe\x00",
    }.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").write_text("mine")
    return folder


@pytest.fixture(scope="module")
def words(demo_assets):
    """What a word of the tables stands for."""
    return {
        "CONFIG": CONFIG,
        "MODEL": f"pretrain={demo_assets}/model",
        "TRAIN": f"actor_train.data_args.file_name={demo_assets}/train.jsonl",
        "HELD_OUT": f"validation.data_args.file_name={demo_assets}/validation.jsonl",
    }


def content(folder):
    return sorted(str(path) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("typed", "said"),
    [*((f"run {words}".strip(), said) for words, said in CONFIGS.items()), *OTHERS.items()],
)
def test_what_is_typed_wrongly_is_one_line_and_makes_nothing(inputs, words, monkeypatch, capfd, typed, said):
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = content(inputs)
    assert main([words.get(word, word) for word in typed.split()]) == 2
    captured = capfd.readouterr()
    lines = (captured.out + captured.err).splitlines()
    told = [line for line in lines if not re.match(r" *usage: |invalid: |starting, ", line)]
    assert len(told) == 1, lines
    assert re.search(said, told[0]), told[0]
    assert content(inputs) == before
