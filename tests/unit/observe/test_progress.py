"""The screen: plain lines in a pipe; on a terminal lines that stay, above a live one, whatever a model wrote."""

import io
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from roll_async.observe.progress import Screen, best_and_worst, readable
from roll_async.observe.trace import StartTimeline
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "\x1b[2J\x1b]0;title\x07[bold red]x[/] \r\b\x9b31m \u202eevil \U0001f600 " + "y" * 200_000 + "\nend \ud800"


def line(step, time_s, **more):
    return {
        "step": step, "time_s": time_s, "idle/trainer": 0.25, "reward/mean": 0.5, "throughput/samples_per_s": 100.0,
        "staleness/mean": 0.5, "staleness/max": 1.0, "groups/buffered": 3.0, "groups/in_flight": 4.0, **more,
    }  # fmt: skip


def row(score, response="4", group=1, **more):
    return {
        "group_id": group, "score": score, "prompt": "2+2=", "response": response, "ground_truth": "4",
        "loss_mask": [1, 1, 0], "version_runs": [[3, 2], [4, 1]], "finish_reason": "stop", **more,
    }  # fmt: skip


class Terminal(io.TextIOWrapper):
    """A stdout that is one."""

    def __init__(self, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self):
        return True

    def said(self):
        """What a reader sees, line by line; asserts that nothing moves the cursor but the screen itself."""
        self.flush()
        text = self.buffer.getvalue().decode(self.encoding)
        text = re.sub(r"\x1b\[[0-9;]*m", "", text)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text), repr(text)
        return text.splitlines()


def test_a_resumed_run_expects_its_end_from_its_own_steps(capsys):
    screen = Screen(100)
    screen.show(line(51, 10.0))
    screen.show(line(52, 20.0))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 51/100") and first.endswith("eta 8:10")
    assert second.endswith("eta 8:00")


def test_a_pipe_and_the_log_get_the_same_plain_lines(capsys, caplog):
    caplog.set_level(logging.INFO, "roll_async")
    screen = Screen(2)
    screen.starting(StartTimeline())
    screen.begin(lambda: "waiting")
    screen.show(line(1, 1.0))
    screen.show(line(2, 2.0, **{"validation/lag": 0.0, "validation/version": 2.0, "validation/accuracy": 0.5}))
    screen.samples(2, best_and_worst([row(1.0), row(0.0, HOSTILE, finish_reason="length")]))
    screen.end()
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\r" not in out
    assert out == "".join(f"{record.getMessage()}\n" for record in caplog.records)
    assert re.sub(r"\\x1b.*left", "", out).splitlines()[:6] == [
        "trainer and engines started in 0.0 s",
        "step 1/2  reward 0.500  100 samples/s  staleness 0.50/1  queue 3+4  overlap 75%  eta 0:01",
        "step 2/2  reward 0.500  100 samples/s  staleness 0.50/1  queue 3+4  overlap 75%  eta 0:00",
        "validation of step 2  accuracy 0.500",
        'sample of step 2: prompt "2+2="',
        "  expected: 4",
    ]
    assert '  best: score 1.000  version 3-4  2 tokens  "4"' in out and "  worst: score 0.000  " in out
    assert "2 tokens (cut)" in out and len(out) < 2000


@pytest.mark.parametrize("width", [10, 40, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_no_text_and_no_width_breaks_a_terminal(monkeypatch, width, encoding):
    terminal = Terminal(encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Screen(100)
    screen.show(line(1, 1.0))
    screen.show(line(2, 2.0))
    screen.samples(2, [row(1.0, HOSTILE, prompt=HOSTILE), row(0.0, "", ground_truth=HOSTILE)])
    screen.end()
    said = terminal.said()
    assert max(map(len, said)) <= width
    assert [text for text in said if text.startswith("step ")][0].startswith("step 1/100")
    if width == 200:
        assert "[bold red]x[/]" in "".join(said) and "eta" in said[0]
    assert len(said) < 500


def test_the_legend_comes_once_and_on_a_terminal_alone(monkeypatch, capsys):
    screen = Screen(9)
    screen.show(line(1, 1.0))
    assert "glossary" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    screen = Screen(9)
    screen.show(line(1, 1.0))
    screen.show(line(2, 2.0))
    assert len([text for text in terminal.said() if "docs_roll/glossary.md" in text]) == 1
    assert (ROOT / "docs_roll" / "glossary.md").is_file()


def test_a_step_on_given_rows_has_its_validation_in_its_own_line(capsys):
    measured = {"validation/loss": 0.5, "validation/version": 1.0, "validation/lag": 0.0}
    speed = {"data/epoch": 0.1, "throughput/tokens_per_s": 9.0}
    Screen(9).show({"step": 1, "time_s": 1.0, "trainer/loss": 0.25, **speed, **measured})
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("step 1/9  loss 0.2500  validation 0.5000")


def test_the_prompt_whose_answers_differ_most_is_shown():
    rows = [row(0.5, group=1), row(0.5, group=1), row(0.0, group=2), row(1.0, group=2), row(None, group=3)]
    assert [found["score"] for found in best_and_worst(rows)] == [1.0, 0.0]
    assert best_and_worst([row(None)]) == [] and len(best_and_worst([row(0.0)])) == 1


def test_a_long_text_keeps_its_beginning_and_its_end():
    shown = readable("a" + "b" * 5000 + "\x1b[31m42", longest=100)
    assert shown.startswith("abbb") and shown.endswith(r"\x1b[31m42") and len(shown) < 150


RUN = """
import logging, sys, time, warnings
from roll_async.observe.progress import Screen
from roll_async.observe.run_folder import RunFolder
from roll_async.observe.trace import StartTimeline, starting
sys.path.insert(0, sys.argv[2])
from tests.unit.observe.test_progress import line
RunFolder(sys.argv[1], "run").open_log()
screen = Screen(3)
with StartTimeline().current(print, every_s=0.05) as start:
    screen.starting(start)
    with starting("driver", "ray"):
        time.sleep(0.6)
screen.begin(lambda: "waiting")
for step in (1, 2, 3):
    time.sleep(0.3)
    logging.getLogger("roll_async.x").warning("warning %d", step)
    print(f"print {step}", flush=True)
    screen.show(line(step, 1.0 * step))
time.sleep(0.3)
screen.end()
print("after")
"""


def seen(data):
    """The lines of a terminal after it was sent this: newlines, returns, and the sequences that rich uses."""
    lines, at, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", data):
        if part == "\n":
            at, column = at + 1, column
            lines += [""] * (at + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part.endswith("A") and part.startswith("\x1b"):
            at -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[at] = ""
        elif not part.startswith("\x1b"):
            lines[at] = lines[at][:column].ljust(column) + part + lines[at][column + len(part) :]
            column += len(part)
    return [text.rstrip() for text in lines]


@pytest.mark.slow
def test_warnings_and_prints_stand_above_the_live_line_and_steps_stay(tmp_path):
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), str(ROOT)], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    data = b""
    while True:
        try:
            data += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait(patient(60)) == 0
    text = data.decode()
    assert (
        "starting, 0 s: driver ray 0 s" in text
        and "waiting for answers" in text
        and "\x1b[33mWARNING: warning 1" in text
    )
    shown = [found for found in seen(text) if found and "glossary" not in found]
    assert shown == [
        "trainer and engines started in 0.6 s",
        *(
            part
            for step in (1, 2, 3)
            for part in (
                f"WARNING: warning {step}",
                f"print {step}",
                f"step {step}/3  reward 0.500  100 samples/s  staleness 0.50/1  queue 3+4  overlap 75%  "
                f"eta 0:0{3 - step}",
            )
        ),
        "after",
    ], text
    log = (tmp_path / "run" / "run.log").read_text()
    assert "step 3/3  reward" in log and "warning 1" in log and "\x1b" not in log
