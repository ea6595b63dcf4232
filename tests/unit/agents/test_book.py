"""Trajectories for people are written where a run keeps them, and replace none."""

import pytest

from roll_async.agents.book import TrajectoryLog
from roll_async.agents.protocol import Ending, Task
from roll_async.schema import Outcome

STORY = (("user", "seed 3"), ("assistant", "left \ud83d"))


def written(folder, count, **ending):
    book = TrajectoryLog(folder)
    for number in range(count):
        task = Task(tag="Maze", seed=number, validation=False)
        book.add(f"{number}.0/1", task, Ending(outcome=Outcome.SOLVED, reward=0.5, story=STORY, **ending), [None] * 2)
    book.close()
    return sorted(path.name for path in folder.glob("*"))


def test_the_first_and_every_hundredth_are_written_and_a_resumed_run_goes_on_counting(tmp_path):
    folder = tmp_path / "run" / "trajectories"
    assert written(folder, 101) == ["000001_Maze_solved.txt", "000101_Maze_solved.txt"]
    text = (folder / "000101_Maze_solved.txt").read_text(encoding="utf-8")
    head = "100.0/1  Maze  seed 100\nsolved  reward 0.5  2 row(s)  \n"
    assert text == f"{head}\n--- user\nseed 3\n--- assistant\nleft ?\n"
    assert written(folder, 1) == ["000001_Maze_solved.txt", "000101_Maze_solved.txt", "000201_Maze_solved.txt"]


@pytest.mark.slow
def test_frames_of_a_world_are_a_strip_of_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    assert written(tmp_path, 1, frames=(("P_", "_G"), ("_P", "_G")))[0] == "000001_Maze_solved.png"
    assert (tmp_path / "000001_Maze_solved.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_told_and_ends_nothing(tmp_path, caplog):
    folder = tmp_path / "a file"
    folder.write_text("")
    assert written(folder, 1) == [] and "a trajectory could not be written" in caplog.text


def test_a_trajectory_without_a_story_is_counted_and_not_written(tmp_path):
    book = TrajectoryLog(tmp_path)
    book.add("0", Task(tag="Maze", seed=0, validation=False), Ending(outcome=Outcome.FAILED), [])
    book.close()
    assert not list(tmp_path.glob("*"))
