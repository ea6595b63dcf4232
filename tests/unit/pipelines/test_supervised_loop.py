"""The loop of runs without engines: what is published, saved and measured, and how it ends."""

import asyncio

import pytest

from roll_async.pipelines.protocol import RunEnd
from roll_async.pipelines.supervised import SupervisedPipeline, SupervisedPlan
from roll_async.trainer.protocol import StepReport


class World:
    """Learner, checkpoint, observer and model; writes down what is asked of them."""

    def __init__(self, num_steps=100, fails_at=None):
        self.calls, self.metrics, self._num_steps, self._fails_at = [], {}, num_steps, fails_at
        self.pipeline = None

    async def learn(self, step):
        if step == self._fails_at:
            raise ConnectionError("rank 0 is gone")
        if step > self._num_steps:
            return None
        await asyncio.sleep(0.01)
        self.calls.append(f"learn {step}")
        return StepReport(
            metrics={"trainer/loss": 1 / step}, logprobs_s=0, train_s=1, collation_s=0, num_samples=4, num_tokens=20
        )

    async def validate(self):
        self.calls.append("validate")
        return {"validation/loss": 0.5}

    async def save(self, step):
        self.calls.append(f"save {step}")

    async def finish(self):
        self.calls.append("finish")

    def step(self, step, metrics):
        self.calls.append(f"publish {step}")
        self.metrics[step] = metrics

    def span(self, *args, **fields):
        pass

    def event(self, name, **fields):
        pass

    async def export_hf(self, folder):
        self.calls.append(folder)


def run(world, **plan):
    async def work():
        defaults = {"first_step": 1, "max_steps": 4, "save_every": 0, "eval_every": 0}
        world.pipeline = SupervisedPipeline(
            world, world, world, world.export_hf, SupervisedPlan(**{**defaults, **plan})
        )
        return await world.pipeline.run()

    return asyncio.run(work())


def test_a_step_is_published_before_it_is_saved_and_the_last_is_saved_at_the_end():
    world = World()
    assert run(world, save_every=2) is RunEnd.FINISHED
    assert world.calls == [
        "learn 1", "publish 1", "learn 2", "publish 2", "save 2", "learn 3", "publish 3", "learn 4", "publish 4",
        "save 4", "finish",
    ]  # fmt: skip
    assert world.metrics[1]["throughput/tokens_per_s"] > 0


def test_held_out_rows_are_measured_at_their_steps_and_at_the_last():
    world = World()
    run(world, eval_every=3)
    assert [step for step, m in world.metrics.items() if "validation/loss" in m] == [3, 4]
    assert world.metrics[3]["validation/version"] == 3


def test_a_resumed_run_begins_after_its_step():
    world = World()
    run(world, first_step=3)
    assert list(world.metrics) == [3, 4]


def test_the_end_of_the_data_ends_and_saves():
    world = World(num_steps=2)
    assert run(world) is RunEnd.END_OF_DATA
    assert world.calls[-2:] == ["save 2", "finish"]


def test_a_stop_ends_after_the_step_under_way_saved():
    world = World()

    def step(number, metrics, publish=world.step):
        publish(number, metrics)
        if number == 2:
            world.pipeline.request_stop()

    world.step = step
    assert run(world) is RunEnd.INTERRUPTED
    assert world.calls[-3:] == ["publish 2", "save 2", "finish"] and world.pipeline.trained_step == 2
    assert "step 2 of 4 is trained" in world.pipeline.states()[0]


def test_after_an_error_the_run_says_what_is_saved():
    world = World(fails_at=4)
    with pytest.raises(ConnectionError):
        run(world, save_every=2)
    assert world.pipeline.rescued == "step 2 is saved"
