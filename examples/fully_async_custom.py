"""A fully asynchronous run with code of one's own: metrics, generation, monitoring.

    python examples/fully_async_custom.py [--config-path DIR --config-name NAME] [KEY=VALUE ...]

The three hooks of the mode in their smallest form. Copy the file and fill them. Without a config it runs the demo, from
every folder; `batch.to_dataproto()` has the batch in the form of verl.
"""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.commands.fully_async import FullyAsyncMain, FullyAsyncTrainer, Rollouter

logger = logging.getLogger(__name__)


class CustomFullyAsyncTrainer(FullyAsyncTrainer):
    """Publishes how much of a batch is solved by nobody, and by everybody."""

    def compute_custom_metrics(self, batch):
        solved = [sum(s.reward.score > 0 for s in group.samples) / len(group.samples) for group in batch]
        return {
            "custom/unsolved_groups": sum(share == 0 for share in solved) / len(solved),
            "custom/solved_groups": sum(share == 1 for share in solved) / len(solved),
        }


class CustomRollouter(Rollouter):
    """Counts prompts by length before they are generated; an outcome returned here would replace the generation."""

    prompt_tokens = 0

    def custom_generation_logic(self, batch):
        self.prompt_tokens += len(batch.prompt.token_ids)


def calculate_custom_metric(trainer_stats):
    """Samples per weight push."""
    return trainer_stats.processed_samples / max(1, trainer_stats.param_sync_count)


def custom_monitor(trainer_stats, rollouter_stats):
    """Called every few seconds and at the end."""
    custom_metric = calculate_custom_metric(trainer_stats)
    logger.info(f"Custom metric: {custom_metric} after {rollouter_stats.total_generated_samples} samples")


if __name__ == "__main__":
    main = FullyAsyncMain(trainer=CustomFullyAsyncTrainer, rollouter=CustomRollouter, custom_monitor=custom_monitor)
    sys.exit(main.run(sys.argv[1:]))
