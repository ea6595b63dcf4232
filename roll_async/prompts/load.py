"""Prompt files to tokenised prompts by domain."""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from roll_async.config.schema import DataArguments, RLVRConfig
from roll_async.config.schema_rollout import MATHS_RULES
from roll_async.observe.thoughts import continuing, marks_of, thought_of
from roll_async.prompts.end_marks import EndMarks
from roll_async.prompts.images import ImageReader, image_reader, spread
from roll_async.prompts.row_tools import tools_of_row
from roll_async.prompts.rows import BadRows, Columns, Row, content_digest, final_number, read_rows
from roll_async.prompts.teachers import teacher_of
from roll_async.prompts.tokenizer import ChatEncoder, EncodedChat, load_tokenizer, told, without_mark
from roll_async.prompts.turns import Turn
from roll_async.schema import Image, Prompt

logger = logging.getLogger(__name__)

_PAUSES_S = (0.2, 1.0, 4.0)
"""Before files are read again: a folder in the network may be away for a moment."""
_CHUNK_ROWS = 512
"""Rows rendered and tokenised together, and handed to a worker process as one task."""

Chats = list[tuple[Turn, ...]]
EncodedRow = tuple[list[int], str, tuple[Image, ...]]
"""`EncodedChat` with every token of its images, and these."""
Files = list[tuple[bytes, ...]]
Rendered = list[EncodedRow | str]
Renderer = Callable[[Chats, list[str | None], Files], Rendered]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """The part of the config the loader obeys."""

    files: tuple[str, ...]
    columns: Columns
    template: str
    prompt_length: int
    """Tokens; longer prompts are skipped and counted."""
    domains: Mapping[str, tuple[str, ...]]
    """Tags of each domain; a single domain takes all."""
    tokenizer_folder: str
    template_time: str | None = None
    """What the template is told of the time; None = the clock."""
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Variables of the template."""
    supervised: frozenset[str] = frozenset()
    """Domains whose ground truth is trained on; answers longer than `response_length` are skipped and counted."""
    response_length: int = 0
    """Tokens, the end mark included."""
    maths: frozenset[str] = frozenset()
    """Domains under a maths rule: of a GSM8K solution, its number is the ground truth."""
    styles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of `reward_model.style` a domain takes; a domain that is not here takes all."""
    checks: Mapping[str, Callable[[str, Mapping[str, str]], object]] = field(default_factory=dict)
    """(ground truth, other columns) of a domain's row; raises ValueError for a row its reward cannot judge."""
    teachers: tuple[str, ...] = ()
    """Names that the column `teacher` may say; a row that chooses none of them is refused."""
    teachers_unshown: frozenset[str] = frozenset()
    """Those behind addresses, which are asked in tokens alone: a row with images that chooses one is refused."""
    untaught: frozenset[str] = frozenset()
    """Domains whose rows no teacher scores."""
    num_workers: int = 1
    """Processes that render and tokenise; 1 = this one. The result does not depend on it."""

    @classmethod
    def of(
        cls,
        config: RLVRConfig,
        data: DataArguments,
        *,
        checks: Mapping[str, Callable[[str, Mapping[str, str]], object]],
        references: tuple[str, ...],
    ) -> DataOptions:
        """Which prompts, as the config has it; what the rewards say of rows comes from `rewards/row_checks.py`."""
        return cls(
            files=tuple(data.file_name),
            columns=Columns(
                messages=data.messages,
                prompt=data.prompt,
                id=data.id,
                tag=data.tag,
                ground_truth=data.ground_truth,
                references=references,
            ),
            template=data.template,
            prompt_length=config.prompt_length,
            domains={name: tuple(r.tag_included) for name, r in config.rewards.items()},
            tokenizer_folder=config.pretrain,
            template_time=config.template_time,
            template_kwargs=data.template_kwargs,
            supervised=frozenset(name for name, part in config.loss_parts.items() if part == "cross_entropy"),
            response_length=config.response_length,
            maths=frozenset(name for name, r in config.rewards.items() if r.type in MATHS_RULES),
            styles={name: r.style_included for name, r in config.rewards.items() if r.style_included},
            checks=checks,
            teachers=config.teacher_names,
            teachers_unshown=frozenset(config.teacher_servers),
            untaught=frozenset(config.loss_parts),
            num_workers=data.preprocessing_num_workers,
        )


def load_prompts(options: DataOptions, *, every_domain: bool = True) -> dict[str, list[Prompt]]:
    """Tokenised prompts by domain, in file order. Raises ValueError when a domain gets none, naming what was skipped
    and why; without `every_domain` such a domain is left out, and only nothing at all is an error. Files that cannot be
    read are read again.
    """
    for pause_s in _PAUSES_S:
        try:
            return _load(options, every_domain)
        except OSError as error:
            logger.warning("prompts: %s; reading again in %g s", error, pause_s)
            time.sleep(pause_s)
    return _load(options, every_domain)


def _load(options: DataOptions, every_domain: bool) -> dict[str, list[Prompt]]:
    bad, too_long, answers_too_long, unrouted = BadRows(), 0, 0, Counter[str]()
    by_domain: dict[str, list[Prompt]] = {name: [] for name in options.domains}

    def routed() -> Iterator[tuple[Row, str]]:
        for row in read_rows(options.files, options.columns, bad):
            domain = domain_of(row, options.domains, options.styles)
            if domain is None:
                unrouted[row.tag] += 1
                continue
            if row.images:
                try:
                    image_reader(options.tokenizer_folder)
                except ValueError as error:  # no row with an image can be read
                    raise ValueError(f"{row.where}: an image: {error}") from error
            if domain in options.maths:
                row = replace(row, ground_truth=final_number(row.ground_truth))
            problem = _problem(row, domain, options)
            if problem:
                bad.add(f"{row.where}: {problem}")
            else:
                yield row, domain

    answers = _Answers(options.tokenizer_folder, options.template) if options.supervised else None
    for (row, domain), chat in _tokenised(routed(), options):
        if isinstance(chat, str) or not chat[0]:
            bad.add(f"{row.where}: {chat if isinstance(chat, str) else 'the prompt is empty'}")
            continue
        ids, thought, images = chat
        try:
            is_trained = domain in options.supervised
            answer = answers.ids(row.ground_truth, thought) if answers is not None and is_trained else None
        except ValueError as error:
            bad.add(f"{row.where}: {error}")
            continue
        if len(ids) > options.prompt_length:
            too_long += 1
        elif answer is not None and len(answer) > options.response_length:
            answers_too_long += 1
        else:
            by_domain[domain].append(_prompt(row, domain, chat, answer))
    for problem in bad.problems:
        logger.warning("skipped %s", problem)
    kept = sum(map(len, by_domain.values()))
    skipped = (
        f"{len(bad.problems)} malformed, {too_long} longer than prompt_length {options.prompt_length}, "
        f"{_unrouted(unrouted)}"
    )
    if answers_too_long:
        skipped += f", {answers_too_long} whose answer is longer than response_length {options.response_length}"
    logger.info("%d prompts of %s (skipped: %s)", kept, ", ".join(options.files), skipped)
    empty = [name for name, prompts in by_domain.items() if not prompts]
    if empty and (every_domain or not kept):
        raise ValueError(
            f"no prompt for domain {', '.join(empty)} in {', '.join(options.files)}: {kept} kept; skipped: {skipped}"
            + (f"; first malformed: {bad.problems[0]}" if bad.problems else "")
        )
    return {name: prompts for name, prompts in by_domain.items() if prompts}


def judged(by_domain: Mapping[str, list[Prompt]], unscored: Collection[str]) -> dict[str, list[Prompt]]:
    """Prompts whose answers get a score: a validation counts no others. Raises ValueError when there are none."""
    found = {name: prompts for name, prompts in by_domain.items() if name not in unscored}
    if not found:
        raise ValueError(f"validation: all prompts are of domains without a score: {', '.join(by_domain)}")
    return found


def domain_of(
    row: Row, domains: Mapping[str, tuple[str, ...]], styles: Mapping[str, tuple[str, ...]] | None = None
) -> str | None:
    """The domain whose tags hold the row's tag and whose styles, if it names any, hold its style; a single domain takes
    all rows. A domain without tags is chosen by style alone.
    """
    if len(domains) == 1:
        return next(iter(domains))
    styles = styles or {}
    for name, tags in domains.items():
        wanted = styles.get(name, ())
        if (row.tag in tags or (not tags and wanted)) and (not wanted or row.style in wanted):
            return name
    return None


def _problem(row: Row, domain: str, options: DataOptions) -> str:
    """Why its reward could never judge the row, its tools never be called or no teacher score it; nothing when all
    can.
    """
    try:
        tools_of_row(row.extra)
        if (check := options.checks.get(domain)) is not None:
            check(row.ground_truth, row.extra)
        if options.teachers and domain not in options.untaught:
            name = teacher_of(domain, row.extra, options.teachers)
            if row.images and name in options.teachers_unshown:
                return f"teacher {name} is behind an address, which is shown no image; name one with a folder"
    except ValueError as error:
        return str(error)
    return ""


class _Answers:
    """Ground truths as token ids."""

    def __init__(self, tokenizer_folder: str, template: str) -> None:
        self._tokenizer = load_tokenizer(tokenizer_folder)
        end = EndMarks.of(self._tokenizer, template).own
        if end is None:
            raise ValueError(f"{tokenizer_folder}: supervised rows need a tokenizer with an end-of-sequence token")
        self._end, self._marks = end, marks_of(self._tokenizer)

    def ids(self, text: str, thought: str) -> array:
        """With the end mark of the template, after a prompt that ends in the mark of this `thought`, if in any. Raises
        ValueError for an answer that never ends it.
        """
        if thought_of(thought, text, self._marks).unfinished:
            raise ValueError("the answer to train on ends inside a thought; close it, or leave the thought out")
        text = continuing(thought, text)
        # A beginning-of-sequence token would stand in the middle of the row, behind the prompt.
        ids = array("i", self._tokenizer.encode(text, add_special_tokens=False))
        ids.append(self._end)
        return ids


def _prompt(row: Row, domain: str, chat: EncodedRow, answer: array | None) -> Prompt:
    ids, thought, images = chat
    return Prompt(
        row_id=row.row_id,
        token_ids=array("i", ids),
        thought=thought,
        domain=domain,
        ground_truth=row.ground_truth,
        text=row.text,
        extra=row.extra,
        answer_ids=answer,
        content=content_digest(row.messages, row.ground_truth, row.extra, row.images),
        images=images,
    )


def _unrouted(tags: Counter[str]) -> str:
    if not tags:
        return "0 without a domain"
    named = ", ".join(f"{tag!r} {count}" for tag, count in tags.most_common(5))
    return f"{tags.total()} whose tag belongs to no domain ({named})"


def _renderer(options: DataOptions) -> Renderer:
    tokenizer = told(
        load_tokenizer(options.tokenizer_folder), options.template, options.template_time, options.template_kwargs
    )
    return partial(_rendered, ChatEncoder(tokenizer, options.template), options.tokenizer_folder)


def _rendered(encoder: ChatEncoder, folder: str, chats: Chats, references: list[str | None], images: Files) -> Rendered:
    """As `ChatEncoder.render`, or why an image cannot be read. `images`: of each chat."""
    if not any(images):
        return [chat if isinstance(chat, str) else (*chat, ()) for chat in encoder.render(chats, references)]
    reader = image_reader(folder)
    # Else a text could say that an image stands in it.
    mark = str(encoder.tokenizer.convert_ids_to_tokens(reader.token_id))
    chats = [without_mark(chat, mark) if files else chat for chat, files in zip(chats, images, strict=True)]
    rendered: Rendered = []
    for chat, files in zip(encoder.render(chats, references), images, strict=True):
        try:
            rendered.append(chat if isinstance(chat, str) else _with_images(chat, files, reader))
        except ValueError as error:
            rendered.append(str(error))
    return rendered


def _with_images(chat: EncodedChat, files: Sequence[bytes], reader: ImageReader) -> EncodedRow:
    ids, thought = chat
    images = tuple(map(reader.image, files))
    if images:
        ids = [ids[place] for place in spread(ids, images, reader.token_id)]
    return ids, thought, images


def _tokenised(
    rows: Iterable[tuple[Row, str]], options: DataOptions
) -> Iterator[tuple[tuple[Row, str], EncodedRow | str]]:
    """Every row with its prompt or the reason it has none, in order."""
    chunks = _chunks(rows)
    if options.num_workers == 1:
        render = _renderer(options)
        for chunk in chunks:
            yield from zip(chunk, render(*_chats(chunk, options)), strict=True)
        return
    yield from _tokenised_in_processes(chunks, options)


def _tokenised_in_processes(
    chunks: Iterator[list[tuple[Row, str]]], options: DataOptions
) -> Iterator[tuple[tuple[Row, str], EncodedRow | str]]:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # Spawned, not forked: the caller runs threads. At most two chunks per worker are under way, so that a large file
    # does not pile up in memory.
    with ProcessPoolExecutor(
        options.num_workers,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(replace(options, checks={}),),  # which a process need not be able to import
    ) as pool:
        _renderer(options)  # its errors are readable here
        under_way = []
        for chunk in chunks:
            under_way.append((chunk, pool.submit(_render, *_chats(chunk, options))))
            if len(under_way) >= 2 * options.num_workers:
                done, future = under_way.pop(0)  # the oldest, so that rows keep the order of the files
                yield from zip(done, future.result(), strict=True)
        for chunk, future in under_way:
            yield from zip(chunk, future.result(), strict=True)


def _chunks(rows: Iterable[tuple[Row, str]]) -> Iterator[list[tuple[Row, str]]]:
    source = iter(rows)
    while chunk := list(islice(source, _CHUNK_ROWS)):
        yield chunk


def _chats(chunk: Sequence[tuple[Row, str]], options: DataOptions) -> tuple[Chats, list[str | None], Files]:
    """Chats, of supervised ones the answers, and the files of their images."""
    trained = [row.ground_truth if domain in options.supervised else None for row, domain in chunk]
    return [row.messages for row, _ in chunk], trained, [row.images for row, _ in chunk]


_worker_renderer: Renderer | None = None  # of this process, so that no task carries a tokenizer


def _start_worker(options: DataOptions) -> None:
    global _worker_renderer
    _worker_renderer = _renderer(options)


def _render(chats: Chats, references: list[str | None], images: Files) -> Rendered:
    assert _worker_renderer is not None
    return _worker_renderer(chats, references, images)
