"""Rows that are trained on as they are: chats with answers, pairs of answers, samples of a run.

    sft   {"messages": [..., {"role": "assistant", "content": "4"}]}    or {"prompt": text, "completion": text}
    sft   {"prompt_token_ids": [...], "response_token_ids": [...], "loss_mask": [...], "score": 1.0}    dumped samples
    dpo   {"prompt": text or "messages": [...], "chosen": text, "rejected": text}    answers may be lists of turns

Everything is tokenised before anything starts: a row that cannot be trained on ends the start with its place.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roll_async.config.schema import DataArguments, DpoConfig, SftConfig, SupervisedConfig
from roll_async.prompts.end_marks import EndMarks
from roll_async.prompts.images import image_reader, spread, taken_out
from roll_async.prompts.rows import BadRows, files_of, read_records
from roll_async.prompts.tokenizer import ChatEncoder, load_tokenizer, told, without_mark
from roll_async.prompts.turns import Turn, parse_turns
from roll_async.schema import Image

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GivenRow:
    """One row, tokenised."""

    tokens: array
    """[T] int32."""
    mask: bytes
    """[T] 0 or 1: which of them are trained on."""
    images: tuple[Image, ...] = ()
    """In the order of their tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenOptions:
    """What the loader obeys."""

    key: str
    """Config key of the files."""
    files: tuple[str, ...]
    tokenizer_folder: str
    sequence_length: int
    messages: str = "messages"
    prompt: str = "prompt"
    template: str = "native"
    template_time: str | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    long_rows: str = "refuse"
    """refuse, cut or skip."""
    last_turn: bool = False
    """Of the turns of the assistant the last one alone is trained on."""
    min_score: float | None = None
    pairs: bool = False

    @classmethod
    def of(cls, config: SupervisedConfig, key: str, data: DataArguments) -> GivenOptions:
        """As the config has it."""
        return cls(
            key=f"{key}.file_name",
            files=tuple(data.file_name),
            tokenizer_folder=config.pretrain,
            sequence_length=config.sequence_length,
            messages=data.messages or "messages",
            prompt=data.prompt or "prompt",
            template=data.template,
            template_time=config.template_time,
            template_kwargs=data.template_kwargs,
            long_rows=config.long_rows,
            last_turn=isinstance(config, SftConfig) and config.trained_turns == "last",
            min_score=config.min_score if isinstance(config, SftConfig) else None,
            pairs=isinstance(config, DpoConfig),
        )


def load_given(options: GivenOptions) -> list[GivenRow]:
    """Rows in the order of the files; pairs as chosen, rejected, chosen, ... Raises ValueError, one line, for a row
    that cannot be trained on, and for files without any row.
    """
    found: list[GivenRow] = []
    left_out = Counter[str]()
    encoder = _Encoder(options)
    for where, folder, record in _records(options):
        try:
            if not isinstance(record, dict):
                raise ValueError(f"a row must be an object, got {type(record).__name__}")
            if options.min_score is not None and not _score(record) >= options.min_score:  # NaN is below, too
                left_out[f"below min_score {options.min_score:g}"] += 1
                continue
            rows = encoder.pair(record, folder) if options.pairs else encoder.rows(record, folder)
            fitting = [_fitted(row, options) for row in rows]
        except ValueError as error:
            raise ValueError(f"{options.key}: {where}: {error}") from error
        kept = [row for row in fitting if row is not None]
        if len(kept) < len(rows):
            left_out[f"longer than sequence_length {options.sequence_length}"] += 1
        if not options.pairs or len(kept) == 2:  # a pair without one of its rows compares nothing
            found += kept
    said = ", ".join(f"{count} {why}" for why, count in left_out.items()) or "none"
    if not found:
        raise ValueError(f"{options.key}: no row to train on in {', '.join(options.files)}; left out: {said}")
    logger.info("%d rows of %s (left out: %s)", len(found), ", ".join(options.files), said)
    return found


def digest_of(rows: Sequence[GivenRow]) -> str:
    """What the rows say and how they are masked: 16 hexadecimal digits."""
    content = hashlib.blake2b(digest_size=8)
    for row in rows:
        content.update(len(row.tokens).to_bytes(4, "little") + row.tokens.tobytes() + row.mask)
        for image in row.images:
            content.update(hashlib.blake2b(image.data).digest())
    return content.hexdigest()


def _records(options: GivenOptions) -> Iterator[tuple[str, Path, object]]:
    """(place, folder of the file, record)."""
    bad = BadRows(limit=0)
    for name in options.files:
        for file in files_of(name):
            yield from ((where, Path(file).parent, record) for where, record in read_records(file, bad))


def _score(record: Mapping[str, object]) -> float:
    score = record.get("score")
    if not isinstance(score, int | float):
        raise ValueError(f"score: {score!r:.60} is no number, and min_score compares with it; remove min_score")
    return score


def _fitted(row: GivenRow, options: GivenOptions) -> GivenRow | None:
    """The row, its beginning, or None for one that is left out. Raises ValueError for one that is refused."""
    limit = options.sequence_length
    if len(row.tokens) <= limit:
        return row
    if options.long_rows == "refuse":
        raise ValueError(
            f"{len(row.tokens)} tokens, more than sequence_length {limit}; raise it, or set long_rows: cut or skip"
        )
    cut = GivenRow(row.tokens[:limit], row.mask[:limit])
    # A part of an image is none.
    return cut if options.long_rows == "cut" and any(cut.mask) and not row.images else None


class _Encoder:
    """Records to tokens, with one tokenizer."""

    def __init__(self, options: GivenOptions) -> None:
        tokenizer = load_tokenizer(options.tokenizer_folder)
        self._end = EndMarks.of(tokenizer, options.template).own
        tokenizer = told(tokenizer, options.template, options.template_time, options.template_kwargs)
        self._options = options
        file = Path(options.tokenizer_folder, "config.json")
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._num_ids = (config.get("text_config") or config).get("vocab_size") or len(tokenizer)
        try:
            self._image_token = image_reader(options.tokenizer_folder).token_id
        except ValueError:  # of a model that reads text alone
            self._image_token = None
        try:
            self._chats = ChatEncoder(tokenizer, options.template)
        except ValueError as error:
            raise ValueError(f"{options.key.removesuffix('.file_name')}.template: {error}") from error

    def rows(self, record: dict, folder: Path) -> list[GivenRow]:
        """Of a chat or a sample."""
        if "response_token_ids" in record:
            row = _sample(record, self._num_ids)
            if self._image_token in record.get("prompt_token_ids", []):
                raise ValueError("prompt_token_ids: an image stands there, which a dump does not hold; use `messages`")
            return [row]
        answer = record.get("response") if record.get("completion") is None else record["completion"]
        turns = self._prompt(record) if answer is not None else _turns(record.get(self._options.messages))
        chat = taken_out([*turns, *_turns(answer or [], "assistant")], record.get("images"), folder)
        return self._encoded(*chat, last=self._options.last_turn)

    def pair(self, record: dict, folder: Path) -> list[GivenRow]:
        """The chosen and the rejected answer of a prompt."""
        if record.get(self._options.prompt) is None and record.get(self._options.messages) is None:
            form = "a pair is {prompt, chosen, rejected}; write in prompt what both chats begin with, and leave it out "
            raise ValueError(f"{self._options.prompt}: missing; {form}of chosen and rejected")
        prompt = self._prompt(record)
        found = []
        for name in ("chosen", "rejected"):
            if not record.get(name):
                raise ValueError(f"{name}: missing; a pair is {{prompt, chosen, rejected}}")
            chat = taken_out([*prompt, *_turns(record[name], "assistant")], record.get("images"), folder)
            found += self._encoded(*chat, last=True, column=name)
        chosen, rejected = found
        if chosen.tokens == rejected.tokens:
            raise ValueError("rejected: the same as chosen: the pair compares nothing; take it out")
        return found

    def _prompt(self, record: dict) -> list:
        turns = record.get(self._options.messages)
        return _turns(record.get(self._options.prompt) if turns is None else turns)

    def _encoded(
        self, turns: object, files: Sequence[bytes], *, last: bool, column: str = "messages"
    ) -> list[GivenRow]:
        """`files`: of the images that stand in the turns."""
        chat: tuple[Turn, ...] = parse_turns(turns, column, answered=True)
        if not files:
            return [
                GivenRow(array("i", tokens), bytes(mask))
                for tokens, mask in self._chats.answered(chat, last=last, end=self._end)
            ]
        reader = image_reader(self._options.tokenizer_folder)
        images = tuple(map(reader.image, files))
        # Else a text could say that an image stands in it.
        chat = without_mark(chat, str(self._chats.tokenizer.convert_ids_to_tokens(reader.token_id)))
        found = []
        for tokens, mask in self._chats.answered(chat, last=last, end=self._end):
            # A row of earlier turns alone has the first of them.
            own = images[: tokens.count(reader.token_id)]
            places = spread(tokens, own, reader.token_id)
            found.append(GivenRow(array("i", [tokens[i] for i in places]), bytes(mask[i] for i in places), own))
        return found


def _turns(said: object, role: str = "user") -> list:
    """Turns as a list; a text is one turn of `role`. Raises ValueError for anything else."""
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    if not isinstance(said, list):
        raise ValueError("messages: missing; a row is a chat in `messages`, or {prompt, completion}")
    return said


def _sample(record: dict, num_ids: int) -> GivenRow:
    """What a run dumped, token by token. Raises ValueError for ids of no token, and lengths that disagree."""
    prompt, response = record.get("prompt_token_ids", []), record["response_token_ids"]
    for name, ids in (("prompt_token_ids", prompt), ("response_token_ids", response)):
        wrong = [i for i in ids if type(i) is not int or not 0 <= i < num_ids] if isinstance(ids, list) else [ids]
        if wrong:
            raise ValueError(f"{name}: {wrong[0]!r:.60}; expected a list of the model's ids, 0 to {num_ids - 1}")
    mask = record.get("loss_mask", [1] * len(response))
    if not isinstance(mask, list):
        raise ValueError(f"loss_mask: {mask!r:.60} is no list; write 0 or 1 for each id, or leave it out")
    if len(mask) != len(response) or not any(mask):
        raise ValueError(f"loss_mask: {sum(map(bool, mask))} of {len(mask)} for {len(response)} response_token_ids")
    return GivenRow(array("i", [*prompt, *response]), bytes(len(prompt)) + bytes(map(bool, mask)))
