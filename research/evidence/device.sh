#!/usr/bin/env bash
# Measures the pairs of the plan on a GPU machine without network, in calls of at most ten minutes.
#
#   bash research/evidence/device.sh DATA OUT [MINUTES] [OPTIONS of `python -m research.evidence measure`]
#
# DATA is the folder of `python -m research.evidence prepare`. Results of earlier calls (results*.json.gz in
# DATA) are not measured again. OUT receives results.json.gz and log.txt; networks that are finished when the
# time is over are in it.
set -u
nvidia-smi --query-gpu=name,memory.free --format=csv,noheader
data=$1 out=$2 minutes=${3:-9}
shift $(($# < 3 ? $# : 3))
work=$(mktemp -d)
export PYTHONPATH=$PWD/src:$PWD:$PWD/$data/packages PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export HEATPROOF_ACCELERATE=0  # networks are too short-lived to search for their fastest passes
probe='import torch; torch.ones(64, 64, device="cuda").matmul(torch.ones(64, 64, device="cuda")).sum().item()'
if command -v nvidia-cuda-mps-control >/dev/null && nvidia-cuda-mps-control -d &&
    timeout 30 python3 -c "$probe"; then
    echo "processes share the GPU by MPS"
else
    echo quit | nvidia-cuda-mps-control >/dev/null 2>&1
    echo "processes take turns on the GPU"
fi
earlier=()
for file in "$data"/results*.json.gz; do
    [ -e "$file" ] && earlier+=(--earlier "$file")
done
seconds=$(awk "BEGIN { print int(60 * $minutes) }")
timeout "$seconds" python3 -m research.evidence measure --data "$data" --out "$work" --device cuda \
    --joined "$out/results.json.gz" --processes 14 --minutes "$(awk "BEGIN { print $minutes - 0.7 }")" \
    "${earlier[@]}" "$@" 2>&1 | tee "$out/log.txt"
python3 -m research.evidence join "$work" --joined "$out/results.json.gz" 2>&1 | tee -a "$out/log.txt"
cat "$work"/errors/*.txt >"$out/errors.txt" 2>/dev/null
exit 0
