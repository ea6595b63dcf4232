"""The page of `roll-async view`, asked for as a browser does, and shown by headless Chromium where there is one."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from roll_async.cli import main
from roll_async.observe.reading import page_server
from roll_async.observe.reading.page_server import PageServer, self_contained
from roll_async.observe.reading.run_reader import RunReader
from tests.patience import patient
from tests.unit.observe.written_run import metrics_of, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    output = tmp_path_factory.mktemp("output")
    other = write_run(output, "other", steps=12, learning_rate="2e-6")
    for path in (other / "samples").iterdir():  # another domain, and answers that nobody has scored
        text = re.sub('"score":[0-9.]+', '"score":null', path.read_text().replace('"tools"', '"maths"'), count=2)
        path.write_text(text)
    return [write_run(output), other]


@asynccontextmanager
async def served(*paths):
    readers = [RunReader(path) for path in paths]
    runner, port = await PageServer(readers).start(0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}/") as client:
        try:
            yield client
        finally:
            await runner.cleanup()
            for reader in readers:
                reader.close()


async def said(client, path, **more):
    async with client.get(path, **more) as answer:
        return answer.status, await (answer.json() if answer.content_type == "application/json" else answer.text())


def test_what_was_appended_is_sent_and_nothing_twice(tmp_path):
    async def scenario():
        run = write_run(tmp_path, steps=3, state="running")
        async with served(run) as client:
            _, first = await said(client, "api/runs/0/metrics")
            assert first["columns"]["step"] == [1, 2, 3]
            asked = f"api/runs/0/metrics?from=3&generation={first['generation']}"
            assert (await said(client, asked))[1]["columns"] == {}
            with open(run / "metrics.jsonl", "a") as file:
                file.write(json.dumps(metrics_of(4)) + "\n")
            _, more = await said(client, asked)
            assert (more["from"], more["columns"]["step"]) == (3, [4])
            assert (await said(client, "api/runs/0/metrics?from=4&generation=99"))[1]["from"] == 0, "it went back"

    asyncio.run(scenario())


def test_numbers_have_five_digits_and_whole_ones_all_of_theirs():
    rows = [{"step": 1_234_567, "tokens": 7_654_321.0, "reward": 0.123456789}, {"step": 1_234_568}]
    found = {"step": [1_234_567, 1_234_568], "tokens": [7_654_321.0, None], "reward": [0.12346, None]}
    assert page_server.columns(rows) == found


def test_samples_are_pages_of_fifty_and_a_group_comes_whole(runs):
    async def scenario():
        async with served(*runs) as client:
            _, page = await said(client, "api/runs/0/samples?order=worst&domain=tools&offset=50")
            assert (
                page["count"] == 80 and len(page["rows"]) == 30 and page["choices"]["domain"] == ["addition", "tools"]
            )
            _, group = await said(client, f"api/runs/0/groups/{page['rows'][0]['id']}")
            assert len(group) == 4 and len({row["trajectory"] for row in group}) == 3
            assert (await said(client, "api/differences"))[1][0][0] == "actor_train.training_args.learning_rate"
            wrong = ("api/runs/0/samples?order=x", "api/runs/0/samples?lowest=x", "api/runs/7/lanes", "page/../view.py")
            assert [(await said(client, path))[0] for path in wrong] == [400, 400, 404, 404]
            assert [(await said(client, f"api/runs/0/groups/{n}"))[0] for n in ("999999", "x")] == [404, 404]

    asyncio.run(scenario())


def test_a_page_of_another_name_that_leads_here_is_refused_and_no_script_of_others_runs(runs):
    async def scenario():
        async with served(runs[0]) as client:
            status, _ = await said(client, "api/runs", headers={"Host": "evil.example:80"})
            assert status == 403
            async with client.get("") as answer:
                assert "script-src 'self'" in answer.headers["Content-Security-Policy"]

    asyncio.run(scenario())


def test_no_text_becomes_markup():
    for name in ("view.js", "tokens.js"):
        text = (Path(page_server.__file__).parent / "page" / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted_and_refuses_a_port_in_use(runs):
    words = [sys.executable, "-m", "roll_async.cli", "view", str(runs[0]), "--no-browser", "--port"]
    with subprocess.Popen([*words, "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().split()[0]
            port = address.rstrip("/").rpartition(":")[2]
            second = subprocess.run([*words, port], capture_output=True, text=True, timeout=patient(60))
            assert second.returncode == 2 and second.stderr.count("\n") == 1 and port in second.stderr
            process.send_signal(2)
            assert process.wait(patient(30)) == 0
        finally:
            process.kill()


class Tab:
    """A tab of headless Chromium, over its DevTools protocol."""

    def __init__(self, socket):
        self._socket, self._number, self.errors = socket, 0, []

    async def call(self, method, **params):
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            found = await self._socket.receive_json(timeout=patient(60))
            if found.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(found["params"])[:500])
            if found.get("method") == "Runtime.consoleAPICalled" and found["params"]["type"] in ("error", "warning"):
                self.errors.append(json.dumps(found["params"])[:500])
            if found.get("id") == self._number:
                return found["result"]

    async def value(self, expression):
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression):
        async with asyncio.timeout(patient(60)):
            while not await self.value(expression):
                await asyncio.sleep(0.05)


@asynccontextmanager
async def chromium(profile, address):
    """A tab that shows the address."""
    offline = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1400,1600",
        *offline, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(patient(60)):
            while b"DevTools listening on" not in (line := await process.stderr.readline()):
                assert line, "chromium ended"
        port = re.search(rb":(\d+)/", line)[1].decode()
        async with aiohttp.ClientSession() as client:
            async with client.get(f"http://127.0.0.1:{port}/json") as answer:
                (page,) = [found for found in await answer.json() if found["type"] == "page"]
            async with client.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Runtime", "Log", "Page"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Page.navigate", url=address)
                await tab.until("document.body && document.body.dataset.ready === 'yes'")
                yield tab
    finally:
        process.terminate()
        await process.wait()


async def looked_at(tab):
    """What a reader does, one thing after the other."""
    assert await tab.value("document.querySelectorAll('#charts canvas').length") == 12
    assert await tab.value("document.querySelectorAll('.advisory').length") == 2
    assert "trainer without work 72%" in await tab.value("document.querySelector('#summary').innerText")
    await tab.value("document.querySelector('[data-view=samples]').click()")
    await tab.until("document.querySelectorAll('#list tbody tr').length === 50")
    assert await tab.value("document.querySelector('#place').textContent") == "1–50 of 320"
    await tab.value(
        "filters.elements.domain.value = 'tools'; filters.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    await tab.until("document.querySelector('#place').textContent === '1–50 of 80'")
    await tab.value("document.querySelector('#list tbody tr').click()")
    await tab.until("document.querySelectorAll('.branches button').length === 2")
    assert await tab.value("document.querySelectorAll('.answer').length") == 3
    assert await tab.value("document.querySelectorAll('.tokens .turn').length") == 3, "two turns and a tool's answer"
    backgrounds = "[...document.querySelectorAll('.tokens [data-token]')].map(span => span.style.background)"
    seen = set()
    for by in ("mask", "version", "ratio", "surprise", "entropy", "advantage"):
        await tab.value(f"$('colour').value = '{by}'; $('colour').dispatchEvent(new Event('change'))")
        seen.add(json.dumps(await tab.value(backgrounds)))
        assert "no such values" not in await tab.value("document.querySelector('.scale').textContent")
    assert len(seen) == 6 and all("color-mix" in one for one in seen)
    await tab.value("document.querySelectorAll('.branches button')[1].click()")
    assert await tab.value("document.querySelector('.branches button.chosen').textContent") == "branch 2"
    assert await tab.value("document.title") != "harmed" and await tab.value("document.images.length") == 0
    assert await tab.value("[...document.querySelectorAll('.ctl')].some(found => found.textContent === 'U+202E')")
    assert not await tab.value("/[\\u001b\\u202e]/.test(document.body.innerText)")
    await tab.value("document.querySelector('[data-view=samples]').click(); $('runs').children[1].click()")
    await tab.until("document.querySelector('#place').textContent === '1–50 of 192'")
    assert await tab.value("[...filters.elements.domain.options].map(found => found.value)") == [
        "",
        "addition",
        "maths",
    ]
    shown = "[...document.querySelectorAll('#list tbody tr')].map(row => row.children[4].textContent)"
    for order in ("worst", "best"):
        await tab.value(f"filters.elements.order.value = '{order}'; state.offset = 150; listSamples()")
        assert (await tab.value(shown))[-24:] == ["–"] * 24
    await tab.value(
        "{ const of = state.metrics[1].columns; of['mine/x'] = of['idle/engines']; delete of['idle/engines']; }"
    )
    await tab.value("document.querySelector('[data-view=overview]').click()")
    assert await tab.value("[...any.options].some(found => found.value === 'mine/x')")
    await tab.value("$('runs').children[0].click()")
    await tab.value("document.querySelector('[data-view=lanes]').click()")
    await tab.until(
        "document.querySelector('canvas.lanes') && document.querySelector('canvas.lanes').hits.length > 100"
    )
    await tab.value("document.querySelector('[data-view=compare]').click()")
    await tab.until("document.querySelectorAll('#differences tr').length > 8")
    assert "2e-6" in await tab.value("document.querySelector('#differences').innerText")
    assert await tab.value("trouble.hidden") and tab.errors == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_shows_charts_samples_colours_lanes_and_differences_without_an_error(runs, tmp_path):
    async def scenario():
        async with served(*runs) as client:
            async with chromium(tmp_path / "profile", str(client._base_url)) as tab:
                await looked_at(tab)

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_the_page_shows_the_steps_that_a_run_makes_while_it_is_open(tmp_path):
    async def scenario():
        run = write_run(tmp_path, steps=3, state="running")
        async with served(run) as client, chromium(tmp_path / "profile", str(client._base_url)) as tab:
            assert "3 / 40" in await tab.value("$('summary').innerText")
            with open(run / "metrics.jsonl", "a") as file:
                file.write(json.dumps(metrics_of(4)) + "\n")
            await tab.until("refresh().then(() => $('summary').innerText.includes('4 / 40'))")
            assert await tab.value("state.charts[0].plot.data[0].length") == 4 and tab.errors == []

    asyncio.run(scenario())


def test_a_page_without_a_server_has_the_newest_group_however_large(tmp_path, capsys):
    run = write_run(tmp_path / "mine/output", steps=2)
    newest = run / "samples/step_00000002.jsonl"
    newest.write_text(newest.read_text().replace('"prompt":"', f'"prompt":"{"x" * (6 << 20)}'))
    other = write_run(tmp_path / "yours/output", steps=1)
    assert main(["view", str(run), str(other), "--html", str(tmp_path / "page")]) == 0
    assert ", 20 of 48 samples, opens in any browser" in capsys.readouterr().out
    names = re.findall('"name":"([^"]+)","path"', (tmp_path / "page").read_text())
    assert names == ["mine/output/run", "yours/output/run"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_the_page_without_a_server_does_the_same(runs, tmp_path):
    async def scenario():
        (tmp_path / "page.html").write_text(self_contained([RunReader(path) for path in runs])[0])
        async with chromium(tmp_path / "profile", f"file://{tmp_path}/page.html") as tab:
            await looked_at(tab)

    asyncio.run(scenario())
