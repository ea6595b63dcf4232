"""What a config without engines becomes: how rows are read, and the settings of the ranks."""

import pytest

from tests.unit.config.supervised import dpo_config, sft_config

pytest.importorskip("torch")

from roll_async.cluster.roles.training_role import TrainingRole
from roll_async.launch.roles import place_roles
from roll_async.prompts.given import GivenOptions
from roll_async.trainer.megatron.schedule import Schedule
from roll_async.trainer.megatron.settings import MegatronSettings

DATA = (
    "actor_train.data_args={file_name: [a.jsonl, b/], template: chatml, template_kwargs: {x: 1}, messages: chat}",
    "template_time=2026-11-26T05:01:12",
)


def test_every_key_of_the_rows_reaches_their_loader():
    config = sft_config(*DATA, "long_rows=cut", "trained_turns=last", "min_score=0.5", "sequence_length=32")
    options = GivenOptions.of(config, "actor_train.data_args", config.actor_train.data_args)
    assert options == GivenOptions(
        key="actor_train.data_args.file_name",
        files=("a.jsonl", "b/"),
        tokenizer_folder="model",
        sequence_length=32,
        messages="chat",
        template="chatml",
        template_time="2026-11-26T05:01:12",
        template_kwargs={"x": 1},
        long_rows="cut",
        last_turn=True,
        min_score=0.5,
    )
    column = "actor_train.data_args={file_name: a.jsonl, prompt: question}"
    of_pairs = dpo_config(column)
    options = GivenOptions.of(of_pairs, "actor_train.data_args", of_pairs.actor_train.data_args)
    assert options.pairs and options.prompt == "question" and not options.last_turn


def test_the_schedule_counts_a_step_as_one_optimizer_step_and_nothing_is_tempered():
    args = "actor_train.training_args={lr_scheduler_type: linear, learning_rate: 0.01, warmup_steps: 3}"
    config = sft_config("max_steps=7", "train_batch_size=12", args, "seed=5")
    settings = MegatronSettings.of(config, config.actor_train)
    assert settings.optimizer is not None
    assert (settings.optimizer.total_steps, settings.optimizer.steps_per_training_step) == (7, 1)
    assert (settings.optimizer.learning_rate, settings.optimizer.warmup_steps) == (0.01, 3)
    assert (settings.temperature, settings.top_k, settings.top_p, settings.loss) == (1.0, 0, 1.0, None)
    assert (settings.seed, settings.longest_row, settings.model_folder) == (5, 64, "model")


@pytest.mark.parametrize(("epochs", "left"), [("1", 20), ("null", 40)])
def test_a_resume_with_another_batch_goes_on_where_the_schedule_was(epochs, left):
    args = "actor_train.training_args={lr_scheduler_type: linear, learning_rate: 1.0}"

    def schedule(batch, steps):
        config = sft_config(args, f"num_train_epochs={epochs}", f"train_batch_size={batch}", f"max_steps={steps}")
        return Schedule(MegatronSettings.of(config, config.actor_train).optimizer)

    before, after = schedule(4, 100), schedule(8, 50 if epochs == "1" else 100)
    for _ in range(60):
        before.rates(1)
    after.restore(before.state(), training_step=60)
    rates = [after.rates(1)[0] for _ in range(left)]
    assert rates == pytest.approx([0.4 * (1 - step / left) for step in range(left)])


def test_its_only_processes_are_the_ranks():
    config = sft_config("actor_train.world_size=2", "fault.rpc_timeout=9")
    assert {name: len(processes) for name, processes in place_roles(config).items()} == {"actor_train": 2}
    assert TrainingRole.of(config, "actor_train", config.actor_train).rpc_timeout_s == 9
