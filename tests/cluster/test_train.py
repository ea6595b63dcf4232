"""`from roll_async import train` on real parts: scripts, a notebook, twice in one process, errors, a Ctrl-C."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

pytest.importorskip("ray")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from roll_async import Run, train
from roll_async.pipelines.rlvr import TrainLoop
from roll_async.pipelines.wire import UserHooks

assets, output, *words = sys.argv[1:]
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 30) for b in range(10, 20)]
SMALL = {
    "actor_infer": {"strategy_args": {"strategy_name": "hf_infer"}}, "rollout_batch_size": 8, "gpus": 0,
    "num_return_sequences_in_group": 4, "prompt_length": 24, "response_length": 24, "output_dir": output,
}
WEIGHT = 0.5


class Counts(TrainLoop):
    def compute_custom_metrics(self, batch):
        return {"mine/groups": len(batch)}


def length(text, ground_truth, extra):
    return {"score": WEIGHT * len(text), "letters": len(text)}


def short(reward, **more):
    return train(assets + "/model", ROWS, reward, **{**SMALL, "steps": 2, **more})


def test_a_run_returns_what_it_left_and_calls_back_in_this_process():
    seen = []
    run = short(
        length, on_step=lambda step, metrics: seen.append((os.getpid(), step, metrics["reward/mean"])),
        hooks=UserHooks(trainer=Counts),
    )
    assert isinstance(run, Run) and [m["step"] for m in run.metrics] == [1, 2] and len(seen) == 2
    assert seen == [(os.getpid(), m["step"], m["reward/mean"]) for m in run.metrics] or seen[0][0] == os.getpid()
    assert all(m["mine/groups"] == 8 and m["reward/metrics/letters"] > 0 for m in run.metrics)
    assert (run.hf / "config.json").is_file() and run.checkpoint.name == "step_00000002"
    assert run.folder == Path(output) / "train" and (run.folder / "metrics.jsonl").is_file()


def test_a_second_one_in_the_process_has_its_own_reward_and_what_a_callback_raises_is_raised():
    def stop(step, metrics):
        raise ZeroDivisionError(f"mine, at {step}")

    try:
        short(lambda text, truth, extra: -1.0, on_step=stop, exp_name="second")
    except ZeroDivisionError as error:
        assert str(error) == "mine, at 1"
    rows = [json.loads(line) for line in (Path(output) / "second" / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward/mean"] for row in rows] == [-1.0]


def test_a_reward_that_always_raises_is_a_runtime_error_with_its_words():
    try:
        short(lambda text, truth, extra: text.no_such_word, exp_name="third")
    except RuntimeError as error:
        assert "no_such_word" in str(error), error


def test_a_ctrl_c_saves_and_is_a_keyboard_interrupt_and_the_run_goes_on_from_there():
    try:
        short(length, steps=4, exp_name="fourth", on_step=lambda step, metrics: signal.raise_signal(signal.SIGINT))
    except KeyboardInterrupt:
        interrupted = True
    assert interrupted
    run = short(length, steps=3, exp_name="fourth", checkpoint={"resume_from": "latest"})
    assert [m["step"] for m in run.metrics] == [1, 2, 3]


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_") and any(word in name for word in words):
            test()
            print("passed", name)
"""


def ran(*command, cwd, timeout=400):
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=patient(timeout), cwd=cwd,
        env={**env, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "passed"), [(("returns", "second", "always_raises"), 3), (("ctrl_c",), 1)], ids=["again", "ctrl-c"]
)
def test_a_script_trains_again_and_again_with_functions_of_its_own(demo_assets, tmp_path, words, passed):
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    said = ran(str(script), str(demo_assets), str(tmp_path / "out"), *words, cwd=tmp_path)
    assert said.count("passed test_") == passed


@pytest.fixture
def home(demo_assets, tmp_path):
    """A folder with the demo's assets where the examples look for them."""
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "demo_assets").symlink_to(demo_assets)
    return tmp_path


def test_the_ten_lines_run_as_typed(home):
    said = ran(str(ROOT / "examples" / "train_in_ten_lines.py"), "2", cwd=home)
    assert "step 2/2" in said and "; model in " in said


NOTEBOOK = """
import asyncio, json, sys

async def cells():
    for cell in json.load(open(sys.argv[1]))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]).replace("STEPS = 40", "STEPS = 2"), globals())

asyncio.run(cells())  # as a kernel does, whose loop runs already
"""


def test_the_notebook_runs_cell_by_cell_where_a_loop_runs_already(home):
    driver = home / "kernel.py"
    driver.write_text(NOTEBOOK)
    said = ran(str(driver), str(ROOT / "examples" / "demo.ipynb"), cwd=home)
    assert "in 2 steps" in said and "12+34=" in said
