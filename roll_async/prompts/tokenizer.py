"""Tokenizers and chat templates."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
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


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. Raises ValueError naming what is missing."""
    from transformers import AutoTokenizer

    if os.path.isdir(folder) and not os.path.isfile(os.path.join(folder, "tokenizer_config.json")):
        raise ValueError(f"{folder} holds no tokenizer (tokenizer_config.json is missing)")
    return AutoTokenizer.from_pretrained(folder)


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], template: str) -> list[int]:
    """Token ids of a chat, ready for the assistant's answer. Raises ValueError for an unknown template or a tokenizer
    without one.
    """
    if template not in TEMPLATES:
        raise ValueError(f"template {template!r} is not one of {' | '.join(TEMPLATES)}")
    chosen = TEMPLATES[template]
    if chosen is None and tokenizer.chat_template is None:
        raise ValueError("template native: this tokenizer has no chat template; choose chatml or base")
    text = tokenizer.apply_chat_template(
        [dict(m) for m in messages], chat_template=chosen, add_generation_prompt=True, tokenize=False
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]
