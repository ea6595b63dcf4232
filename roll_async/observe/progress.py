"""The screen of a run: in a pipe plain lines; on a terminal lines that stay, in colours, above one that is live.

Every line is in run.log as well, plain and whole. What a model wrote is shown escaped and cut: nothing of it can move
the cursor, colour the screen or flood it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from roll_async.observe.sample_dump import Row
from roll_async.observe.trace import StartTimeline

logger = logging.getLogger(__name__)

_REFRESHES_PER_S = 4
_LONGEST_TEXT = 600
"""Characters of a prompt or an answer: its beginning and its end, where the answer mostly is."""
_LEGEND = "staleness, queue, overlap, group, canary: see docs_roll/glossary.md"
_DOING = {
    "starting": "first weights to the engines",
    "waiting": "waiting for answers",
    "synchronizing": "pushing weights",
}
"""States of the trainer whose names do not say it."""


def duration(seconds: float) -> str:
    """1:05 or 2:03:04."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def tell_start(line: str) -> None:
    """What a start is at, before there is a screen."""
    print(line, flush=True)


def readable(text: object, *, longest: int = _LONGEST_TEXT, keep: str = "") -> str:
    r"""A text of a model for a screen: cut in its middle; what does not print is escaped, but for what is in `keep`.

    >>> readable("a\x1b[31m\nb")
    'a\\x1b[31m\\nb'
    """
    whole = str(text)
    if (left_out := len(whole) - longest) > 0:
        whole = f"{whole[: longest // 2]} [... {left_out} characters ...] {whole[-(longest // 2) :]}"
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in whole)


def best_and_worst(rows: Sequence[Row]) -> list[Row]:
    """Of the prompt whose answers' scores differ most, the best and the worst answer; one where there is one, none
    where none has a score.
    """
    groups: dict[object, list[Row]] = {}
    for row in rows:
        if row["score"] is not None:
            groups.setdefault(row["group_id"], []).append(row)
    if not groups:
        return []
    ranked = [sorted(group, key=_score, reverse=True) for group in groups.values()]
    widest = max(ranked, key=lambda group: _score(group[0]) - _score(group[-1]))
    return [widest[0], widest[-1]] if len(widest) > 1 else widest


def _score(row: Row) -> float:
    score = row["score"]
    assert isinstance(score, float | int)
    return float(score)


def facts(row: Row) -> str:
    """Score, versions of the weights that sampled it, and length of an answer."""
    mask, runs = row["loss_mask"], row["version_runs"]
    assert isinstance(mask, Sequence) and isinstance(runs, Sequence)
    versions = sorted({version for version, _ in runs})
    shown = "-".join(map(str, dict.fromkeys((versions[0], versions[-1])))) if versions else "?"
    cut = " (cut)" if row["finish_reason"] == "length" else ""
    return f"score {_score(row):.3f}  version {shown}  {sum(mask)} tokens{cut}"


class Screen:
    """Prints to stdout. `samples` may be called by another thread."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._first_step: int | None = None
        """The first step of this process; above 0 in a resumed run."""
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._terminal = sys.stdout.isatty() and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._state: Callable[[], str] = str
        self._start: StartTimeline | None = None
        """Of the roles, while they start."""
        self._under_way, self._eta = "starting", ""
        self._since = time.monotonic()
        """When the step under way began."""

    def starting(self, start: StartTimeline) -> None:
        """The roles start: on a terminal the live line shows what is under way, in a pipe the timeline tells it."""
        self._start = start
        if self._terminal:
            start.tell = None
            self._begin_live()

    def begin(self, state: Callable[[], str]) -> None:
        """The steps begin. `state`: what the trainer does now."""
        if self._start is not None:
            self._say([(f"trainer and engines started in {self._start.elapsed_s():.1f} s", "dim")])
            self._start = None
        self._state, self._under_way, self._since = state, "first step", time.monotonic()
        self._begin_live()

    def show(self, metrics: Mapping[str, float]) -> None:
        """The line of a training step, and that of a validation in its record."""
        step = int(metrics["step"])
        first = self._first_step is None
        if self._first_step is None:
            self._first_step = step
        done = step - self._first_step + 1
        self._eta = f"eta {duration(metrics['time_s'] / done * (self._max_steps - step))}"
        last = step >= self._max_steps
        self._under_way = "last step done" if last else f"step {step + 1}/{self._max_steps}"
        self._since = time.monotonic()
        of_samples = "reward/mean" in metrics
        parts = _of_samples(metrics) if of_samples else _of_given_rows(metrics)
        self._say([(f"step {step}/{self._max_steps}", "bold"), *parts, (self._eta, "dim")])
        if first and of_samples and self._terminal:
            self._console.print(Text(self._encodable(_LEGEND), "dim italic"))
        if "validation/lag" in metrics:
            self.validation(metrics)

    def validation(self, found: Mapping[str, float]) -> None:
        """The line of a validation."""
        keys = [key for key in found if key.startswith("validation/") and key.endswith(("/accuracy", "/reward"))]
        names = [key.removeprefix("validation/").removeprefix("sets/") for key in keys]
        parts = [(f"{name} {found[key]:.3f}", "magenta") for name, key in zip(names, keys, strict=True)]
        if "validation/samples" in found:
            parts.append((f"{found['validation/samples']:.0f} samples", ""))
        if not parts:  # of sft and dpo, whose line of the step has it
            return
        self._say([(f"validation of step {found.get('validation/version', 0):.0f}", "bold magenta"), *parts])

    def samples(self, step: int, picked: Sequence[Row]) -> None:
        """The panel of one prompt and its answers, best first."""
        if not picked:
            return
        names = ("best", "worst") if len(picked) > 1 else ("answer",)
        lines = [(f"sample of step {step}", f'prompt "{readable(picked[0]["prompt"])}"')]
        if picked[0]["ground_truth"]:
            lines.append(("expected", readable(picked[0]["ground_truth"])))
        lines += [
            (name, f'{facts(row)}  "{readable(row["response"])}"') for name, row in zip(names, picked, strict=True)
        ]
        text = "\n  ".join(f"{name}: {value}" for name, value in lines)
        logger.info(text)
        if not self._terminal:
            self._write(text)
            return
        body: list[RenderableType] = []
        for name, key, style in (("prompt", "prompt", "cyan"), ("expected", "ground_truth", "")):
            if picked[0][key]:
                body.append(self._entry(name, style, readable(picked[0][key], keep="\n")))
        for name, row, style in zip(names, picked, ("green", "red"), strict=False):
            body.append(self._entry(name, style, readable(row["response"], keep="\n"), facts(row)))
        head = Text(f"step {step}", "bold")
        self._console.print(Panel(Group(head, *body), border_style="dim"))

    def _entry(self, name: str, style: str, text: str, said: str = "") -> Table:
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(width=8, overflow="fold")
        grid.add_column(ratio=1, overflow="fold")
        label = Text(name, f"bold {style}", overflow="fold")  # the ellipsis of other overflows is no ASCII
        if said:
            grid.add_row(label, Text(said, style, overflow="fold"))
        grid.add_row("" if said else label, Text(self._encodable(text), overflow="fold"))
        return grid

    def end(self) -> None:
        """End the live line, so that later output starts on a new line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, parts: Sequence[tuple[str, str]]) -> None:
        """A line of parts with their styles: whole in a pipe and in the log; on a terminal as many as fit."""
        whole = "  ".join(part for part, _ in parts)
        logger.info(whole)
        if not self._terminal:
            self._write(whole)
            return
        line = Text(no_wrap=True, overflow="crop")
        for number, (part, style) in enumerate(parts):
            if number and line.cell_len + 2 + len(part) > self._console.width:
                break
            line.append("  " if number else "").append(self._encodable(part), style)
        self._console.print(line)

    def _write(self, text: str) -> None:
        sys.stdout.write(self._encodable(text) + "\n")  # as one: another thread may print, too
        sys.stdout.flush()

    def _encodable(self, text: str) -> str:
        encoding = sys.stdout.encoding or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def _begin_live(self) -> None:
        if not self._terminal or self._live is not None:
            return
        # What others print while the line is live goes above it; stderr only where it is the same terminal.
        self._live = Live(
            get_renderable=self._live_line,
            console=self._console,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def _live_line(self) -> Text:
        now = time.monotonic()
        if self._start is not None:
            text = self._start.line()
        else:
            state = self._state()
            text = f"{self._under_way}  {_DOING.get(state, state)}  {duration(now - self._since)}  {self._eta}"
        return Text(self._encodable(text), "dim", no_wrap=True, overflow="crop")


def _of_samples(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Parts of a step's line, with their styles."""
    return [
        (f"reward {metrics['reward/mean']:.3f}", "bold green"),
        (f"{metrics['throughput/samples_per_s']:.0f} samples/s", "cyan"),
        (f"staleness {metrics['staleness/mean']:.2f}/{metrics['staleness/max']:.0f}", ""),
        (f"queue {metrics['groups/buffered']:.0f}+{metrics['groups/in_flight']:.0f}", ""),
        (f"overlap {1 - metrics['idle/trainer']:.0%}", ""),
    ]


def _of_given_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Likewise, of sft and dpo runs."""
    parts = [(f"loss {metrics['trainer/loss']:.4f}", "bold green")]
    if "rewards/accuracies" in metrics:
        parts.append((f"accuracy {metrics['rewards/accuracies']:.2f}", ""))
    if "validation/loss" in metrics:
        parts.append((f"validation {metrics['validation/loss']:.4f}", "magenta"))
    parts.append((f"epoch {metrics['data/epoch']:.2f}", ""))
    return [*parts, (f"{metrics['throughput/tokens_per_s']:.0f} tokens/s", "cyan")]
