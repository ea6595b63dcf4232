"""What a client may send: every field is acted on, counted or refused by its name, and a body has bounds."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_async.agents.gateway.body import DIALECTS, read
from roll_async.agents.gateway.bounds import (
    MAX_DEPTH,
    MAX_MESSAGES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOOLS,
    MAX_VALUES,
)
from roll_async.agents.gateway.fields import Use, page
from roll_async.agents.turn_handler import BadRequest

USER = {"role": "user", "content": "hello"}
SMALLEST = {
    "chat": {"messages": [USER]},
    "responses": {"input": "hello"},
    "anthropic": {"max_tokens": 9, "messages": [USER]},
}
STOP = {"chat": "stop", "anthropic": "stop_sequences"}
LIMIT = {"chat": "max_tokens", "responses": "max_output_tokens", "anthropic": "max_tokens"}


def asked(dialect, **fields):
    return read(dialect, json.dumps({**SMALLEST[dialect], **fields}).encode())


def with_field(path, value):
    """Fields of a body that has the value at this path; the form of what is around it is the dialect's."""
    around = {
        "messages[].content[]": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        "messages[]": {"messages": [dict(USER)]},
        "system[]": {"system": [{"type": "text", "text": "x"}]},
        "tools[].function": {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools[]": {"tools": [{"type": "function", "name": "f"}]},
        "tool_choice": {"tool_choice": {"type": "auto"}},
        "stream_options": {"stream_options": {}},
    }
    parent, _, name = path.rpartition(".")
    body = json.loads(json.dumps(around.get(parent, {})))
    place = body
    for step in filter(None, parent.split(".")):
        place = place[step.removesuffix("[]")]
        place = place[0] if step.endswith("[]") else place
    place[name] = value
    return body


CASES = [(dialect, name, field) for dialect, form in DIALECTS.items() for name, field in form.FIELDS.items()]
CASES = [(dialect, name, field) for dialect, name, field in CASES if field.use is not Use.ACTS]


def of_dialect(dialect, name, value):
    body = with_field(name, value)
    if dialect == "anthropic":
        for tool in body.get("tools", ()):
            tool.pop("type", None)
    return body


@pytest.mark.parametrize(("dialect", "name", "field"), CASES, ids=[f"{d}-{n}" for d, n, _ in CASES])
def test_a_field_is_refused_by_its_name_or_counted_and_what_asks_for_nothing_is_taken(dialect, name, field):
    for value in (None, *field.neutral):
        found = asked(dialect, **of_dialect(dialect, name, value))
        assert name not in found.ignored
    if field.use is Use.REFUSED:
        for value in ("x", {"a": 1}, True if True not in field.neutral else False):
            with pytest.raises(BadRequest, match=name.split(".")[-1].removesuffix("[]")):
                asked(dialect, **of_dialect(dialect, name, value))
    if field.use is Use.IGNORED:
        assert name in asked(dialect, **of_dialect(dialect, name, "x")).ignored


@pytest.mark.slow
def test_the_tables_have_every_field_of_the_openai_packages_types():
    pytest.importorskip("openai")
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatStreaming
    from openai.types.responses.response_create_params import ResponseCreateParamsBase
    from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseStreaming

    for dialect, types in (
        ("chat", (CompletionCreateParamsBase, ChatStreaming)),
        ("responses", (ResponseCreateParamsBase, ResponseStreaming)),
    ):
        known = {name for kind in types for name in kind.__annotations__}
        assert known <= set(DIALECTS[dialect].FIELDS), known - set(DIALECTS[dialect].FIELDS)


def test_the_docs_have_the_tables_as_the_handler_uses_them():
    path = Path(__file__).resolve().parents[3] / "docs_roll" / "gateway_fields.md"
    again = "python -m roll_async.agents.gateway.fields > docs_roll/gateway_fields.md"
    assert path.read_text().strip() == page().strip(), f"run {again}"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_field_that_the_api_does_not_have_is_refused_by_its_name(dialect):
    with pytest.raises(BadRequest, match="chat_template_kwargs: there is no such field"):
        asked(dialect, chat_template_kwargs={})
    assert asked(dialect, chat_template_kwargs=None)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", ["NaN", "Infinity", "-Infinity", "1e400", "1" * 4301, "-1", '"1"', "[]", "true"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "limit"])
def test_numbers_that_are_none_are_refused(dialect, kind, name):
    name = LIMIT[dialect] if name == "limit" else name
    body = json.dumps({**SMALLEST[dialect], name: "HERE"}).replace('"HERE"', kind)
    with pytest.raises(BadRequest, match=f"{name}|JSON|range"):
        read(dialect, body.encode())


@pytest.mark.parametrize(
    ("dialect", "fields", "said"),
    [
        ("chat", {"temperature": 2.1}, "temperature"),
        ("anthropic", {"temperature": 1.1}, "temperature"),
        ("chat", {"top_p": 0}, "top_p"),
        ("chat", {"top_k": -2}, "top_k"),
        ("anthropic", {"top_k": -1}, "top_k"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_tokens": 1.5}, "max_tokens"),
        ("chat", {"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ("chat", {"stop": [""]}, "stop"),
        ("chat", {"stop": ""}, "stop"),
        ("chat", {"stop": [1]}, "stop"),
        ("chat", {"stop": {"a": 1}}, "stop"),
        ("anthropic", {"stop_sequences": [""]}, "stop"),
        ("chat", {"stop": ["x"] * (MAX_STOPS + 1)}, "stop"),
        ("chat", {"stop": ["x" * 1000]}, "stop"),
        ("chat", {"stream": "yes"}, "stream"),
        ("chat", {"stream_options": True}, "stream_options"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ("responses", {"tool_choice": "required"}, "tool_choice"),
        ("anthropic", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("chat", {"model": 3}, "model"),
        ("chat", {"messages": "hello"}, "messages"),
        ("chat", {"messages": {"role": "user"}}, "messages"),
        ("chat", {"messages": ["hello"]}, "messages"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": 1}]}, "role"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "content"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]}, "name"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "function"),
        ("chat", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        ("chat", {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools"),
        ("responses", {"input": [{"role": "king"}]}, "role"),
        ("responses", {"input": 3}, "input"),
        ("responses", {"instructions": 3}, "instructions"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools"),
        ("anthropic", {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "text"),
        ("anthropic", {"system": 3}, "content"),
        ("anthropic", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ("anthropic", {"tools": [{"name": "f", "input_schema": []}]}, "input_schema"),
        ("chat", {"messages": [{"role": "user", "content": "half \ud83d"}]}, "surrogate"),
        ("chat", {"metadata": {"\ud83d": 1}}, "surrogate"),
        ("chat", {"messages": [USER] * (MAX_MESSAGES + 1)}, "messages: 10001 of them"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}] * (MAX_TOOLS + 1)}, "tools: 1001"),
        ("chat", {"metadata": [0] * MAX_VALUES}, "more than 100000 values"),
    ],
)
def test_faults_of_the_client_are_named(dialect, fields, said):
    with pytest.raises(BadRequest, match=said):
        asked(dialect, **fields)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"messages": "\xed\xa0\xbd"}', b"[" * 100_000, b'{"a":' * 100_000],
    ids=repr,
)
def test_what_is_no_object_of_json_in_utf8_is_refused(raw):
    with pytest.raises(BadRequest, match="JSON|UTF-8"):
        read("chat", raw)


def test_as_many_as_the_bounds_say_are_read():
    tool = {"type": "function", "function": {"name": "f"}}
    turn = asked("chat", messages=[USER] * MAX_MESSAGES, tools=[tool] * MAX_TOOLS).turn
    assert (len(turn.messages), len(turn.tools)) == (MAX_MESSAGES, MAX_TOOLS)
    stops = ["x" * MAX_STOP_CHARACTERS] * MAX_STOPS
    assert asked("chat", stop=stops).turn.stop == tuple(stops)


def test_depth_has_a_bound_in_the_body_and_in_the_arguments_of_its_calls():
    def nested(depth):
        return json.loads("[" * depth + "]" * depth)

    assert asked("chat", metadata=nested(MAX_DEPTH - 2))
    with pytest.raises(BadRequest, match=f"deeper than {MAX_DEPTH}"):
        asked("chat", metadata=nested(MAX_DEPTH))
    with pytest.raises(BadRequest, match="100000 values"):
        call = {"function": {"name": "f", "arguments": json.dumps({"a": [0] * 60_000})}}
        asked("chat", messages=[USER, {"role": "assistant", "tool_calls": [call, call]}])


@pytest.mark.parametrize(
    "arguments", ["[" * 5000, '{"a": ' + "1" * 4301 + "}", '{"a": NaN}', '{"a": "\\ud83d"}', "1 +", "5"]
)
def test_arguments_that_are_no_object_stay_the_text_that_they_were(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = asked("chat", messages=[{"role": "assistant", "tool_calls": [call]}]).turn.messages
    assert message.tool_calls[0].arguments == {"text": arguments}


def test_calls_that_responses_sends_one_by_one_are_those_of_one_message():
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": "1", "output": "2"}
    user, said = {"role": "user", "content": "x"}, {"role": "assistant", "content": "well"}
    thought = {"type": "reasoning", "summary": []}

    def read_as(*items):
        turn = asked("responses", input=list(items)).turn
        return [(m.role, m.content, [c.name for c in m.tool_calls], m.call_id) for m in turn.messages]

    first, last = ("user", "x", [], ""), ("tool", "2", [], "1")
    assert read_as(user, thought, call, output) == [first, ("assistant", "", ["add"], ""), last]
    assert read_as(user, call, call, output) == [first, ("assistant", "", ["add"] * 2, ""), last]
    assert read_as(user, said, call, output) == [first, ("assistant", "well", ["add"], ""), last]
    assert read_as(call) == [("assistant", "", ["add"], "")]


def test_the_digest_is_of_the_whole_body():
    long = "x" * 50_000
    first, second = (asked("chat", messages=[{"role": "user", "content": long + end}]).digest for end in "ab")
    assert first != second


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.sampled_from(
    ["user", "assistant", "tool", "system", "text", "tool_use", "tool_result", "function", "f", "{}"]
)
PLACES = [
    "role",
    "content",
    "type",
    "text",
    "name",
    "id",
    "tool_calls",
    "function",
    "arguments",
    "input",
    "tool_use_id",
]
PIECE = st.recursive(
    WORDS | JSON,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(PLACES), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_whatever_a_body_says_it_is_a_turn_that_a_template_can_render_or_a_named_refusal(dialect, sessions):
    from roll_async.agents.rendering import TemplateRenderer

    renderer = TemplateRenderer(sessions([])[2])
    names = [name for name in DIALECTS[dialect].FIELDS if "." not in name]

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.dictionaries(st.sampled_from(names), PIECE, max_size=4), st.lists(PIECE, min_size=1, max_size=4))
    def one(fields, items):
        place = "input" if dialect == "responses" else "messages"
        body = json.dumps({**SMALLEST[dialect], place: [USER, *items], **fields}).encode()
        try:
            turn = read(dialect, body).turn
        except BadRequest as error:
            assert len(str(error)) < 400
            return
        rendered = renderer.render(turn.messages, turn.tools, ())
        renderer.encode(rendered.text)
        [message.key() for message in turn.messages]

    one()
