"""The tools that come with the package, as a policy calls them."""

import asyncio
import json
import math
import random
from types import SimpleNamespace

import pytest

from roll_async.agents.tools.mcp import McpTools, function_of
from roll_async.agents.tools.python import Python, PythonOptions
from roll_async.agents.tools.search import Search, SearchOptions
from roll_async.rewards.sandbox.confine import missing


def searching(tmp_path, rows, **options):
    file = tmp_path / "passages.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tool = Search(SearchOptions(file=str(file), **options))
    return lambda query: asyncio.run(tool.call("search", {"query": query}))


def test_a_search_ranks_as_a_loop_over_words_and_passages_does(tmp_path):
    rng = random.Random(0)
    words = [f"w{i}" for i in range(9)]
    texts = [rng.choices(words, [1 / (i + 1) for i in range(9)], k=rng.randint(1, 12)) for _ in range(40)]
    mean = sum(map(len, texts)) / len(texts)

    def score(text, query):
        total = 0.0
        for word in query:
            having, count = sum(word in t for t in texts), text.count(word)
            weight = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            total += weight * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(text) / mean)) if count else 0.0
        return total

    search = searching(tmp_path, [{"text": " ".join(text)} for text in texts], num_results=40)
    for _ in range(30):
        query = rng.sample(words, 3)
        found = [line.partition("] ")[2].split() for line in search(" ".join(query)).splitlines()]
        wanted = sorted((score(text, query) for text in texts if set(text) & set(query)), reverse=True)
        assert [score(text, query) for text in found] == pytest.approx(wanted)


def test_a_search_says_title_and_text_is_bounded_and_may_find_nothing(tmp_path):
    rows = [{"title": "Otters", "text": "swim in rivers"}, {"text": "swim"}, {"text": "rivers " * 30}]
    search = searching(tmp_path, rows, num_results=2, max_characters=20)
    assert search("OTTERS") == "[1] Otters: swim in rive"
    assert search("rivers").splitlines() == ["[1] rivers rivers rivers", "[2] Otters: swim in rive"]
    assert search("cats") == "nothing found"
    (tmp_path / "passages.jsonl").write_text('{"text": "caf\u00e9\u2028s\x85"}\n', encoding="utf-8")
    tool = Search(SearchOptions(file=str(tmp_path / "passages.jsonl")))
    assert asyncio.run(tool.call("search", {"query": "caf\u00e9"})) == "[1] caf\u00e9\u2028s\x85"
    with pytest.raises(ValueError, match="query"):
        asyncio.run(Search(SearchOptions(file=str(tmp_path / "passages.jsonl"))).call("search", {}))


def test_a_program_of_the_policy_is_contained_or_refused_as_the_config_says():
    PythonOptions(isolation="best_effort")
    if missing():
        with pytest.raises(ValueError, match="generated code cannot be contained here"):
            PythonOptions()
    else:
        PythonOptions()
    for wrong in ({"timeout": 0}, {"num_hosts": 0}, {"isolation": "none"}):
        with pytest.raises(ValueError, match="timeout must be > 0"):
            PythonOptions(**wrong)


@pytest.mark.slow
def test_a_program_of_the_policy_says_what_it_prints_and_what_went_wrong():
    async def work():
        tool = Python(PythonOptions(isolation="best_effort", num_hosts=1, timeout=20))
        try:
            codes = ("print(6 * 7)", "x = 1", "print(1); 1 / 0")
            printed, silent, failed = [await tool.call("python", {"code": code}) for code in codes]
            assert (printed, silent) == ("42", "(nothing printed)")
            assert failed.startswith("1\nerror: ") and "ZeroDivisionError" in failed
            with pytest.raises(ValueError, match="code"):
                await tool.call("python", {"code": 1})
        finally:
            await tool.close()

    asyncio.run(work())


@pytest.mark.parametrize("field", ["input_schema", "inputSchema"])
def test_a_tool_of_an_mcp_server_is_offered_as_it_is_listed(field):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for listed, told in ((None, ""), ("Adds.", "Adds.")):
        found = function_of(SimpleNamespace(name="add", description=listed, **{field: schema}))
        assert found["function"] == {"name": "add", "description": told, "parameters": schema}


@pytest.mark.parametrize("field", ["is_error", "isError"])
def test_a_tool_of_an_mcp_server_says_its_texts_and_its_error_is_raised(field):
    class Session:
        async def call_tool(self, name, arguments):
            content = [SimpleNamespace(type="text", text=text) for text in arguments["says"]]
            content.append(SimpleNamespace(type="image"))
            return SimpleNamespace(content=content, **{field: name == "fails"})

    async def work():
        tool = McpTools(None)
        tool._session = Session()
        assert await tool.call("speaks", {"says": ["a", "b"]}) == "a\nb"
        with pytest.raises(RuntimeError, match="^no such row$"):
            await tool.call("fails", {"says": ["no such row"]})
        with pytest.raises(RuntimeError, match="^the tool failed$"):
            await tool.call("fails", {"says": []})

    asyncio.run(work())
