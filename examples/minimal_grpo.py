"""Asynchronous GRPO in one file: the algorithm of roll_async on a CPU, with its own functions and nothing around them.

    python examples/minimal_grpo.py [STEPS]

A tiny recurrent model learns to echo three digits backwards. Generation runs one step ahead of training, as with
`async_generation_ratio: 1`: the batch of step t was sampled by the weights of version t - 2, so its staleness is 1.
What a real run adds is in brackets.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.algorithms.advantages import AdvantageInputs, grpo
from roll_async.algorithms.correction import correct
from roll_async.algorithms.logprobs import token_logprobs
from roll_async.algorithms.objective import LossSettings, count_parts, policy_loss
from roll_async.config.options.correction_options import CorrectionOptions
from roll_async.config.options.policy_loss_options import PpoOptions

# B rows = PROMPTS * SAMPLES, T positions of the response, V vocabulary (digits).
PROMPTS, SAMPLES, LENGTH, VOCABULARY = 32, 8, 3, 10
AHEAD = 1  # async_generation_ratio: batches generated before their weights are trained


class Model(nn.Module):
    """Reads the prompt, then predicts a digit per position from the digit before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 1, 64)  # the last row begins the answer
        self.read = nn.GRU(64, 128, batch_first=True)
        self.write = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, prompts_BT: Tensor, responses_BT: Tensor) -> Tensor:
        """[B,T,V] logits of each response token given the prompt and the tokens before it."""
        _, state = self.read(self.embed(prompts_BT))
        begin = torch.full_like(prompts_BT[:, :1], VOCABULARY)
        before = torch.cat([begin, responses_BT[:, :-1]], dim=1)
        hidden, _ = self.write(self.embed(before), state)
        return self.head(hidden)


@torch.no_grad()
def generate(engine: Model, version: int) -> dict[str, Tensor]:
    """One batch: SAMPLES responses to each of PROMPTS prompts, with the log-prob each token was sampled with.

    [A real run: vLLM or SGLang replicas, a scheduler, a queue that bounds staleness, a ledger on disk.]
    """
    prompts = torch.randint(VOCABULARY, (PROMPTS, LENGTH)).repeat_interleave(SAMPLES, dim=0)
    responses = torch.zeros(PROMPTS * SAMPLES, LENGTH, dtype=torch.long)
    for t in range(LENGTH):
        probabilities = engine(prompts, responses)[:, t].softmax(-1)
        responses[:, t] = torch.multinomial(probabilities, 1).squeeze(-1)
    sampled = token_logprobs(logits_BTV=engine(prompts, responses), tokens_BT=responses)
    groups, versions = torch.arange(PROMPTS).repeat_interleave(SAMPLES), torch.full_like(responses, version)
    fields = {"prompts": prompts, "responses": responses, "logprobs": sampled.logprobs}
    return {**fields, "groups": groups, "versions": versions}


def score(batch: dict[str, Tensor]) -> Tensor:
    """[B] share of right digits. [A real run: verifiers, judges and sandboxes in worker processes.]"""
    return (batch["responses"] == batch["prompts"].flip(-1)).float().mean(-1)


def train_step(trainer: Model, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], step: int) -> Tensor:
    """Scores, advantages, one optimizer step; [B] scores. [A real run: Megatron ranks, micro-batches, a reference.]"""
    scores, mask = score(batch), torch.ones_like(batch["responses"], dtype=torch.bool)
    advantages, _ = grpo(AdvantageInputs(scores=scores, mask=mask, group_index=batch["groups"]))
    logits = trainer(batch["prompts"], batch["responses"])
    current = token_logprobs(logits_BTV=logits, tokens_BT=batch["responses"])
    proximal = current.logprobs.detach()  # the policy at the start of the step: the ratio of PPO is around it
    correction = correct(  # what the weights have moved since the batch was sampled, as truncated importance weights
        train_logprobs_BT=proximal, rollout_logprobs_BT=batch["logprobs"], mask_BT=mask, options=CorrectionOptions()
    )
    fields = {
        "advantages": advantages,
        "behaviour_logprobs": batch["logprobs"],
        "proximal_logprobs": proximal,
        "correction_weights": correction.weights,
        "scores": scores,
        "version_lag": step - 1 - batch["versions"],
    }
    settings = LossSettings(pg_variant="ppo", pg_options=PpoOptions(clip_high=0.28))
    denominators = count_parts(fields, mask, range(len(mask)), LENGTH)
    loss, _ = policy_loss(fields, mask, current, settings, denominators)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return scores


def main(steps: int = 200) -> float:
    """Train; the mean score of the last batch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    trainer, engine = Model(), Model()
    engine.load_state_dict(trainer.state_dict())
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-3)
    queue = [generate(engine, version=0) for _ in range(AHEAD)]
    reward = 0.0
    for step in range(1, steps + 1):
        queue.append(generate(engine, version=step - 1))  # beside the step in a real run, not before it
        batch = queue.pop(0)
        reward = float(train_step(trainer, optimizer, batch, step).mean())
        engine.load_state_dict(trainer.state_dict())  # the weight push: version `step` is served from here on
        if step % 20 == 0 or step == 1:
            staleness = step - 1 - int(batch["versions"].min())
            print(f"step {step}/{steps}  reward {reward:.3f}  staleness {staleness}", flush=True)
    return reward


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
