"""Trajectories for people: a text and a strip of pictures for some of them, in the run folder.

trajectories/000012_FrozenLake_solved.txt      what was said, turn by turn
trajectories/000012_FrozenLake_solved.png      the world after every move
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from roll_async.agents.protocol import Ending, Task
from roll_async.schema import Sample

logger = logging.getLogger(__name__)

_EVERY = 100
_LONGEST = 12  # pictures of a strip
_COLOURS = {
    "_": "#dbe9f6", "P": "#2b6cb0", "O": "#1a202c", "G": "#48bb78", "X": "#c53030", "V": "#276749", "#": "#4a5568",
    "S": "#2c5282",
}  # fmt: skip


class TrajectoryLog:
    """Writes the first trajectory and every hundredth after it, in a thread of its own. A resumed run goes on counting
    after what it has written, so that it replaces nothing.
    """

    def __init__(self, folder: Path) -> None:
        written = [int(path.name.partition("_")[0]) for path in folder.glob("*_*.txt")]
        # The next one is the newest number + 100: it is a hundredth again, and its name is new.
        self._folder, self._count = folder, max(written) + _EVERY - 1 if written else 0
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectories")

    def add(self, name: str, task: Task, ending: Ending, rows: Sequence[Sample]) -> None:
        """One trajectory that ended with trust."""
        self._count += 1
        if (self._count - 1) % _EVERY == 0 and ending.story:
            stem = self._folder / f"{self._count:06d}_{task.tag}_{ending.outcome.value}"
            self._writer.submit(_write, stem, name, task, ending, len(rows)).add_done_callback(_tell)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()


def _tell(done: object) -> None:
    error = done.exception()  # type: ignore[attr-defined]
    if error is not None:
        logger.warning("a trajectory could not be written: %s", error)


def _write(stem: Path, name: str, task: Task, ending: Ending, num_rows: int) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    head = (
        f"{name}  {task.tag}  seed {task.seed}\n{ending.outcome.value}  reward {ending.reward:g}  {num_rows} row(s)"
        f"  {ending.reason}\n"
    )
    said = "\n".join(f"--- {role}\n{text}" for role, text in ending.story)
    # A model may write half of a surrogate pair, which UTF-8 cannot hold.
    stem.with_suffix(".txt").write_text(f"{head}\n{said}\n", encoding="utf-8", errors="replace")
    if ending.frames:
        draw(ending.frames, stem.with_suffix(".png"), head.strip())


def draw(frames: Sequence[Sequence[str]], path: Path, title: str) -> None:
    """The first frames side by side, one square per character."""
    # Not pyplot: it keeps its figures in globals, and this runs in a thread.
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    shown = frames[:_LONGEST]
    rows, columns = len(shown[0]), max(len(line) for line in shown[0])
    figure = Figure(figsize=(1.6 * len(shown) + 0.4, 2.4), dpi=80)
    for number, frame in enumerate(shown):
        axes = figure.add_subplot(1, len(shown), number + 1)
        for r, line in enumerate(frame):
            for c, symbol in enumerate(line):
                colour = _COLOURS.get(symbol, "#ffffff")
                axes.add_patch(Rectangle((c, r), 1, 1, facecolor=colour, edgecolor="white"))
                dark = symbol in "POXV#S"
                axes.text(c + 0.5, r + 0.5, symbol, ha="center", va="center", color="white" if dark else "#2d3748")
        axes.set_xlim(0, columns)
        axes.set_ylim(rows, 0)  # row 0 on top
        axes.set_aspect("equal")
        axes.axis("off")
        axes.set_title(str(number), fontsize=8)
    figure.suptitle(title, fontsize=8)
    figure.savefig(path)
