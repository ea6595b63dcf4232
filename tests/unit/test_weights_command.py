"""What weight pushes send, as two commands print it."""

from pathlib import Path

import pytest

from roll_async.cli import main

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "async_dapo_7b.yaml")


def rows(text):
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]


@pytest.mark.slow
def test_simulate_tells_models_from_7b_to_1t_on_16_to_1024_devices_beside_what_is_published(capsys):
    assert main(["simulate", "--weights"]) == 0
    head, *found = rows(capsys.readouterr().out)
    assert head[:2] == ["model", "devices"] and len(found) == 5 * 4
    told = {(row[0], int(row[1])): row for row in found}
    assert {row[1] for row in found} == {"16", "64", "256", "1024"}
    assert told["671B", 256][-1] == "2.4 to 2.8 s" and told["1T", 256][-1] == "7.2 s"
    assert told["1T", 16][2] == "an engine needs 64 devices"
    seconds = float(told["235B-A22B", 256][5])
    assert main(["simulate", "--weights", "--network-gb-s", "25"]) == 0
    slower = {(row[0], row[1]): row for row in rows(capsys.readouterr().out)}
    assert float(slower["235B-A22B", "256"][5]) == pytest.approx(2 * seconds, rel=0.05)
    assert main(["simulate", "--weights", "--seed", "3"]) == 2


def test_show_tells_the_bytes_of_every_link_of_a_config(capsys):
    assert main(["show", CONFIG, "--weights"]) == 0
    out = capsys.readouterr().out
    assert "weight transport: nccl" in out and "model: 15.23 GB from 8 trainer ranks to 8 replicas of 1 ranks" in out
    (_, first, relay) = rows(out)
    assert first == ["8 ranks of stage 0", "rank 0 of replica 0", "8", "1.904"]
    assert relay == ["a rank of a replica", "the same rank of the next", "7", "15.231 at most"]
    split = "actor_infer.strategy_args.strategy_config.tensor_parallel_size=2"
    staged = "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size=2"
    assert main(["show", CONFIG, split, staged, "--weights"]) == 0
    found = rows(capsys.readouterr().out)[1:-1]
    assert [row[:2] for row in found] == [
        [f"4 ranks of stage {stage}", f"rank {rank} of replica 0"] for stage in (0, 1) for rank in (0, 1)
    ]
    assert sum(int(row[2]) * float(row[3]) for row in found) == pytest.approx(15.23, rel=0.01)


def test_bad_input_is_one_line(capsys):
    for args, said in (
        (["nowhere.yaml"], "nowhere.yaml"),
        ([CONFIG, "--network-gb-s", "fast"], "'fast'"),
        ([CONFIG, "--network-gb-s", "0"], "x>0"),
        ([CONFIG, "pretrain=someone/Other-9B"], "the sizes of someone/Other-9B are not known"),
    ):
        assert main(["show", *args, "--weights"]) == 2
        err = capsys.readouterr().err
        assert said in err and "Traceback" not in err
