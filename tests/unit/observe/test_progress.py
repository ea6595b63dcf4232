"""The live line."""

from roll_async.observe.progress import ProgressLine


def line(step, time_s):
    return {
        "step": step, "time_s": time_s, "idle/trainer": 0.25, "reward/mean": 0.5, "throughput/samples_per_s": 100.0,
        "staleness/mean": 0.5, "staleness/max": 1.0, "groups/buffered": 3.0, "groups/in_flight": 4.0,
    }  # fmt: skip


def test_a_resumed_run_expects_its_end_from_its_own_steps(capsys):
    progress = ProgressLine(100)
    progress.show(line(51, 10.0))
    progress.show(line(52, 20.0))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 51/100") and first.endswith("eta 8:10")
    assert second.endswith("eta 8:00")
