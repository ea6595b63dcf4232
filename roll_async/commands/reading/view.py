"""`roll-async view`: runs as a page in the browser, while they go on, or as one file."""

from __future__ import annotations

import asyncio
import signal
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import click

from roll_async.commands.command_line import EXIT_FINISHED, HELP, bad_usage
from roll_async.observe.reading.run_reader import RunReader


@click.command(context_settings=HELP)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1; 0 = one that is free.")
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path), help="Write the page as one file instead.")
@click.option("--no-browser", is_flag=True, help="Print the address only.")
def command(runs: Sequence[Path], port: int, html: Path | None, no_browser: bool) -> int:
    """Show the folders of runs as a web page: rewards, who waits for whom, staleness, lanes, every kept answer.

    It is served on this machine only, and shows what comes while a run goes on. With two runs their metrics lie in one
    chart, and their configs are compared. --html writes a page with its data inside, for others to open.

    \b
    Example:
      roll-async view output/addition_demo
      roll-async view output/a output/b --html comparison.html

    Exit codes: 0 ended by Ctrl-C or written, 2 no run, or a port that is in use.
    """
    from roll_async.observe.reading.page_server import self_contained

    try:
        readers = [RunReader(path) for path in runs]
        if html is not None:
            page, inside = self_contained(readers)
            html.write_text(page, encoding="utf-8")
            print(f"{html}: {html.stat().st_size / 1e6:.1f} MB, {inside}, opens in any browser without a server")
        else:
            asyncio.run(_serve(readers, port, browse=not no_browser))
    except (ValueError, OSError) as error:
        return bad_usage("view", error)
    return EXIT_FINISHED


async def _serve(readers: Sequence[RunReader], port: int, *, browse: bool) -> None:
    from roll_async.observe.reading.page_server import PageServer

    runner, bound = await PageServer(readers).start(port)
    stopped = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs would not get the first
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    address = f"http://127.0.0.1:{bound}/"
    print(f"{address}  (Ctrl-C ends it)", flush=True)
    if browse and sys.stdout.isatty():
        webbrowser.open(address)
    try:
        await stopped.wait()
    finally:
        await runner.cleanup()
