"""`roll-async new` writes a config that is valid and fits, and a reward that works; it overwrites nothing."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
pytestmark = pytest.mark.slow

from roll_async import train
from roll_async.cli import main
from roll_async.config.api import load
from roll_async.launch.checks.device_memory import device_uses
from roll_async.launch.checks.gate import check_supported
from roll_async.prompts.rows import found_columns

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def new(capsys, *args):
    code = main(["new", *args])
    said = capsys.readouterr()
    return code, said.out + said.err


def rows(name="rows.jsonl", **columns):
    Path(name).write_text(json.dumps(columns) + "\n")
    return name


@pytest.mark.parametrize(
    ("model", "gpus"),
    [(QWEN, 1), (QWEN, 2), ("Qwen/Qwen2.5-7B", 1), ("Qwen/Qwen2.5-7B", 8), ("acme/Other-1.7B-v2", 6), (QWEN, 0)],
)
def test_what_it_writes_is_valid_fits_and_takes_one_optimizer_step_a_batch(capsys, model, gpus):
    code, said = new(capsys, "mine", "--model", model, "--data", "gsm8k", "--gpus", str(gpus), "--reward", "math_rule")
    assert code == 0 and "next: roll-async run --config mine/config.yaml" in said
    assert [path.name for path in Path("mine").iterdir()] == ["config.yaml"]
    assert main(["validate", "mine/config.yaml"]) == 0 and "warning" not in capsys.readouterr().out
    config = load("mine/config.yaml")
    assert config.optimizer_steps_per_batch == 1 and config.is_async == (gpus != 1)
    assert len({d for _, role in config.roles() for d in role.device_mapping or ()}) == gpus
    if gpus and "acme" not in model:
        assert all(use.problem is None for use in device_uses(config, int(80e9)))
    assert 20 <= len(Path("mine/config.yaml").read_text().splitlines()) <= 30


@pytest.mark.parametrize("name", ["\U0001f600 \xe9 ${x}, 1", "rows, new", "a\nb: 1"])
def test_every_character_of_a_name_is_in_the_config_as_it_is(capsys, name):
    data = Path(rows(question="2 + 3?", answer="5")).rename(f"{name}.jsonl")
    code, said = new(capsys, name, "--model", f"acme/{name}-1.7B", "--data", str(data), "--gpus", "1")
    assert code == 0 and f"next: roll-async run --config '{name}/config.yaml'" in said
    config = load(str(Path(name) / "config.yaml"))
    assert (config.exp_name, config.pretrain) == (name, f"acme/{name}-1.7B")
    assert config.actor_train.data_args.file_name == (str(data.resolve()),)


def test_without_a_reward_it_writes_one_that_works_beside_the_config(capsys):
    data = rows(question="2 + 3?", answer="5")
    code, said = new(capsys, "mine", "--model", QWEN, "--data", data, "--gpus", "1")
    assert code == 0 and "wrote mine/reward.py" in said
    config = check_supported("mine/config.yaml").config
    assert config.rewards["mine"].type == "reward.score"
    assert config.actor_train.data_args.file_name == (str(Path(data).resolve()),)
    assert (config.actor_train.data_args.prompt, config.actor_train.data_args.ground_truth) == ("question", "answer")
    spec = importlib.util.spec_from_file_location("reward", "mine/reward.py")
    spec.loader.exec_module(reward := importlib.util.module_from_spec(spec))
    assert [reward.score(text, "It is 1,005", {}) for text in ("so 1005.", "1006", "none")] == [1.0, 0.0, 0.0]
    assert [reward.score(text, "Yes", {}) for text in ("I say yes", "no")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "ground_truth": "b"}, {}),
        ({"prompt": "a", "ground_truth": "b"}, {"prompt": "prompt"}),
        ({"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "b"}}, {"messages": "prompt"}),
        ({"problem": "a", "solution": 5}, {"prompt": "problem", "ground_truth": "solution"}),
    ],
)
def test_the_columns_of_the_data_decide_the_keys(columns, keys):
    assert found_columns(columns, "row 1") == keys


def test_a_folder_with_files_is_left_as_it_is(capsys):
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("dear")
    code, said = new(capsys, "mine", "--model", QWEN, "--data", "gsm8k", "--gpus", "1")
    assert code == 2 and said == "roll-async new: mine is there and not empty; name another folder, which is made\n"
    assert [path.name for path in Path("mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data", "gsm8k"], "--model, --gpus: needed where nobody can be asked"),
        (["--model", "acme/thing", "--data", "gsm8k", "--gpus", "1"], "its name has no size"),
        (["--model", QWEN, "--data", "gone.jsonl", "--gpus", "1"], "data file gone.jsonl does not exist"),
        (["--model", QWEN, "--data", "odd.jsonl", "--gpus", "1"], "no column messages, prompt or question among text"),
        (["--model", QWEN, "--data", "gsm8k", "--gpus", "1", "--reward", "llm_judge"], "needs a section of its own"),
        (["--model", QWEN, "--data", "gsm8k", "--gpus", "1", "--reward", "gone.score"], "there is no module gone"),
        (["--model", "Qwen/Qwen2.5-72B", "--data", "gsm8k", "--gpus", "1"], "on 1 GPUs: devices 0: "),
        (["--model", QWEN, "--data", "gsm8k", "--gpus", "9"], "9 is not in the range 0<=x<=8"),
    ],
)
def test_what_cannot_be_written_is_one_line_and_exit_code_2(capsys, args, words):
    rows("odd.jsonl", text="a")
    code, said = new(capsys, "mine", *args)
    assert code == 2 and words in said and said.count("\n") == 1, said
    assert not Path("mine").exists()


GOOD = {"model": QWEN, "data": [{"prompt": "1+1?", "ground_truth": "2"}], "reward": "math_rule", "gpus": 0}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"data": []}, "data: no rows"),
        ({"data": [{"prompt": "a"}]}, r"data\[0\]: no column ground_truth or answer among prompt"),
        ({"data": [*GOOD["data"], {"question": "a", "answer": "b"}]}, r"data\[1\]: other columns than data\[0\]"),
        ({"data": [{"prompt": "a", "ground_truth": {1}}]}, r"data\[0\]: .* not JSON serializable"),
        ({"reward": 7}, "reward: 7 is neither a function nor the name of a rule"),
        ({"reward": "gone.score"}, "there is no module gone"),
        ({"max_stepps": 3}, "max_stepps: unknown key; did you mean 'max_steps'"),
        ({"actor_train": {"training_args": {"learning_rate": "fast"}}}, "learning_rate: expected"),
        (
            {"tracking": {"tracker_kwargs": {"a": "\U0001f600\u2028\x7f"}}, "seed": "x"},
            "error C003: seed: expected int",
        ),
        ({"seed": {1}}, "seed: .* not JSON serializable; give a number, a text, a list or a dict"),
        ({"model": "acme/thing"}, "its name has no size"),
    ],
)
def test_bad_input_to_train_is_a_value_error_of_one_line(changed, words):
    with pytest.raises(ValueError, match=words) as raised:
        train(**{**GOOD, **changed})
    assert "\n" not in str(raised.value)


def test_a_reward_that_cannot_be_pickled_is_said_so():
    lock = __import__("threading").Lock()
    with pytest.raises(ValueError, match=r"reward: .* cannot be sent to the reward processes: cannot pickle"):
        train(**{**GOOD, "reward": lambda text, truth, extra: float(lock.locked())})
