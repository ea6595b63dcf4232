"""Chats in OpenAI's form, whole, in the form that each kind of chat template takes; or refused with key and remedy."""

import json

import pytest

from roll_async.prompts.tokenizer import ChatEncoder
from roll_async.prompts.turns import parse_turns

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

ASK = {"role": "user", "content": "weather?"}
ARGUMENTS = '{"city": "Zug", "days": 2}'
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RAIN = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
BRIEF = {"role": "developer", "content": "Be brief."}
THOUGHT = {"role": "assistant", "reasoning_content": "hmm", "content": "yes"}

TURN = "{{ m.role + ':' + m.content + '\n' }}"
SAYS = "{% for m in messages %}" + TURN + "{% endfor %}"
CALLS = (
    "{%% for m in messages %%}{{ m.role + ':' + (m.content or '') }}"
    "{%% for c in m.tool_calls or [] %%}[{{ c.function.name }} %s]{%% endfor %%}{{ '\n' }}{%% endfor %%}"
)
ITERATING = CALLS % "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }} {% endfor %}"
CONCATENATING = CALLS % "{{ 'json ' + c.function.arguments }}"
NULL_ONLY = CONCATENATING.replace("m.tool_calls or []", "(m.tool_calls if m.content is none else [])")
NAMING = "{% for m in messages %}{{ m.name or m.role }}:{{ m.content }}{{ (m.tool_calls or '') | string }}{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
    "{% endfor %}"
)
DEVELOPING = SAYS.replace("{{ m", "{{ '(developer)' if m.role == 'developer' }}{{ m", 1)
DROPPING = "{% for m in messages if m.role in ('user', 'assistant', 'system') %}" + TURN + "{% endfor %}"
THINKING = (
    "{% for m in messages %}{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}" + TURN + "{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.fixture
def said(tokenizer):
    """What a template makes of a chat, or why it is refused."""

    def of(template, *turns):
        tokenizer.chat_template = template
        (found,) = ChatEncoder(tokenizer, "native").render([parse_turns(list(turns), "messages")])
        return found if isinstance(found, str) else tokenizer.decode(found[0])

    return of


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (ITERATING, "[get_weather city=Zug days=2 ]"),
        (CONCATENATING, f"[get_weather json {ARGUMENTS}]"),
        (NULL_ONLY, f"[get_weather json {ARGUMENTS}]"),
    ],
    ids=["arguments as object", "arguments as text", "null beside calls"],
)
def test_calls_are_said_with_their_arguments_in_the_form_the_template_takes(said, template, call):
    assert said(template, ASK, CALLING, RAIN) == f"user:weather?\nassistant:{call}\ntool:rain\n"


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.loads(ARGUMENTS)], ids=["text", "object"])
@pytest.mark.parametrize("content", [None, ""])
def test_a_call_is_the_same_however_the_row_writes_it(said, arguments, content):
    call = {"name": "get_weather", "arguments": arguments}
    for written in (call, {"function": call}, {**CALL, "function": call}):
        turn = {"role": "assistant", "content": content, "tool_calls": [written]}
        assert said(ITERATING, ASK, turn, RAIN) == said(ITERATING, ASK, CALLING, RAIN)


def test_a_result_has_the_name_of_the_function_it_answers_for_templates_that_write_it(said):
    assert "get_weather:rain" in said(NAMING, ASK, CALLING, RAIN)
    assert "other:rain" in said(NAMING, ASK, CALLING, {**RAIN, "name": "other"})


def test_the_developer_speaks_as_the_system_where_the_template_does_not_know_one(said):
    assert said(DROPPING, BRIEF, ASK) == "system:Be brief.\nuser:weather?\n"
    assert said(DEVELOPING, BRIEF, ASK) == "(developer)developer:Be brief.\nuser:weather?\n"


def test_parts_are_one_text_and_a_template_that_takes_only_parts_gets_them(said):
    parts = {"role": "user", "content": [{"type": "text", "text": "wea"}, {"type": "text", "text": "ther?"}]}
    assert said(SAYS, parts) == "user:weather?\n"
    assert said(PARTS, ASK) == said(PARTS, parts) == "user:weather?"


def test_a_thought_is_given_to_a_template_that_knows_thoughts_under_its_own_name(said):
    assert said(THINKING, ASK, {**THOUGHT, "tool_calls": [CALL]}, RAIN).startswith("the chat template leaves out")
    knows = THINKING.replace("loop.last", "true")
    for name in ("reasoning_content", "reasoning", "thinking"):
        turn = {"role": "assistant", "content": "yes", name: "hmm"}
        for template in (knows, knows.replace("reasoning_content", "thinking")):
            assert "<think>hmm</think>assistant:yes" in said(template, ASK, turn, ASK)


def test_an_earlier_thought_may_be_left_out_by_a_template_that_knows_thoughts_and_by_no_other(said):
    assert said(THINKING, ASK, THOUGHT, ASK) == "user:weather?\nassistant:yes\nuser:weather?\n"
    assert "leaves out messages.1.reasoning_content (role assistant)" in said(SAYS, ASK, THOUGHT, ASK)


@pytest.mark.parametrize(
    ("template", "turns", "key"),
    [
        (DROPPING, (ASK, CALLING, RAIN), "messages.1.tool_calls.0.function.name (role assistant)"),
        (DROPPING, (ASK, {"role": "tool", "content": "weather?"}), "messages.1.content (role tool)"),
        (CALLS % "", (ASK, CALLING, RAIN), "messages.1.tool_calls.0.function.arguments (role assistant)"),
        ("{{ messages[-1].role }}", ({"role": "user", "content": "user"},), "messages.0.content (role user)"),
    ],
)
def test_a_turn_that_the_template_drops_is_refused_even_where_another_turn_says_the_same(said, template, turns, key):
    found = said(template, *turns)
    assert found.startswith(f"the chat template leaves out {key}; take it out of the row, or use a model or data_args")


def test_a_template_that_fails_on_a_chat_refuses_the_row_alone(said):
    assert said("{{ messages[0].content + 1 }}", ASK).startswith("the chat template refuses it: can only concatenate")
    assert said("{{ messages[5].content.x }}", ASK).startswith("the chat template refuses it: ")


def test_rows_of_one_shape_ask_the_template_once_for_its_form(tokenizer):
    tokenizer.chat_template = ITERATING
    encoder = ChatEncoder(tokenizer, "native")
    encoder.render([parse_turns([{**ASK, "content": f"weather in {i}?"}, CALLING, RAIN], "m") for i in range(20)])
    assert encoder._form_of.cache_info().misses == 1


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ({"content": "hi"}, "messages.1.role: None is no text; write system, user, assistant or tool"),
        ({"role": "user"}, "messages.1.content: missing; write text"),
        ({"role": "user", "content": 5}, "messages.1.content: 5 is no text; write a string or a list of parts"),
        (
            {"role": "user", "content": [{"type": "image"}]},
            "messages.1.content.0: {'type': 'image'} is no part of type",
        ),
        ({**RAIN, "tool_call_id": 7}, "messages.1.tool_call_id: 7 is no text; write a string"),
        ({**ASK, "name": {"a": 1}}, "messages.1.name: {'a': 1} is no text"),
        ({**ASK, "tool_calls": [CALL]}, "messages.1.tool_calls: a turn of role user calls no tools; remove them"),
        ({**CALLING, "tool_calls": "f()"}, "messages.1.tool_calls: 'f()' must be a list of calls"),
        ({**CALLING, "tool_calls": [{"function": {}}]}, "messages.1.tool_calls.0: {'function': {}} is no call; write"),
        (
            {**CALLING, "tool_calls": [{"name": "f", "arguments": "city=Zug"}]},
            "messages.1.tool_calls.0.function.arguments: 'city=Zug' is no JSON object; write one",
        ),
        ({**CALLING, "tool_calls": [{"name": "f", "arguments": [1]}]}, "function.arguments: [1] is no JSON object"),
        ({**THOUGHT, "thinking": "other"}, "messages.1.thinking: another thought than another key of this turn has"),
        ({**ASK, "function_call": {"name": "f"}}, "messages.1.function_call: it would be lost; write it as tool_calls"),
        ({**ASK, "refusal": "No."}, "messages.1.refusal: it would be lost; write it as content"),
        ({**ASK, "when": b"x"}, "messages.1: Object of type bytes is not JSON serializable; remove it"),
    ],
)
def test_what_could_not_be_kept_is_refused_with_its_key_and_a_remedy(turn, says):
    with pytest.raises(ValueError) as error:
        parse_turns([ASK, turn, ASK], "messages")
    assert says in str(error.value)


def test_what_clients_and_parquet_leave_empty_says_nothing():
    empty = dict.fromkeys(
        ("tool_calls", "function_call", "refusal", "audio", "name", "tool_call_id", "reasoning_content")
    )
    assert parse_turns([{**ASK, **empty, "annotations": [], "weight": 1}], "messages") == ({**ASK, "weight": 1},)
