"""Tokenizers and chat templates."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BatchDecode = Callable[[list[list[int]]], Sequence[str]]
"""Token ids of texts to texts."""
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
    "You are a helpful assistant.<|im_end|>\n' }}{% endif %}"
)
TEMPLATES: dict[str, str | None] = {
    "native": None,
    "chatml": _CHATML,
    "qwen2_5": _QWEN_SYSTEM + _CHATML,
    "qwen3": _CHATML,
    "base": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
}
"""By `data_args.template`; None = the one the tokenizer brings."""


_IMPORTING = threading.Lock()
"""transformers makes its names while it is imported: one that a second thread asks for meanwhile may be missing."""


def load_tokenizer(folder: str, time: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. Raises ValueError naming what is missing.

    `time`: what its chat template is told when it asks for the date (ISO 8601), whatever the day; None = the clock.
    """
    with _IMPORTING:
        from transformers import AutoTokenizer

    if os.path.isdir(folder) and not os.path.isfile(os.path.join(folder, "tokenizer_config.json")):
        raise ValueError(f"{folder} holds no tokenizer (tokenizer_config.json is missing)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"no tokenizer for {folder}: neither a folder here nor to be fetched: {reason}") from error
    if time is not None:
        # A variable of the template hides the function that Transformers offers under this name (Llama 3 asks for it).
        told = datetime.fromisoformat(time).strftime
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, strftime_now=told)
    return tokenizer


def batch_decoder(tokenizer: PreTrainedTokenizerBase) -> BatchDecode:
    """What decodes answers, without special tokens; as small as it can be, since it is sent to other processes.

    Most tokenizers decode by their Rust part alone. A process that gets only this part needs no transformers, whose
    import takes two seconds and 100 MB.
    """
    from transformers import PreTrainedTokenizerFast

    own_way = getattr(type(tokenizer), "_decode", None) is not PreTrainedTokenizerFast._decode
    if own_way or tokenizer.clean_up_tokenization_spaces:
        return partial(tokenizer.batch_decode, skip_special_tokens=True)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return partial(tokenizer.backend_tokenizer.decode_batch, skip_special_tokens=True)


class Renderer:
    """Chats to token ids, ready for the assistant's answer. Raises ValueError for an unknown template or a tokenizer
    without one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        if template not in TEMPLATES:
            raise ValueError(f"template {template!r} is not one of {' | '.join(TEMPLATES)}")
        self._tokenizer, self._template = tokenizer, TEMPLATES[template]
        if self._template is None and tokenizer.chat_template is None:
            raise ValueError("template native: this tokenizer has no chat template; choose chatml or base")

    def render(self, chats: Sequence[Sequence[Mapping[str, str]]]) -> list[list[int] | str]:
        """Token ids of each chat, or why the template refused it."""
        texts = [self._text(chat) for chat in chats]
        good = [text for text, refused in texts if not refused]
        encoded = iter(self._tokenizer(good, add_special_tokens=False)["input_ids"] if good else [])
        return [text if refused else next(encoded) for text, refused in texts]

    def _text(self, chat: Sequence[Mapping[str, str]]) -> tuple[str, bool]:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(turn) for turn in chat],
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
            )
        except TemplateError as error:
            return f"the chat template refuses it: {error}", True
        assert isinstance(text, str)
        return text, False
