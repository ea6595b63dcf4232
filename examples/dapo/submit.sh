# Sourced by run_*.sh with CONFIG set: submits the run to the Ray cluster at RAY_ADDRESS, or runs it here with
# RAY_ADDRESS=local. Arguments are KEY=VALUE overrides of the config.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
RAY_ADDRESS=${RAY_ADDRESS:-"http://${RAY_IP:-localhost}:8265"}
WORKING_DIR=${WORKING_DIR:-"${ROOT}"}
RUNTIME_ENV=${RUNTIME_ENV:-"${ROOT}/examples/dapo/runtime_env.yml"}
PYTHON=${PYTHON:-python3}

overrides=()
if [[ -n "${MODEL_PATH:-}" ]]; then
  overrides+=("pretrain=${MODEL_PATH}")
fi
if [[ -n "${TRAIN_FILE:-}" ]]; then
  overrides+=("actor_train.data_args.file_name=${TRAIN_FILE}")
fi
if [[ -n "${TEST_FILE:-}" ]]; then
  overrides+=("validation.data_args.file_name=${TEST_FILE}")
fi
if [[ -n "${WANDB_API_KEY:-}" ]]; then
  overrides+=("tracking.track_with=wandb")
fi

# Where the job runs, relative names are meant from a copy of WORKING_DIR that Ray removes with the job.
OUTPUT_DIR=${OUTPUT_DIR:-"${HOME}/verl/output"}

if [[ "${RAY_ADDRESS}" == local ]]; then
  unset RAY_ADDRESS
  exec "${PYTHON}" "${ROOT}/examples/start_rlvr_pipeline.py" --config "${CONFIG}" ${overrides[@]+"${overrides[@]}"} "$@"
fi
JOB_ENV=$(mktemp "${TMPDIR:-/tmp}/job_env.XXXXXX.yaml") # holds keys: readable by nobody else, and removed
trap 'rm -f "${JOB_ENV}"' EXIT
"${PYTHON}" "${ROOT}/examples/dapo/job_env.py" "${RUNTIME_ENV}" > "${JOB_ENV}"
ray job submit --no-wait --address "${RAY_ADDRESS}" \
  --runtime-env "${JOB_ENV}" --working-dir "${WORKING_DIR}" -- \
  python3 examples/start_rlvr_pipeline.py --config "${CONFIG}" "output_dir=${OUTPUT_DIR}" \
  ${overrides[@]+"${overrides[@]}"} "$@"
