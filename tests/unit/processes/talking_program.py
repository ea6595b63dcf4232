"""Answers each line with its text, and one of them with more than any line may have."""

import time

from roll_async.processes.child import connect, say, serve_forks


def serve(channel):
    say(channel, {"ready": True})
    for line in channel.makefile("rb"):
        if line == b"endless\n":
            channel.sendall(b"x" * 5000)
            time.sleep(600)
        say(channel, line.decode().strip())


if __name__ == "__main__":
    settings, channel = connect()
    if "error" in settings:
        say(channel, {"error": settings["error"]})
    elif settings["fork"]:
        serve_forks(channel, serve)
    else:
        serve(channel)
