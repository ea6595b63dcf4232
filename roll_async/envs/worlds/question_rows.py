"""Questions from files: JSON lines with `question` and `answer`, and the rows that RLVR runs read (docs_roll/data.md),
so that one file serves both.

    {"question": "6*7=", "answer": "42"}
    {"messages": [{"role": "user", "content": "6*7="}], "ground_truth": "42"}                             ROLL
    {"prompt": [...], "reward_model": {"ground_truth": "42"}, "extra_info": {"interaction_kwargs": {}}}   verl

`tools`, `tools_kwargs` and `interaction_kwargs` are columns, or stand in `extra_info`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OF_ONE_QUESTION = ("grade", "attempts", "instructions")
_OF_VERL = ("name", "query", "ground_truth")
"""What verl's interactions read: here the class is the world's, and the others are question and answer."""
_ABOUT_TOOLS = {"tools": "tool_names", "tools_kwargs": "tool_arguments"}


@dataclass(frozen=True, slots=True)
class Question:
    """One task."""

    question: str
    answer: str
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of QuestionsOptions, in place of the world's."""
    tools: Mapping[str, object] = field(default_factory=dict)
    """Keys of `info` about tools."""


def read_questions(file: str) -> list[Question]:
    """Raises ValueError for a file without questions, and for a row that is none, with its place."""
    found = []
    for where, row in _records(Path(file)):
        try:
            found.append(_question(row))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not found:
        raise ValueError(f"{file} has no question")
    return found


def _records(path: Path) -> Iterator[tuple[str, object]]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        rows: list[object] = parquet.read_table(path).to_pylist()
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))
        return
    # json refuses a byte order mark.
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(json.loads(text), 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold U+2028
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error.msg}") from error


def _question(row: object) -> Question:
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object, got {type(row).__name__}")
    if row.get("images"):
        raise ValueError("images: a world shows none; take the row out, or ask it in an RLVR run")
    about = {name: _column(row, name) for name in (*_ABOUT_TOOLS, "interaction_kwargs")}
    settings = about["interaction_kwargs"] or {}
    if not isinstance(settings, dict) or settings.keys() - {*OF_ONE_QUESTION, *_OF_VERL}:
        raise ValueError(f"interaction_kwargs may hold {', '.join((*OF_ONE_QUESTION, *_OF_VERL))}")
    # Parquet gives every row the keys of all rows, null where it has none.
    settings = {name: value for name, value in settings.items() if value is not None}
    question, instructions = _chat(row)
    answer = row.get("answer", row.get("ground_truth"))
    if answer is None:
        model = row.get("reward_model")
        answer = model.get("ground_truth") if isinstance(model, dict) else None
    question, answer = settings.get("query", question), settings.get("ground_truth", answer)
    if question is None or answer is None:
        raise ValueError("it needs question and answer, or messages (prompt) and ground_truth")
    own = {name: settings[name] for name in OF_ONE_QUESTION if name in settings}
    if instructions:
        own.setdefault("instructions", instructions)
    tools = {key: about[name] for name, key in _ABOUT_TOOLS.items() if about[name] is not None}
    return Question(str(question), answer if isinstance(answer, str) else json.dumps(answer), own, tools)


def _chat(row: Mapping[str, object]) -> tuple[str | None, str]:
    """(question, instructions): the turn of the user, and the system's or developer's. Raises ValueError for a chat
    that has others: they would be lost.
    """
    turns = row.get("question", row.get("messages", row.get("prompt")))
    if isinstance(turns, str) and "question" not in row and turns.lstrip().startswith("["):
        turns = json.loads(turns)
    if turns is None or isinstance(turns, str):
        return turns, ""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("the chat must be a list of {role: text, content: text}")
    roles = ["system" if turn.get("role") == "developer" else str(turn.get("role")) for turn in turns]
    if "user" not in roles:
        raise ValueError("the chat has no turn of the user")
    if len(turns) > len({*roles}) or {*roles} - {"system", "user"}:
        raise ValueError(f"a world asks one question, and the chat has turns of {', '.join(roles)}; join them in one")
    said = dict(zip(roles, (_text(turn.get("content")) for turn in turns), strict=True))
    return said["user"], said.get("system", "")


def _text(content: object) -> str:
    """Of a string, or of a list of text parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{content!r:.60} is no text; write a string or a list of parts of type text")
    return "".join(map(str, texts))


def _column(row: Mapping[str, object], name: str) -> object:
    """A column, or what `extra_info` has under this name; both may be JSON text."""
    info = row.get("extra_info")
    info = json.loads(info) if isinstance(info, str) and info.lstrip().startswith("{") else info
    value = row.get(name)
    if value is None and isinstance(info, dict):
        value = info.get(name)
    return json.loads(value) if isinstance(value, str) else value
