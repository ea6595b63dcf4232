#!/usr/bin/env bash
# Early DAPO (neither token-level loss nor dynamic sampling), Qwen2.5-32B, 16 nodes of 8 GPUs.
#
#   bash examples/dapo/prepare_dapo_data.sh
#   RAY_ADDRESS=http://HOST:8265 bash examples/dapo/run_dapo_early_qwen2.5_32b.sh [KEY=VALUE ...]
#
# RAY_ADDRESS=local runs it here; without GPUs: CONFIG=dapo_early_cpu.yaml TRAIN_FILE= TEST_FILE= ...
CONFIG=${CONFIG:-dapo_early_qwen2.5_32b.yaml}
TRAIN_FILE=${TRAIN_FILE-"${HOME}/verl/data/dapo-math-17k.parquet"}
TEST_FILE=${TEST_FILE-"${HOME}/verl/data/aime-2024.parquet"}
# shellcheck source=examples/dapo/submit.sh
source "$(dirname "${BASH_SOURCE[0]}")/submit.sh"
