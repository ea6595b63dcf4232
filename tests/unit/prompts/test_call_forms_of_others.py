"""The forms of calls against the readers of other projects, where they are installed: they read the same."""

import json
import re

import pytest

from roll_async.prompts.call_forms import FORMS
from roll_async.prompts.tool_calls import ToolCall
from tests.unit.prompts.test_call_forms import BY_FAMILY, TIME, WEATHER, calls_of, said

CASES = [(WEATHER,), (WEATHER, TIME), (TIME, WEATHER, WEATHER), (("now", {}),)]


class Marks:
    """A tokenizer of characters and of the marks of a family."""

    unk_token_id = None

    def __init__(self, *marks):
        self._ids = {mark: 0x110000 + i for i, mark in enumerate(marks)}
        self._marks = {i: mark for mark, i in self._ids.items()}
        self._pattern = re.compile("|".join(map(re.escape, marks)))

    def convert_tokens_to_ids(self, mark):
        return self._ids.get(mark)

    def get_vocab(self):
        return self._ids

    def decode(self, ids, skip_special_tokens=False):
        return "".join(self._marks.get(i) or chr(i) for i in ids)

    def encode(self, text, **kwargs):
        ids, position = [], 0
        for found in self._pattern.finditer(text):
            ids += [*map(ord, text[position : found.start()]), self._ids[found[0]]]
            position = found.end()
        return ids + [ord(c) for c in text[position:]]


GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK = tuple(f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))


@pytest.mark.parametrize("case", CASES, ids=len)
@pytest.mark.parametrize(
    ("family", "name", "marks"),
    [
        ("Hermes", "qwen3", GLM[:2]),
        ("Qwen3-Coder", "qwen3.5", GLM[:2]),
        ("GLM-4.5", "glm", GLM),
        ("DeepSeek-V3", "deepseek-v3", DEEPSEEK),
    ],
)
def test_renderers_reads_the_same(family, name, marks, case):
    parsers = pytest.importorskip("renderers.parsers")
    tokenizer, text = Marks(*marks), said(family, *case)
    found = parsers.get_tool_parser(name, tokenizer).extract(tokenizer.encode(text))[1]
    assert [ToolCall(name=c.name, arguments=c.arguments) for c in found] == calls_of(*case)
    assert BY_FAMILY[family].read(text)[1] == calls_of(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=len)
@pytest.mark.parametrize(
    ("family", "module", "name", "marks"),
    [
        ("Hermes", "hermes", "Hermes2ProToolParser", GLM[:2]),
        ("DeepSeek-V3", "deepseekv3", "DeepSeekV3ToolParser", DEEPSEEK),
        ("DeepSeek-V3.1", "deepseekv31", "DeepSeekV31ToolParser", DEEPSEEK),
        ("Llama-3", "llama", "Llama3JsonToolParser", ("<|python_tag|>",)),
    ],
)
def test_vllm_reads_the_same(family, module, name, marks, case):
    parser = getattr(pytest.importorskip(f"vllm.tool_parsers.{module}_tool_parser"), name)
    text = said(family, *case)
    found = parser(Marks(*marks)).extract_tool_calls(text, None).tool_calls
    read = [ToolCall(name=c.function.name, arguments=json.loads(c.function.arguments)) for c in found]
    assert read == BY_FAMILY[family].read(text)[1] == calls_of(*case)


def test_every_form_has_a_name_of_its_own():
    assert len({form.family for form in FORMS}) == len(FORMS)
