#!/usr/bin/env bash
# Asynchronous DAPO with interruption, Qwen2.5-7B, 16 GPUs. Start the math verify service first:
#
#   nohup python3 examples/async_dapo/math_verify_service.py > /dev/null 2>&1 &
#   MODEL_PATH=... HOME_DIR=... bash examples/async_dapo/test_7b.sh [KEY=VALUE ...]
#
# Without WANDB_API_KEY metrics go to TensorBoard. CONFIG, PYTHON and the variables below take other values without editing this file; on a
# machine without GPUs: CONFIG=async_dapo_cpu.yaml MATH_VERIFY_URL= n_resp_per_prompt=8 bash ...
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "${HERE}/../.." && pwd)
PYTHON=${PYTHON:-python3}
CONFIG=${CONFIG:-async_dapo_7b.yaml}

# Number of responses generated for each prompt
n_resp_per_prompt=${n_resp_per_prompt:-16}
# Age of the load information, in seconds; a freed slot is refilled at once
batch_creation_interval=${batch_creation_interval:-10}
# Maximum concurrency of each server
max_concurrent_per_server=${max_concurrent_per_server:-512}

export VLLM_USE_V1=${VLLM_USE_V1:-1}
MATH_VERIFY_URL=${MATH_VERIFY_URL-http://127.0.0.1:8300}

overrides=(
  "num_return_sequences_in_group=${n_resp_per_prompt}"
  "async_training.batch_creation_interval=${batch_creation_interval}"
  "async_training.max_concurrent_per_server=${max_concurrent_per_server}"
)
if [[ -n "${MODEL_PATH:-}" ]]; then
  overrides+=("pretrain=${MODEL_PATH}")
fi
if [[ -n "${HOME_DIR:-}" ]]; then
  overrides+=(
    "actor_train.data_args.file_name=${HOME_DIR}/data/skywork_or1_1_5b_diff_sys/train.parquet"
    "validation.data_args.file_name=${HOME_DIR}/data/aime24_sys/test.parquet"
  )
fi
if [[ -n "${WANDB_API_KEY:-}" ]]; then
  overrides+=("tracking.track_with=wandb")
fi
if [[ -n "${MATH_VERIFY_URL}" ]]; then
  overrides+=("rewards.math_rule.service.api_url=${MATH_VERIFY_URL}")
  curl --fail --silent --max-time 10 "${MATH_VERIFY_URL}/health" > /dev/null || {
    echo "no math verify service at ${MATH_VERIFY_URL}; start it with: python3 ${HERE}/math_verify_service.py" >&2
    exit 2
  }
fi

exec "${PYTHON}" "${ROOT}/examples/start_rlvr_pipeline.py" --config "${CONFIG}" "${overrides[@]}" "$@"
