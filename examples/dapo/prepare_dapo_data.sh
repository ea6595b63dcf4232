#!/usr/bin/env bash
# DAPO-Math-17k and AIME 2024 into ${DATA_HOME}, by default ${HOME}/verl/data.
#
#   bash examples/dapo/prepare_dapo_data.sh
#
# TRAIN_URL and TEST_URL may name downloaded files instead of addresses. Files that are there are kept; OVERWRITE=1
# makes them anew.
set -euo pipefail

DATA_HOME=${DATA_HOME:-"${HOME}/verl/data"}
TRAIN_FILE=${TRAIN_FILE:-"${DATA_HOME}/dapo-math-17k.parquet"}
TEST_FILE=${TEST_FILE:-"${DATA_HOME}/aime-2024.parquet"}
OVERWRITE=${OVERWRITE:-0}
PYTHON=${PYTHON:-python3}
HUB=${HF_ENDPOINT:-https://huggingface.co}/datasets/BytedTsinghua-SIA
TRAIN_URL=${TRAIN_URL:-"${HUB}/DAPO-Math-17k/resolve/main/data/dapo-math-17k.parquet?download=true"}
TEST_URL=${TEST_URL:-"${HUB}/AIME-2024/resolve/main/data/aime-2024.parquet?download=true"}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

prepare() { # ADDRESS_OR_FILE TARGET SPLIT
  local source=$1 target=$2 split=$3
  if [[ -f "${target}" && "${OVERWRITE}" != 1 ]]; then
    echo "${target} is there (OVERWRITE=1 makes it anew)"
    return
  fi
  mkdir -p "$(dirname "${target}")"
  if [[ ! -f "${source}" ]]; then
    local raw="${target}.download.parquet"
    curl --fail --location --retry 5 --continue-at - --output "${raw}" "${source}"
    source=${raw}
  fi
  "${PYTHON}" "${HERE}/process_dapo.py" --source "${source}" --output "${target}" --split "${split}" ${KEEP_REPEATS:+--keep_repeats}
  rm -f "${target}.download.parquet"
}

prepare "${TRAIN_URL}" "${TRAIN_FILE}" train
prepare "${TEST_URL}" "${TEST_FILE}" test
