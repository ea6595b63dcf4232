"""trace.json: what ui.perfetto.dev reads, also of a run that is still going on."""

import json
from types import SimpleNamespace

import pytest

from roll_async.observe.trace import Trace
from roll_async.pipelines.metrics import trace_step
from roll_async.rollout.dispatch.server_counts import ServerCounts


def events(path):
    return json.loads(path.read_text())["traceEvents"]


@pytest.fixture
def written(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    trace.span("trainer", "learn", 0.0, 2.0, step=1)
    trace.span("engine-0", "request", 0.5, 1.5)
    trace.span("engine-0", "request", 1.0, 3.0)
    trace.span("engine-0", "request", 1.5, 2.0)
    trace.span("trainer", "weight_sync", 2.0, 2.5, step=1)
    trace.span("weights of engine-0", "weights of step 1", 2.0, 2.5, arrow_from="trainer")
    trace.counters(2.5, {"groups/buffered": 3.0})
    trace.write()
    return tmp_path / "trace.json"


def test_every_event_is_one_of_the_chrome_trace_format(written):
    """As its document says: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    needed = {"X": {"ts", "dur"}, "C": {"ts", "args"}, "s": {"ts", "id"}, "f": {"ts", "id", "bp"}, "M": {"args"}}
    for event in events(written):
        assert needed[event["ph"]] | {"name", "pid", "tid"} <= event.keys(), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event.get("dur", 0) >= 0 and event.get("ts", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, float) for value in event["args"].values())
    begins, ends = ([e["id"] for e in events(written) if e["ph"] == kind] for kind in "sf")
    assert begins == ends and len(begins) == 1


def test_spans_of_a_track_that_overlap_lie_in_slots_and_those_of_a_slot_never_overlap(written):
    names = {e["pid"]: e["args"]["name"] for e in events(written) if e["name"] == "process_name"}
    slots = {}
    for event in events(written):
        if event["ph"] == "X":
            slots.setdefault((names[event["pid"]], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert slots[("engine-0", 1)] == [(500_000, 1_500_000), (1_500_000, 2_000_000)]
    assert slots[("engine-0", 2)] == [(1_000_000, 3_000_000)]
    for spans in slots.values():
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))


def test_an_arrow_leads_from_the_trainers_push_to_the_engine(written):
    pid = {e["args"]["name"]: e["pid"] for e in events(written) if e["name"] == "process_name"}
    begin, end = (next(e for e in events(written) if e["ph"] == kind) for kind in "sf")
    assert (begin["pid"], end["pid"]) == (pid["trainer"], pid["weights of engine-0"])
    assert begin["ts"] == end["ts"] == 2_000_000


def test_the_file_has_what_was_flushed_while_the_run_goes_on_and_a_killed_run_leaves_whole_lines(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    trace.span("trainer", "learn", 0.0, 1.0)
    trace.flush()
    trace.span("trainer", "learn", 1.0, 2.0)
    trace.flush()
    head, *lines = (tmp_path / "trace.json").read_text().splitlines()
    assert head == '{"traceEvents":[' and [json.loads(line[:-1])["ph"] for line in lines] == ["M", "M", "X", "X"]


def test_past_the_limit_spans_are_counted_and_the_file_stays_readable(tmp_path, monkeypatch):
    monkeypatch.setattr("roll_async.observe.trace._MAX_EVENTS", 4)
    trace = Trace(tmp_path / "trace.json")
    for number in range(5):
        trace.span("trainer", "learn", number, number + 1)
    trace.write()
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["otherData"] == {"spans_left_out": 3}


def test_a_step_has_the_requests_of_each_engine_and_an_arrow_for_each_push(build):
    class Seen:
        def __init__(self):
            self.spans = []

        def span(self, track, name, start_s, end_s, **args):
            self.spans.append((track, name, start_s, end_s, args.get("arrow_from")))

    clock = SimpleNamespace(spans=[("learn", 0.0, 0.5), ("weight_sync", 0.5, 1.0), ("weight_sync", 1.0, 2.0)])
    for sync, pushed in ((object(), [("weights of e-0", "weights of step 3", 1.0, 2.0, "trainer")]), (None, [])):
        seen, record = Seen(), SimpleNamespace(step=3, groups=[], clock=clock, sync=sync)
        trace_step(seen, record, [("e-0", 0.25, 0.75)], ["e-0"])
        assert [span for span in seen.spans if span[0] == "weights of e-0"] == pushed
        assert ("e-0", "request", 0.25, 0.75, None) in seen.spans and seen.spans[0][:2] == ("trainer", "learn")


def test_the_newest_requests_of_all_replicas_are_told_and_no_more_than_a_message_can_hold():
    counts = ServerCounts(in_flight=5000)
    for number in range(5000):
        counts.ended(f"e-{number % 2}", float(number), number + 1.0)
    stats = counts.stats(queued=0, now_s=0.0, links=[])
    assert stats.in_flight == 0 and len(stats.spans) == 4096 and stats.spans[-1] == ("e-1", 4999.0, 5000.0)
