"""The config of a certificate's run, and its reward."""

REWARD = '''"""A reward that a random model earns now and then."""


def score(text, ground_truth, extra):
    """1 for texts of an odd length."""
    return float(len(text) % 2)
'''

RUN = """\
# Two steps of a small random model: what the engine computes after each push is compared with the trainer.
defaults: [rlvr_config_sync_cpu]
exp_name: run
output_dir: {work}
pretrain: {work}/engine
max_steps: 2
save_steps: 0
eval_steps: 0
validation: null
rollout_batch_size: 8
num_return_sequences_in_group: 4
response_length: 24
rewards:
  addition: {{type: certificate_reward.score}}
actor_train:
  data_args: {{file_name: {work}/train.jsonl}}
  training_args: {{per_device_train_batch_size: 32, gradient_accumulation_steps: 1, learning_rate: 3.0e-3}}
  router_replay: {replays}
weight_sync:
  on_mismatch: stop
"""
