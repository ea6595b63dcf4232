"""A run's folder as the parts of a run write it, with answers that mean harm."""

import math
import random
from array import array

from roll_async.observe.run_folder import RunFolder
from roll_async.observe.run_record import RunRecord
from roll_async.observe.sample_dump import SAMPLES, SampleDump
from roll_async.observe.trace import Trace
from roll_async.pipelines.metrics import sample_rows
from roll_async.schema import FinishReason, Group, Outcome, Prompt, Reward, Sample, Turn

HOSTILE = "</script><img src=x onerror=\"document.title='harmed'\">\x1b[31mred\u202eback\n"
WORDS = [*"0123456789", "+", "=", " because ", HOSTILE]


def decode(rows):
    return ["".join(WORDS[token] for token in ids) for ids in rows]


def a_sample(rng, name, step, *, turns=False, trajectory=""):
    """Ten to forty tokens, the last of them under a newer version; a tool's answer between two turns."""
    size = rng.randint(10, 40)
    mask = bytes(0 if turns and 4 <= i < 8 else 1 for i in range(size))
    score = float(rng.random() < step / 20)
    parts = (Turn(index=0, start=0, num_tokens=4), Turn(index=1, start=8, num_tokens=size - 8, reward=score))
    return Sample(
        sample_id=name, prompt_token_ids=array("i", [1, 10, 2, 11]), loss_mask=mask, trajectory=trajectory,
        response_token_ids=array("i", [rng.randrange(len(WORDS)) for _ in range(size)]),
        behaviour_logprobs=array("f", [-rng.random() * 3 * sampled for sampled in mask]),
        version_runs=((max(0, step - 2), size - 5), (step - 1, 5)), finish_reason=FinishReason.STOP, generation_s=1.0,
        reward=Reward(score=score, metrics={"acc": score}), num_turns=2 if turns else 1, turns=parts if turns else (),
        outcome=(Outcome.SOLVED if score else Outcome.FAILED) if turns else None, replica="actor_infer-0",
    )  # fmt: skip


def groups_of(rng, step):
    """Three groups of plain answers, and one of an agent whose first trajectory has two branches."""
    for number in range(4):
        agent = number == 3
        prompt = Prompt(
            row_id=f"r{number}",
            token_ids=array("i", [1, 10, 2, 11]),
            domain="tools" if agent else "addition",
            ground_truth="3",
        )
        names = ["a", "a", "b", "c"] if agent else ["", "", "", ""]
        samples = tuple(
            a_sample(rng, f"{step}.{number}/{i}", step, turns=agent, trajectory=name and f"{step}.{number}/{name}")
            for i, name in enumerate(names)
        )
        yield Group(
            group_id=4 * step + number, prompt=prompt, samples=samples, admitted_version=step - 1,
            admitted_s=float(step), finished_s=step + 1.0,
        )  # fmt: skip


def metrics_of(step):
    waits = {
        f"idle/trainer_{name}": 0.02
        for name in ("rewards", "collation", "roles", "weights", "validation", "checkpoint", "records")
    }
    found = {
        "step": step, "time_s": 3.0 * step, "reward/mean": 1 - math.exp(-step / 8), **waits, "idle/trainer": 0.6,
        "idle/trainer_rollouts": 0.58, "idle/engines": 0.1, "busy/actor_infer-0": 0.9, "busy/actor_infer-1": 0.85,
        "time/step_s": 3.0, "time/wait_batch_s": 1.8, "time/logprobs_s": 0.2, "time/train_s": 0.8, "time/pause_s": 0.05,
        "time/weight_sync_s": 0.2, "staleness/mean": 0.4 + step % 3 / 10, "staleness/max": 2.0,
        "groups/buffered": 3 + step % 4, "groups/in_flight": 12, "groups/trained": 4 * step, "groups/filtered": 0,
        "throughput/tokens_per_s": 900 + 40 * math.sin(step), "response/length_mean": 22.0 + step / 4,
        "response/length_max": 40, "correction/kl": 1e-3, "correction/ess": 0.95, "trainer/grad_norm": 1 / step,
    }  # fmt: skip
    return found | ({"validation/accuracy": found["reward/mean"] - 0.05} if step % 5 == 0 else {})


def write_run(output, name="run", steps=20, *, learning_rate="1e-6", state="finished"):
    """A run of some steps; its folder."""
    rng = random.Random(name)
    record = RunRecord(run_id="3f9a61c2", command=("roll-async", "run", "--config", "mine"), state=state)
    folder = RunFolder(str(output), name, record)
    folder.update_record()
    folder.write_config(
        f"exp_name: {name}\nmax_steps: 40\nactor_train: {{training_args: {{learning_rate: {learning_rate}}}}}\n"
        "async_training: {staleness: {max_versions: 2}}\ntracking: {rollout_dump_dir: null}\n"
    )
    (folder.path / "run.log").write_text(
        "2026-08-01 10:00:00,000 INFO roll_async: started\n"
        "2026-08-01 10:00:01,250 ERROR roll_async: engine \x1b[31mdied\n"
        "2026-08-01 10:00:02,000 INFO roll_async: step 1\n  answer: it says ERROR in red\n"
    )
    dump, trace = SampleDump({folder.path / SAMPLES: 4}, decode), Trace(folder.path / "trace.json")
    for step in range(1, steps + 1):
        folder.append_metrics(metrics_of(step))
        groups = list(groups_of(rng, step))
        rows = [sample for group in groups for sample in group.samples]
        advantages = [array("f", [row.reward.score - 0.5] * len(row.loss_mask)) for row in rows]
        logprobs = [array("f", [p + rng.gauss(0, 0.1) for p in row.behaviour_logprobs]) for row in rows]
        entropies = [array("f", [rng.random() if mask else math.nan for mask in row.loss_mask]) for row in rows]
        dump.write(step, lambda n, *, of=(groups, advantages, logprobs, entropies): sample_rows(*of, n))
        for engine in ("actor_infer-0", "actor_infer-1"):
            for slot in range(4):
                begin = 3.0 * step + rng.random()
                trace.span(engine, "request", begin, begin + 1.5 + slot / 4)
        trace.span("trainer", "learn", 3.0 * step + 1.8, 3.0 * step + 2.8)
        trace.span("trainer", "weight_sync", 3.0 * step + 2.8, 3.0 * step + 3)
        for engine in ("actor_infer-0", "actor_infer-1"):
            name = f"weights of step {step}"
            trace.span(f"weights of {engine}", name, 3.0 * step + 2.8, 3.0 * step + 3, arrow_from="trainer")
        trace.flush()
    dump.close()
    if state == "finished":
        trace.write()
    return folder.path
