#!/usr/bin/env bash
# What one card says of the trainer within 300 s, the surest figures first: bash tools/gpu_trip.sh [cuda|cpu] [FOLDER]
# Lines go to FOLDER/*.jsonl as they come; the table of all that came by then is printed last, also after the limit.
# cpu walks every line at tiny sizes; its figures mean nothing.
set -u
device=${1:-cuda}
folder=${2:-output/gpu_trip}
python=${PYTHON:-python3}
ends=$((SECONDS + ${TRIP_LIMIT_S:-300}))
shapes=(0.5B 1.5B)
lengths=(2048 8192)
head=(--tokens 65536 --seconds 0.15)
if [ "$device" = cpu ]; then
    shapes=(tiny)
    lengths=(64)
    head=(--tokens 64 --vocabulary 512 --hidden 32 --seconds 60)
fi
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$folder" && rm -f "$folder"/*.jsonl

# NAME COMMAND...: not begun without time, ended at the limit.
line() {
    local left=$((ends - SECONDS)) name=$1
    shift
    [ "$left" -le 5 ] && echo "$name: no time left" >&2 && return
    timeout "$left" "$@" > "$folder/$name.jsonl" 2> "$folder/$name.log" || tail -n 3 "$folder/$name.log" >&2
}

suite() {
    line "$1" "$python" tools/gpu_suite.py --device "$device" --steps 2 "${@:2}"
}

suite 1_attention --only attention
line 2_head "$python" tools/bench/logprobs_memory.py --device "$device" --repeats 3 "${head[@]}"
number=3
for longest in "${lengths[@]}"; do
    for shape in "${shapes[@]}"; do
        suite "${number}_trainer_${shape}_$longest" --only trainer --launches --shape "$shape" --longest "$longest"
        number=$((number + 1))
    done
done
"$python" tools/gpu_suite.py --table "$folder"/*.jsonl | tee "$folder/table.md"
