"""The comparison of tools/interop: what was trained against the engine's own record."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "interop"))
from run import compare

TURN_1 = {"request": "0.0/1+0", "prompt": [1, 2], "tokens": [3, 4], "logprobs": [-0.5, -0.25], "versions": [[0, 2]]}
TURN_2 = {"request": "0.0/1+1", "prompt": [1, 2, 3, 4, 9], "tokens": [5], "logprobs": [-0.125], "versions": [[1, 1]]}
ROW = {
    "sample_id": "0.0/1",
    "prompt_token_ids": [1, 2],
    "response_token_ids": [3, 4, 9, 5],
    "loss_mask": [1, 1, 0, 1],
    "behaviour_logprobs": [-0.5, -0.25, 0.0, -0.125],
    "version_runs": [[0, 3], [1, 1]],
}


def written(folder, row, engine=(TURN_1, TURN_2)):
    (folder / "trained").mkdir(exist_ok=True)
    (folder / "engine.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in engine))
    (folder / "trained" / "step_00000001.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_what_the_engine_sampled_is_equal_and_counted(tmp_path):
    assert compare(written(tmp_path, ROW)) == {"steps": 1, "trajectories": 1, "tokens": 3}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"response_token_ids": [3, 6, 9, 5]}, "token 1"),
        ({"response_token_ids": [3, 4, 8, 5]}, "token 3"),
        ({"prompt_token_ids": [1, 7]}, "token 0"),
        ({"behaviour_logprobs": [-0.5, -0.25, 0.0, -0.126]}, "token 3"),
        ({"version_runs": [[0, 4]]}, "token 3"),
        ({"loss_mask": [1, 1, 1, 1]}, "token 2"),
        ({"loss_mask": [1, 1, 0, 0]}, "trained 2 of 3"),
        ({"sample_id": "0.0/2"}, "token 0"),
        ({"loss_mask": [0, 0, 0, 0]}, "nothing was trained"),
    ],
)
def test_every_difference_is_found(tmp_path, wrong, message):
    with pytest.raises(AssertionError, match=message):
        compare(written(tmp_path, {**ROW, **wrong}))
