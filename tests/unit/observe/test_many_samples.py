"""A hundred thousand answers: one pass over their files, then pages of fifty in no time."""

import json
import time

from roll_async.observe.reading.run_reader import RunReader
from roll_async.observe.reading.sample_index import SampleFilter
from tests.patience import patient
from tests.unit.observe.written_run import write_run

STEPS, ROWS = 200, 500


def test_a_hundred_thousand_samples_are_indexed_once_and_answered_at_once(tmp_path):
    run = write_run(tmp_path, steps=1)
    row = json.loads((run / "samples/step_00000001.jsonl").read_text().splitlines()[0])
    for step in range(1, STEPS + 1):
        rows = [
            row
            | {"step": step, "group_id": n // 8, "sample_id": f"{step}.{n}", "domain": "abc"[n % 3], "score": n / ROWS}
            for n in range(ROWS)
        ]
        text = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in rows)
        (run / f"samples/step_{step:08d}.jsonl").write_text(text)
    index, took = RunReader(run).samples, {}

    def timed(name, work):
        began = time.perf_counter()
        found = work()
        took[name] = time.perf_counter() - began
        return found

    assert timed("index", index.refresh) == STEPS
    assert timed("index again", index.refresh) == 0
    for name, asked in {
        "newest": SampleFilter(),
        "worst of a domain": SampleFilter(domain="b", order="worst"),
        "between": SampleFilter(lowest=0.25, highest=0.5, first_step=50, last_step=150, order="longest"),
    }.items():
        count, rows = timed(name, lambda asked=asked: index.page(asked, offset=1000))
        assert count > 10_000 and len(rows) == 50
    assert len(timed("group", lambda: index.group_of(rows[0]["id"]))) == 8
    assert timed("choices", index.choices)["count"] == [STEPS * ROWS]
    print({name: f"{seconds:.3f} s" for name, seconds in took.items()})
    assert took.pop("index") < patient(60) and max(took.values()) < patient(1)
