"""Tools with the chat templates of model families: how they are offered, called, and answered."""

import asyncio
import logging
import time
from array import array

import pytest

pytest.importorskip("transformers")

from roll_async.agents.messages import Message, TurnRequest
from roll_async.agents.rendering import TemplateRenderer
from roll_async.agents.session import Session, SessionOptions
from roll_async.prompts.tool_calls import HERMES, ToolCall
from roll_async.rollout.tools import ToolCompletionCallback
from roll_async.rollout.trace_tree import TraceTree
from roll_async.schema import Completion, FinishReason, SamplingParams
from tests.family_tokenizers import make_family
from tests.patience import patient

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}, "count": {"type": "integer"}}},
    },
}
CALL = ToolCall(name="look_up", arguments={"key": "7", "count": 2})
WRITTEN = {  # by family: one call, what stands between two, the mark that ends the turn
    "qwen-3": (
        '<tool_call>\n{"name": "look_up", "arguments": {"key": "7", "count": 2}}\n</tool_call>',
        "\n",
        "<|im_end|>",
    ),
    "glm-4.5": (
        "<tool_call>look_up\n<arg_key>key</arg_key>\n<arg_value>7</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        *("\n", "<|observation|>"),
    ),
    "glm-4": ('look_up\n{"key": "7", "count": 2}', "<|assistant|>", "<|observation|>"),
    "llama-3.1": ('{"name": "look_up", "parameters": {"key": "7", "count": 2}}', "; ", "<|eot_id|>"),
    "gemma": (
        '<tool_call>\n{"name": "look_up", "arguments": {"key": "7", "count": 2}}\n</tool_call>',
        "\n",
        "<end_of_turn>",
    ),
}
FORMS = {"qwen-3": "Hermes", "glm-4.5": "GLM-4.5", "glm-4": "GLM-4", "llama-3.1": "Llama-3", "gemma": "Hermes"}
FIRST = {"glm-4.5": "\n<think></think>\n"}
ALTERNATING = (
    "{{ '<s>' }}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role in ['user', 'assistant'] and not m.tool_calls %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "{{ ', \"id\": \"' + c.id + '\"}' + ('' if loop.last else ', ') }}{% endfor %}{{ ']</s>' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
"""As Mistral's: what is sampled is a turn of the assistant, and after a result comes another one."""
ODD = (
    "{% if tools %}{{ 'TOOLS ' + (tools | tojson) }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '[' + c.function.name + '()]' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Sampled:
    """A policy that samples these texts, each with its mark."""

    def __init__(self, tokenizer, *turns):
        self._tokenizer, self._turns, self.requests = tokenizer, list(turns), []

    async def generate(self, request, *, conversation, validation):
        self.requests.append(request)
        text, mark = self._turns.pop(0)
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.convert_tokens_to_ids(mark)]
        return completion(ids)


def completion(ids):
    return Completion(
        request_id="r",
        token_ids=array("i", ids),
        logprobs=array("f", bytes(4 * len(ids))),
        version_runs=((0, len(ids)),),
        finish_reason=FinishReason.STOP,
        generation_s=0.1,
    )


def talk(tokenizer, turns, follow_up):
    """(texts that the policy was asked for, replies, session) of two turns, between which `follow_up` was said."""
    policy = Sampled(tokenizer, *turns)
    options = SessionOptions(sampling=SamplingParams(max_new_tokens=500), max_turns=20, max_context=9000)
    session = Session("t", policy, TemplateRenderer(tokenizer), options)

    async def work():
        asked = [Message(role="user", content="q1")]
        first = await session.turn(TurnRequest(messages=tuple(asked), tools=(TOOL,)))
        asked += [first.message, *follow_up(first)]
        return first, await session.turn(TurnRequest(messages=tuple(asked), tools=(TOOL,)))

    replies = asyncio.run(work())
    return [tokenizer.decode(list(r.prompt_token_ids)) for r in policy.requests], replies, session


def results(first):
    return [Message(role="tool", content=f"r{i}", call_id=call.call_id) for i, call in enumerate(first.tool_calls)]


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_as_the_family_writes_them_and_their_results_continue_the_turn(name):
    call, between, mark = WRITTEN[name]
    said = f"{FIRST.get(name, '')}{call}{between}{call}"
    asked, (first, second), session = talk(make_family(name), [(said, mark), ("done", mark)], results)
    assert [(c.name, c.arguments) for c in first.tool_calls] == [("look_up", CALL.arguments)] * 2
    assert first.finish_reason == "tool_calls" and not first.problems and call not in first.content
    assert len({c.call_id for c in first.tool_calls}) == 2
    assert not session.tree.branches and asked[1].startswith(asked[0] + said + mark)
    after = asked[1].removeprefix(asked[0] + said + mark)
    assert after.index("r0") < after.index("r1") and second.content == "done"
    assert "look_up" in asked[0], "the model is told of the tool"


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_of_a_history_are_written_by_the_template_in_the_form_that_is_read(name):
    renderer = TemplateRenderer(make_family(name))
    assert renderer.calls.family == FORMS[name]
    history = [
        Message(role="user", content="q1"),
        Message(role="assistant", content="", tool_calls=(CALL, CALL)),
        Message(role="tool", content="r0"),
        Message(role="tool", content="r1"),
        Message(role="assistant", content="done"),
        Message(role="user", content="q2"),
    ]
    text = renderer.render(history, [TOOL], ()).text
    turns = text.partition("q1")[2].partition("r0")[0]
    heads = {"llama-3.1": "<|end_header_id|>\n\n", "glm-4": "<|assistant|>"}
    pieces = turns.split(heads[name])[1:] if name in heads else [turns]
    read = [call for piece in pieces for call in renderer.calls.read(piece.partition("<|eot_id|>")[0], [TOOL])[1]]
    assert read == [CALL, CALL]
    assert text.index("r0") < text.index("r1") < text.index("done") < text.index("q2")


def test_results_are_one_turn_of_the_user_with_what_the_user_says_to_them_where_roles_alternate():
    said = lambda first: [*results(first), Message(role="user", content="hurry")]  # noqa: E731
    call, between, mark = WRITTEN["gemma"]
    asked, _, session = talk(make_family("gemma"), [(f"{call}{between}{call}", mark), ("done", mark)], said)
    told = "<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response>\nhurry"
    assert asked[1].endswith(f"<start_of_turn>user\n{told}<end_of_turn>\n<start_of_turn>model\n")
    assert asked[1].count("<start_of_turn>user") == 2 and not session.tree.branches


def test_a_template_that_counts_turns_gets_results_from_the_user():
    tokenizer = make_family("llama-3", ALTERNATING)
    written = '[TOOL_CALLS] [{"name": "look_up", "arguments": {"key": "7", "count": 2}}]'
    turns = [(written, "<|eot_id|>"), (written, "<|eot_id|>")]
    asked, (first, second), session = talk(tokenizer, turns, results)
    assert first.tool_calls[0].arguments == second.tool_calls[0].arguments == CALL.arguments
    # It says the tools before the newest turn of the user, so that each one begins a branch.
    assert dict(session.tree.branches) == {"template": 1} and asked[1].endswith("[/INST]")
    assert "[/INST][TOOL_CALLS] [{" in asked[1] and "[INST]<tool_response>\nr0\n</tool_response>[/INST]" in asked[1]
    renderer = TemplateRenderer(tokenizer)
    assert renderer.calls.family == "Mistral"
    after = tokenizer.decode(list(renderer.between(0, ["r0", "r1"])))
    assert after.count("[INST]") == 1 and after.count("<tool_response>") == 2


@pytest.mark.parametrize("template", [ODD, ODD.replace("c.function.name", "'odd'")])
def test_tools_are_offered_in_our_words_where_the_form_of_the_template_is_not_read(template, caplog):
    tokenizer = make_family("qwen-3", template)
    call, _, mark = WRITTEN["qwen-3"]
    with caplog.at_level(logging.INFO):
        asked, (first, _), session = talk(tokenizer, [(call, mark), ("done", mark)], results)
    assert first.tool_calls[0].arguments == CALL.arguments and not session.tree.branches
    assert "TOOLS " not in asked[0], "or the model would be told of another form"
    assert asked[0].count("look_up") == 1 and '<tool_call>\n{"name": <function>, "arguments"' in asked[0]
    assert "calls of tools are read in the form of Hermes, since the chat template has none" in caplog.text


def test_a_template_that_writes_calls_and_offers_no_tools_is_helped_with_its_own_example():
    quiet = ALTERNATING.replace("{% if tools and loop.last %}", "{% if false %}")
    renderer = TemplateRenderer(make_family("llama-3", quiet))
    text = renderer.render([Message(role="user", content="q")], [TOOL], ()).text
    assert (
        "look_up" in text and '[TOOL_CALLS] [{"name": "function_name", "arguments": {"argument_name": "value"}' in text
    )


def test_the_form_is_told_once_in_the_log(caplog):
    with caplog.at_level(logging.INFO):
        TemplateRenderer(make_family("glm-4.5"))
    (line,) = [r.getMessage() for r in caplog.records if "calls of tools" in r.getMessage()]
    assert line.endswith("in the form of GLM-4.5, which the chat template writes; results are turns of role tool")


def run_tools(name, prompt, said, mark):
    """What the model reads after a turn of an RLVR conversation; None: the conversation is complete."""
    tokenizer = make_family(name)
    seen = []

    async def look_up(arguments):
        seen.append(dict(arguments))
        return f"<{arguments['key']}>"

    class Row:
        extra = {}

    callback = ToolCompletionCallback({"look_up": look_up}, TemplateRenderer(tokenizer))
    tree = TraceTree()
    request = tree.add_request(
        None, array("i", tokenizer.encode(prompt, add_special_tokens=False)), role="user", started_s=0.0
    )
    ids = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.convert_tokens_to_ids(mark)]
    tree.add_turn(request, completion(ids), started_s=0.0)
    found = asyncio.run(callback(Row(), tree, completion(ids)))
    return seen, None if found is None else tokenizer.decode(list(found))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_question_with_tools_reads_the_form_of_the_family(name):
    call, between, mark = WRITTEN[name]
    seen, told = run_tools(name, "q", f"{call}{between}{call}", mark)
    # Without a schema a value between tags is what it looks like.
    key = 7 if name == "glm-4.5" else "7"
    assert seen == [{"key": key, "count": 2}] * 2 and told.count("<7>") == 2


@pytest.mark.parametrize("name", ["qwen-3", "glm-4.5", "gemma"])
def test_a_call_in_the_thought_that_the_prompt_opened_is_not_run(name):
    call, _, mark = WRITTEN[name]
    assert run_tools(name, "q<think>\n", f"perhaps {call}</think>no", mark) == ([], None)
    seen, told = run_tools(name, "q<think>\n", f"perhaps {call}</think>{call}", mark)
    assert len(seen) == 1 and told is not None
    seen, told = run_tools(name, "q<think>\n", f"perhaps {call}", mark)
    assert seen == [] and "the call stands in a thought that does not end" in told


@pytest.mark.parametrize("name", ["qwen-3", "glm-4.5", "glm-4", "llama-3.1", "gemma"])
def test_a_call_that_the_model_leaves_half_written_is_told(name):
    call, _, mark = WRITTEN[name]
    seen, told = run_tools(name, "q", call[: call.index("7") + 1], mark)
    assert seen == [] and "error: the call is not " in told


def test_hermes_is_the_form_of_those_who_have_none():
    assert TemplateRenderer(make_family("deepseek-r1")).calls.family == HERMES.family


def test_thousands_of_results_are_one_turn_in_linear_time():
    renderer = TemplateRenderer(make_family("gemma"))
    many = [Message(role="tool", content="x" * 800) for _ in range(9000)]
    started = time.process_time()
    text = renderer.render(
        [Message(role="user", content="q"), Message(role="assistant", content="a"), *many], (), ()
    ).text
    assert time.process_time() - started < patient(2.0) and text.count("<tool_response>") == 9000
    calls = tuple(ToolCall(name="f", call_id=f"c{i}") for i in range(9000))
    answers = [Message(role="tool", content="r", call_id=f"c{i}") for i in reversed(range(9000))]
    renderer = TemplateRenderer(make_family("qwen-3"))
    started = time.process_time()
    renderer.render([Message(role="user", content="q"), Message(role="assistant", tool_calls=calls), *answers], (), ())
    assert time.process_time() - started < patient(4.0)


def test_each_result_names_the_call_that_it_answers():
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% for c in m.tool_calls or [] %}"
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
        "{% endfor %}{% if m.role == 'tool' %}{{ '(' + m.tool_call_id + ')' }}{% endif %}{% endfor %}"
    )
    renderer = TemplateRenderer(make_family("qwen-3", template))
    calls = (ToolCall(name="f", call_id="x"), ToolCall(name="g", call_id="y"))
    history = [
        *(Message(role="user", content="q"), Message(role="assistant", tool_calls=calls)),
        *(Message(role="tool", content="r1", call_id="y"), Message(role="tool", content="r0")),
        *(Message(role="assistant", tool_calls=calls[:1]), Message(role="tool", content="r2", call_id="x")),
    ]
    text = renderer.render(history, (), ()).text
    assert renderer.calls.family == "Kimi-K2"
    assert "<tool>r1(functions.g:1)<tool>r0(functions.f:0)" in text and text.endswith("<tool>r2(functions.f:2)")
