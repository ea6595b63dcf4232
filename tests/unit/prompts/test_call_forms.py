"""Calls of tools in the forms of the model families: read from text, and found by what a chat template writes."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_async.prompts.call_forms import FORMS, PROBE_TOOL, TemplateCalls, plain_id, typed, written_by
from roll_async.prompts.tool_calls import HERMES, ToolCall

BY_FAMILY = {form.family: form for form in FORMS}


def as_json(key):
    return lambda name, arguments: json.dumps({"name": name, key: arguments})


def tagged(call, argument):
    def write(name, arguments):
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        return call(name, "".join(argument(k, v) for k, v in values.items()))

    return write


MUSE = ("<atem:function_calls>\n", "\n</atem:function_calls>")
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
FAMILIES = {  # what stands around all calls, between two, around each; the call itself
    "Hermes": ("", "", "\n", "<tool_call>\n", "\n</tool_call>", as_json("arguments")),
    "Qwen3-Coder": (
        *("", "", "\n", "<tool_call>\n", "\n</tool_call>"),
        tagged(lambda n, a: f"<function={n}>\n{a}</function>", lambda k, v: f"<parameter={k}>\n{v}\n</parameter>\n"),
    ),
    "GLM-4.5": (
        *("", "", "\n", "<tool_call>", "</tool_call>"),
        tagged(lambda n, a: f"{n}\n{a}", lambda k, v: f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n"),
    ),
    "MiniMax": (
        *("<minimax:tool_call>\n", "\n</minimax:tool_call>", "\n", "", ""),
        tagged(
            lambda n, a: f'<invoke name="{n}">\n{a}</invoke>', lambda k, v: f'<parameter name="{k}">{v}</parameter>\n'
        ),
    ),
    "Muse": (
        *(*MUSE, "\n", "", ""),
        tagged(
            lambda n, a: f'<atem:invoke name="{n}">\n{a}</atem:invoke>',
            lambda k, v: f'<atem:parameter name="{k}">{v}</atem:parameter>\n',
        ),
    ),
    "Mistral": ("", "", "", "[TOOL_CALLS]", "", lambda n, a: f"{n}[ARGS]{json.dumps(a)}"),
    "DeepSeek-V3": (
        *(*DEEPSEEK, "\n", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        lambda n, a: f"function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```",
    ),
    "DeepSeek-V3.1": (
        *(*DEEPSEEK, "", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        lambda n, a: f"{n}<｜tool▁sep｜>{json.dumps(a)}",
    ),
    "Kimi-K2": (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "", "<|tool_call_begin|>", "<|tool_call_end|>"),
        lambda n, a: f"functions.{n}:0<|tool_call_argument_begin|>{json.dumps(a)}",
    ),
    "gpt-oss": (
        *("", "", "", "<|channel|>commentary to=functions.", "<|call|>"),
        lambda n, a: f"{n} <|constrain|>json<|message|>{json.dumps(a)}",
    ),
    "Llama-3": ("", "", "; ", "", "", as_json("parameters")),
    "GLM-4": ("", "", "<|assistant|>", "", "", lambda n, a: f"{n}\n{json.dumps(a)}"),
}
EACH = pytest.mark.parametrize("family", FAMILIES)
HAVE_JSON = pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f not in ("Qwen3-Coder", "GLM-4.5", "MiniMax", "Muse")]
)
WEATHER, TIME = (
    ("get_weather", {"city": "Z", "days": 5}),
    ("get_time", {"zone": 'a "b" \\ {}\n  c', "on": [True, None]}),
)
ENDS = {  # of a call, inside the text of an argument
    "Qwen3-Coder": "</parameter></tool_call>",
    "GLM-4.5": "</tool_call> </arg_value>!",
    "MiniMax": "</parameter> </invoke",
    "Muse": "</atem:parameter> </atem:invoke",
}
LINEAR_S = 5.0
"""For 200 kB, where the slowest text takes a tenth of it on a slow core; reading anew from each mark takes minutes."""


def said(family, *calls):
    before, after, between, opens, closes, write = FAMILIES[family]
    return before + between.join(f"{opens}{write(*call)}{closes}" for call in calls) + after


def calls_of(*calls):
    return [ToolCall(name=name, arguments=arguments) for name, arguments in calls]


def test_every_family_has_its_cases_here():
    assert set(FAMILIES) == set(BY_FAMILY)


@EACH
def test_calls_are_read_in_their_order_and_leave_no_text(family):
    form = BY_FAMILY[family]
    assert form.read(said(family, WEATHER)) == (form.read(said(family, WEATHER))[0], calls_of(WEATHER))
    content, calls = form.read(said(family, WEATHER, TIME, WEATHER))
    assert calls == calls_of(WEATHER, TIME, WEATHER)
    assert content.replace("<|channel|>commentary", "").strip() == ""


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("Llama-3", "GLM-4", "gpt-oss")])
def test_what_is_said_beside_calls_is_the_content(family):
    content, calls = BY_FAMILY[family].read(f"Let me see.\n{said(family, WEATHER)}\n")
    assert (content, calls) == ("Let me see.", calls_of(WEATHER))


@EACH
def test_an_answer_without_calls_keeps_its_white_space(family):
    for text in (" It rains in Z.\n", '\n{"rain": true}\n', "", "a <b> [c] {d}\n"):
        assert BY_FAMILY[family].read(text) == (text, [])


@EACH
def test_a_call_without_arguments_has_none(family):
    assert BY_FAMILY[family].read(said(family, ("now", {})))[1] == calls_of(("now", {}))


@pytest.mark.parametrize(
    "family", ["Hermes", "Mistral", "DeepSeek-V3", "DeepSeek-V3.1", "Kimi-K2", "gpt-oss", "Llama-3"]
)
def test_arguments_may_be_the_text_of_json(family):
    form = BY_FAMILY[family]
    assert form.read(said(family, ("get_weather", '{"city": "Z", "days": 5}')))[1] == calls_of(WEATHER)
    for bad in ('{"city": ', "[]", "Z"):
        (call,) = form.read(said(family, ("get_weather", bad)))[1]
        assert call.problem and not call.arguments


@pytest.mark.parametrize("family", ["Hermes", "Llama-3"])
@pytest.mark.parametrize("key", ["args", "input", "parameters", "arguments", "kwargs"])
def test_arguments_under_another_key_are_a_problem_and_not_left_out(family, key):
    right = "parameters" if family == "Llama-3" else "arguments"
    _, _, _, opens, closes, _ = FAMILIES[family]
    (call,) = BY_FAMILY[family].read(f'{opens}{{"name": "get_weather", "{key}": {{"city": "Z"}}}}{closes}')[1]
    if key == right:
        assert call == ToolCall(name="get_weather", arguments={"city": "Z"})
    else:
        assert f'"{right}": object' in call.problem and f'"{key}"' in call.problem


@EACH
def test_a_call_that_is_cut_is_whole_or_a_problem(family):
    form, text = BY_FAMILY[family], said(family, WEATHER)
    for end in range(len(text)):
        for call in form.read(text[:end])[1]:
            assert call.problem or call == calls_of(WEATHER)[0], text[:end]
    opening = text.index("get_weather") + len("get_weather")
    ends = range(opening + 12, len(text) - 40)
    assert all(form.read(text[:end])[1] for end in ends), "a call that was begun is never passed over"


@EACH
def test_end_marks_in_the_text_of_an_argument_end_nothing(family):
    form = BY_FAMILY[family]
    marks = ENDS.get(family, f"{form.closes or form.opens} {form.opens}{form.closes}")
    call = ("run", {"code": f"print('{marks}')\n"})
    assert form.read(said(family, call, WEATHER))[1] == calls_of(call, WEATHER)


@EACH
def test_calls_inside_thoughts_are_none(family):
    form, call = BY_FAMILY[family], said(family, WEATHER)
    assert form.read(f"<think>I could {call} but no</think>It rains.")[1] == []
    assert form.read(f"I could {call} but no</think>It rains.", opened="<think>")[1] == []
    for thought in ("<think>hm</think>\n\n", f"<think>{call}</think>\n", "<think>\n\n</think>\n\n"):
        content, calls = form.read(f"{thought}{said(family, TIME)}")
        assert calls == calls_of(TIME) and content.startswith(thought.strip())
    (call,) = form.read(f"<think>hm. \n{said(family, WEATHER)}" if form.section or form.closes else f"<think>{call}")[
        1
    ] or [None]
    assert call is None or "thought that does not end" in call.problem


@EACH
def test_marks_of_thoughts_in_an_argument_begin_and_end_none(family):
    form, call = BY_FAMILY[family], ("run", {"code": "a</think>b<think>"})
    assert form.read(said(family, call))[1] == calls_of(call)
    assert form.read(f"<think>hm</think>{said(family, call)}")[1] == calls_of(call)


@HAVE_JSON
@pytest.mark.parametrize(
    "value",
    ["9" * 4301, "9" * 4000, "NaN", "-Infinity", "[" * 900 + "]" * 900, "[" * 100_000, '__import__("os")', "{'a': 1}"],
    ids=["digits", "bits", "nan", "infinity", "deep", "deeper", "code", "python"],
)
def test_what_no_json_may_hold_is_a_problem(family, value):
    form, text = BY_FAMILY[family], said(family, ("get_weather", {"city": "VALUE"}))
    (call,) = form.read(text.replace('"VALUE"', value))[1]
    assert call.problem.startswith("the call is not valid JSON (") and not call.arguments


@pytest.mark.parametrize("family", ["Qwen3-Coder", "GLM-4.5", "MiniMax", "Muse"])
def test_values_between_tags_are_text_or_json_and_never_run(family):
    form = BY_FAMILY[family]
    for value in ('__import__("os")', "{'a': 1}", "[1, ", "07", "True"):
        assert form.read(said(family, ("f", {"a": value})))[1] == calls_of(("f", {"a": value}))
    for value in ("9" * 4301, "[" * 900 + "]" * 900, "[" * 100_000):
        (call,) = form.read(said(family, ("f", {"a": value})))[1]
        assert 'argument "a": ' in call.problem
    assert form.read(said(family, ("f", {"a": "  b\n    c"})))[1] == calls_of(("f", {"a": "  b\n    c"}))


@EACH
def test_half_an_emoji_is_replaced_where_it_comes_in(family):
    text = said(family, ("f", {"a": "VALUE"})).replace("VALUE", r"\ud83d")
    (call,) = BY_FAMILY[family].read(text)[1]
    assert json.dumps(call.arguments).encode() and str(call.arguments).encode()


PIECES = st.lists(
    st.sampled_from(
        [
            *{piece for family in FAMILIES for piece in FAMILIES[family][:5]},
            *('{"name": "f", ', '"arguments": {"a": 1}}', '"parameters": {}}', "f", "\n", " ", "<think>", "</think>"),
            *("<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>"),
            *("</arg_value>", '<invoke name="f">', '<parameter name="a">', "</invoke>", "[ARGS]", "{}", '"', "\\"),
            *("function<｜tool▁sep｜>f\n```json\n", "```", "<|tool_call_argument_begin|>", "<|message|>", "[", "}"),
        ]
    ),
    max_size=30,
).map("".join)


@settings(deadline=None)
@given(PIECES)
def test_no_text_is_too_odd_for_any_form(text):
    for form in FORMS:
        content, calls = form.read(text, [PROBE_TOOL])
        assert isinstance(content, str) and all(call.problem or call.name is not None for call in calls)
        assert (content == text) or calls


@EACH
def test_marks_by_the_ten_thousand_are_read_in_linear_time(family):
    form = BY_FAMILY[family]
    before, after, between, opens, closes, write = FAMILIES[family]
    one, name = said(family, WEATHER), f"{opens}{write('f', {'a': 'b'})}"
    pieces = [
        *(one, opens or form.opens, name[:-1], name[: len(name) // 2], f"{opens}{closes}", closes, before, after),
        *(f'{opens}{{"a": "', f'{opens}{{"name": "f", "a\\"":"{closes}', between, f"{before}{opens}<parameter=a>"),
        *("<think>" + one, one + "</think>", f"{form.opens}x", f"{form.opens}{{}}" + " " * 50, '"', "\\"),
        *("<parameter=a></parameter>x", "<arg_key>a</arg_key><arg_value></arg_value>x", '{"name": "f"; '),
    ]
    for piece in filter(None, pieces):
        text = piece * (200_000 // len(piece))
        for whole in (f"{before}{text}", f"{text}{closes or form.opens}x"):
            started = time.process_time()
            form.read(whole)
            assert time.process_time() - started < LINEAR_S, (piece, len(whole))


def schema(**types):
    properties = {name: {"type": kind} if isinstance(kind, str) else kind for name, kind in types.items()}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


@pytest.mark.parametrize("family", ["Qwen3-Coder", "GLM-4.5", "MiniMax", "Muse"])
def test_the_schema_of_a_tool_says_what_is_text(family):
    form, values = BY_FAMILY[family], {"a": "5", "b": "5", "c": "true", "d": "True", "e": "null"}
    tools = [schema(a="string", b="integer", c={"type": ["string", "null"]}, d="boolean")]
    (call,) = form.read(said(family, ("f", values)), tools)[1]
    assert call.arguments == {"a": "5", "b": 5, "c": "true", "d": True, "e": None}


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ('"a"', {"type": "string"}, '"a"'),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("[1]", {"anyOf": [{"type": "string"}, {"type": "array"}]}, [1]),
        ("[1]", {"oneOf": [{"type": "string"}, {"type": "null"}]}, "[1]"),
        ("None", {"type": ["integer", "null"]}, None),
        ("None", None, "None"),
        ("5 6", {"type": "integer"}, "5 6"),
        ("5", {"type": {"odd": 1}, "anyOf": 7}, 5),
        ("5", "odd", 5),
    ],
)
def test_a_value_is_of_one_of_the_types_of_its_schema(text, kind, value):
    assert typed(text, kind) == value


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("Qwen3-Coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("Qwen3-Coder", "<tool_call>f</tool_call>"),
        ("Qwen3-Coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>"),
        ("Qwen3-Coder", "<function=f>\nsome words\n</function>"),
        ("Qwen3-Coder", "<function=></function>"),
        ("GLM-4.5", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("GLM-4.5", "<tool_call>f<arg_key>a</arg_key></tool_call>"),
        ("GLM-4.5", "<tool_call></tool_call>"),
        ("MiniMax", "<minimax:tool_call>f()</minimax:tool_call>"),
        ("Mistral", "[TOOL_CALLS] f(1)"),
        ("Mistral", "[TOOL_CALLS][]"),
        ("Mistral", '[TOOL_CALLS][{"name": "f", "args": {}}]'),
        ("DeepSeek-V3", f"{DEEPSEEK[0]}f(1){DEEPSEEK[1]}"),
        ("DeepSeek-V3", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>"),
        ("Kimi-K2", "<|tool_call_begin|>f<|tool_call_end|>"),
        ("gpt-oss", "<|channel|>commentary to=functions.f now"),
        ("Llama-3", '<|python_tag|>search.call(query="a")'),
        ("Llama-3", '{"name": "f", "parameters": {"a": }}'),
        ("Llama-3", '{"name": "f", "parameters": 5}'),
        ("GLM-4", 'f\n{"a": }'),
        ("Hermes", '<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>'),
        ("Hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call></tool_call>'),
    ],
)
def test_what_looks_like_a_call_and_is_none_of_the_family_is_a_problem(family, text):
    content, calls = BY_FAMILY[family].read(text)
    assert [bool(call.problem) for call in calls] == [True] and content.strip()


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("Llama-3", f"<|python_tag|>{as_json('parameters')(*WEATHER)}", [WEATHER]),
        (
            "Llama-3",
            f"I look.<|python_tag|>{as_json('parameters')(*WEATHER)}; {as_json('parameters')(*TIME)}",
            [WEATHER, TIME],
        ),
        ("Llama-3", '{"type": "function", "name": "f", "parameters": {}}', [("f", {})]),
        ("Llama-3", '{"name": "Bob", "age": 5}', []),
        ("Llama-3", '{"answer": {"name": "f"}}', []),
        ("Mistral", f"[TOOL_CALLS] [{as_json('arguments')(*WEATHER)}, {as_json('arguments')(*TIME)}]", [WEATHER, TIME]),
        ("Mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "call00000"}]', [("f", {})]),
        ("Mistral", "[TOOL_CALLS]f[CALL_ID]call00000[ARGS]{}", [("f", {})]),
        ("Qwen3-Coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", [("f", {"a": 1})]),
        ("GLM-4.5", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", [("f", {"a": 1})]),
        ("GLM-4", "I look.<|assistant|>f\n{}", [("f", {})]),
        ("GLM-4", "\nThe answer:\n{1, 2}", []),
        ("gpt-oss", " to=functions.f<|channel|>commentary json<|message|>{}", [("f", {})]),
        (
            "Kimi-K2",
            "<|tool_call_begin|>functions.a.b:12<|tool_call_argument_begin|>{}<|tool_call_end|>",
            [("a.b", {})],
        ),
    ],
)
def test_variants_of_a_family_are_read(family, text, calls):
    assert BY_FAMILY[family].read(text)[1] == calls_of(*calls)


def test_a_line_before_json_that_names_no_offered_function_is_an_answer():
    for text, calls in (("Result:\n{}", []), ("Result\n{}", []), ("now\n{}", [("now", {})])):
        assert BY_FAMILY["GLM-4"].read(text, [{"type": "function", "function": {"name": "now"}}])[1] == calls_of(*calls)


def template(turn, *, several="{% for c in m.tool_calls %}", offers=True, raises=""):
    """A chat template whose turns with calls are `turn` for each of them, `c.function`."""
    return (
        ("{% if tools %}[TOOLS {{ tools | tojson }}]{% endif %}" if offers else "")
        + raises
        + "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.tool_calls %}"
        + several
        + turn
        + "{% endfor %}{{ '<end>' }}{% else %}{{ m.content }}{{ '<end>' }}{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )


ARGUMENTS = "{{ c.function.arguments | tojson }}"
VALUES = "{% for k, v in c.function.arguments | items %}"
VALUE = "{{ v if v is string else v | tojson }}"
TEMPLATES = {
    "Hermes": '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": ' + ARGUMENTS + "}\n</tool_call>\n",
    "Qwen3-Coder": "<tool_call>\n{{ '<function=' + c.function.name }}>\n"
    + VALUES
    + "{{ '<parameter=' + k }}>\n{{ v | tojson if v is iterable and v is not string else v | string }}\n</parameter>\n"
    + "{% endfor %}</function>\n"
    + "</tool_call>\n",
    "GLM-4.5": "<tool_call>{{ c.function.name }}\n"
    + VALUES
    + f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n{{% endfor %}}</tool_call>\n",
    "MiniMax": '<minimax:tool_call>\n<invoke name="{{ c.function.name }}">\n'
    + VALUES
    + f'<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n{{% endfor %}}</invoke>\n</minimax:tool_call>',
    "Muse": '<atem:function_calls>\n<atem:invoke name="{{ c.function.name }}">\n'
    + VALUES
    + f'<atem:parameter name="{{{{ k }}}}">{VALUE}</atem:parameter>\n{{% endfor %}}</atem:invoke>\n'
    + "</atem:function_calls>",
    "Mistral": "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    '[TOOL_CALLS] [{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}]',
    "DeepSeek-V3": "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>"
    "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}<｜tool▁call▁end｜>"
    "{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}",
    "DeepSeek-V3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name + '<｜tool▁sep｜>' + "
    "c.function.arguments }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "Kimi-K2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    + ARGUMENTS
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "gpt-oss": "<|start|>assistant to={{ 'functions.' + c.function.name }}<|channel|>commentary json<|message|>"
    + ARGUMENTS
    + "<|call|>",
    "Llama-3": '{"name": "{{ c.function.name }}", "parameters": ' + ARGUMENTS + "}",
    "GLM-4": "{% if not loop.first %}<|assistant|>{% endif %}{{ c.function.name }}\n" + ARGUMENTS,
}


def rendering(source):
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    from jinja2 import TemplateError

    def render(chat):
        try:
            return transformers.render_jinja_template(
                [chat], chat_template=source, tools=[PROBE_TOOL], add_generation_prompt=True
            )[0][0]
        except (TemplateError, TypeError):
            return ""

    return render


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_form_of_a_template_is_found_by_reading_back_what_it_writes(family):
    render = rendering(template(TEMPLATES[family]))
    found = written_by(render)
    assert found is not None and found.form.family == family and found.takes_several
    assert found.as_text == family.startswith("DeepSeek") and (found.id_of is plain_id) == (family != "Kimi-K2")
    calls = calls_of(WEATHER, TIME)
    written = render([{"role": "user", "content": "?"}, found.message("", calls, 0)]).partition("?<end><assistant>")[2]
    tools = [PROBE_TOOL, *({"type": "function", "function": {"name": call.name}} for call in calls)]
    assert found.form.read(written.removesuffix("<end><assistant>"), tools)[1] == calls
    assert [c.name for c in found.form.read(found.example)[1]] == ["function_name"]
    assert found.form.read(found.example)[1] == calls_of(("function_name", {"argument_name": "value"}))


def test_every_family_has_a_template_here():
    assert set(TEMPLATES) == set(BY_FAMILY)


@pytest.mark.parametrize(
    "turn",
    [
        "<|tool_call_start|>[{{ c.function.name }}(a=1)]<|tool_call_end|>",
        '<tool_call>{"name": "{{ c.function.name }}", "args": ' + ARGUMENTS + "}</tool_call>",
        "{{ c.function.name }}",
        "",
        "{{ raise_exception('no calls') }}",
    ],
)
def test_a_form_that_is_not_read_back_is_none(turn):
    assert written_by(rendering(template(turn))) is None


def test_a_template_may_take_one_call_a_turn():
    one = "{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}{% endif %}{% for c in m.tool_calls %}"
    found = written_by(rendering(template(TEMPLATES["Llama-3"], several=one)))
    assert found is not None and not found.takes_several
    silent = "{% for c in m.tool_calls[:1] %}"
    found = written_by(rendering(template(TEMPLATES["gpt-oss"], several=silent)))
    assert found is not None and not found.takes_several


def test_hermes_is_what_is_read_where_nothing_else_is_said():
    assert HERMES is FORMS[0] and TemplateCalls(HERMES).id_of("f", 3) == "call00003"
