#!/usr/bin/env bash
# The tables of docs/results, part by part. A part that was stopped goes on where it was; each takes under two hours on
# 2 cores; the bench parts, speed and memory by length, start again.
#
#   scripts/reproduce.sh list                 the parts
#   scripts/reproduce.sh PART...              run some, e.g. needle-qwen-2k; add SHARD=0/4 to split one over machines
#   scripts/reproduce.sh all                  run all, then write the report
#   scripts/reproduce.sh --quick              15 minutes: short prompts, few samples and methods, into results-quick/
#   scripts/reproduce.sh pack                 compress the samples, as they are in the repository; a part goes on from them
#   scripts/reproduce.sh report               the HTML report of what is there, and its tables, figures and CSV files
#
# OUT is the folder of the results (docs/results), THREADS the cores to use, QWEN and SMOL the models: names or GGUF files.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT="${OUT:-docs/results}"
SHARD="${SHARD:-0/1}"
THREADS="${THREADS:-$(nproc)}"

SMOL="${SMOL:-smollm2-135m}"
QWEN="${QWEN:-qwen2.5-coder-0.5b}"

ALL="laprox,laprox:preset=paper,laprox:preset=paper:alloc=layer,criticalkv,criticalkv:pool=reach12:0.3,snapkv,adakv"
ALL="$ALL,pyramidkv,h2o,tova,keydiff,streaming,random,duo,quest"
FORMS="laprox,laprox:preset=l2,laprox:normalize=none,laprox:pool=sentence:0.25,laprox:score=output_norm"
FORMS="$FORMS,laprox:preset=paper,laprox:preset=paper:normalize=zscore,laprox:preset=paper:granularity=cell"
SOME="laprox,laprox:preset=paper,laprox:preset=paper:alloc=layer,criticalkv,snapkv,adakv,h2o,keydiff,streaming,duo,quest"
FEW="laprox,laprox:preset=paper,snapkv,adakv,h2o,streaming"
RIVAL="laprox,snapkv"
BUDGETS="0.025,0.05,0.1,0.2,0.5"

SINGLE="kind=single+multikey"
HARD="kind=reversed+multivalue+multiquery+paraphrase" # more than SmolLM2 can do with its full cache: 3 of 58
FAR="kind=reversed+paraphrase"
SMALL="digits=4:open_answer=yes" # a small model remembers fewer digits, and needs its answer begun for it

# name, model, samples, methods, budgets, KV types, task; of a bench: rounds for samples, lengths for a task
parts() {
    cat <<EOF
needle-smol-2k          $SMOL 40 $ALL   $BUDGETS f16 needle:$SINGLE:$SMALL:max_tokens=12
needle-smol-4k          $SMOL 40 $ALL   $BUDGETS f16 needle:$SINGLE:$SMALL:max_tokens=12:tokens=4096
needle-qwen-2k          $QWEN 40 $ALL   $BUDGETS f16 needle:$SINGLE:max_tokens=16
needle-qwen-4k          $QWEN 40 $ALL   $BUDGETS f16 needle:$SINGLE:max_tokens=16:tokens=4096
needle-qwen-8k          $QWEN 20 $ALL   $BUDGETS f16 needle:$SINGLE:max_tokens=16:tokens=8192
needle-qwen-16k         $QWEN 8  $ALL   $BUDGETS f16 needle:$SINGLE:max_tokens=16:tokens=16384
hard-qwen-2k            $QWEN 80 $ALL   $BUDGETS f16 needle:$HARD:max_tokens=40
hard-qwen-4k            $QWEN 40 $ALL   $BUDGETS f16 needle:$FAR:max_tokens=16:tokens=4096
hard-qwen-8k            $QWEN 20 $SOME  $BUDGETS f16 needle:$FAR:max_tokens=16:tokens=8192
text-smol-2k            $SMOL 20 $ALL   $BUDGETS f16 continuation:n=128
text-smol-4k            $SMOL 20 $ALL   $BUDGETS f16 continuation:n=128:tokens=4096
text-qwen-2k            $QWEN 20 $ALL   $BUDGETS f16 continuation:n=128
text-qwen-4k            $QWEN 20 $ALL   $BUDGETS f16 continuation:n=128:tokens=4096
code-smol-2k            $SMOL 20 $ALL   $BUDGETS f16 continuation:haystack=code:n=128
code-qwen-2k            $QWEN 20 $ALL   $BUDGETS f16 continuation:haystack=code:n=128
code-qwen-4k            $QWEN 20 $SOME  $BUDGETS f16 continuation:haystack=code:n=128:tokens=4096
questions-smol-2k       $SMOL 20 $SOME  $BUDGETS f16 multi_question:max_tokens=24:orders=2
questions-qwen-2k       $QWEN 20 $SOME  $BUDGETS f16 multi_question:max_tokens=12:orders=2
questions-blind-smol-2k $SMOL 20 $SOME  $BUDGETS f16 multi_question:max_tokens=24:orders=2:aware=no
questions-blind-qwen-2k $QWEN 20 $SOME  $BUDGETS f16 multi_question:max_tokens=12:orders=2:aware=no
questions-qwen-4k       $QWEN 20 $SOME  $BUDGETS f16 multi_question:max_tokens=12:orders=2:tokens=4096
forms-text-smol-2k      $SMOL 20 $FORMS $BUDGETS f16 continuation:n=128:seed=1
forms-qwen-2k           $QWEN 40 $FORMS $BUDGETS f16 needle:$HARD:max_tokens=40:seed=1
similarity-qwen-2k      $QWEN 20 $SOME  $BUDGETS f16 similarity
rival-smol-2k           $SMOL 40 $RIVAL $BUDGETS f16,q8_0,q4_0 needle:$SINGLE:$SMALL:max_tokens=12:seed=2
rival-qwen-2k           $QWEN 40 $RIVAL $BUDGETS f16,q8_0,q4_0 needle:$SINGLE:max_tokens=16:seed=2
rival-text-smol-2k      $SMOL 20 $RIVAL $BUDGETS f16,q8_0,q4_0 continuation:n=128:seed=2
rival-text-qwen-2k      $QWEN 20 $RIVAL $BUDGETS f16,q8_0,q4_0 continuation:n=128:seed=2
bench-smol              $SMOL 5  $RIVAL,streaming 0.05,0.2 f16 bench:2048,4096,8000
bench-qwen              $QWEN 5  $RIVAL,streaming 0.05,0.2 f16 bench:2048,4096
EOF
}

quick_parts() {
    local short=tokens=768
    cat <<EOF
quick-needle     $SMOL 12 $FEW   0.05,0.1,0.3 f16 needle:$SINGLE:$SMALL:max_tokens=12:$short
quick-hard       $QWEN 8  $FEW   0.05,0.1,0.3 f16 needle:$HARD:max_tokens=40:$short
quick-text       $SMOL 6  $FEW   0.05,0.1,0.3 f16 continuation:n=64:$short
quick-code       $SMOL 6  $FEW   0.05,0.1,0.3 f16 continuation:haystack=code:n=64:$short
quick-questions  $SMOL 3  $FEW   0.1,0.3      f16 multi_question:questions=3:orders=2:$short
quick-similarity $SMOL 3  $FEW   0.1,0.3      f16 similarity:n=8:$short
quick-rival      $SMOL 8  laprox 0.1,0.3      f16,q8_0,q4_0 needle:$SINGLE:$SMALL:max_tokens=12:$short:seed=2
quick-qwen       $QWEN 8  $FEW   0.05,0.1     f16 needle:$SINGLE:max_tokens=16:$short
EOF
}

# duo ranks the heads of a model once
calibrate() {
    local model="$1"
    python - "$model" <<'EOF' || laprox-llamacpp calibrate duo "$model"
import sys
from laprox_llamacpp import EvictionPolicy, models
try:
    EvictionPolicy.parse("duo").check_model(str(models.fetch(sys.argv[1])))
except ValueError:
    sys.exit(1)
EOF
}

run() {
    local name="$1" model="$2" samples="$3" methods="$4" budgets="$5" types="$6" task="$7"
    [[ "$methods" != *duo* ]] || calibrate "$model"
    echo "== $name"
    if [[ "$task" == bench:* ]]; then
        laprox-llamacpp bench --model "$model" --methods "$methods" --budgets "$budgets" --kv-type "$types" \
            --tokens "${task#bench:}" --rounds "$samples" --decode 16 --threads "$THREADS" --out "$OUT/$name/bench.json"
        return
    fi
    laprox-llamacpp eval "$task" --model "$model" --methods "$methods" --budgets "$budgets" --kv-type "$types" \
        --samples "$samples" --shard "$SHARD" --threads "$THREADS" --out "$OUT/$name"
}

report() { laprox-llamacpp report "$OUT" --out "$OUT/report"; }

# merged first, so that shards and what was measured after an earlier packing are in the one file
pack() {
    local folder
    for folder in "$OUT"/*/; do
        if compgen -G "$folder/samples*.jsonl" >/dev/null; then
            laprox-llamacpp merge "$folder" --out "$folder"
            gzip -9n "$folder/samples.jsonl"
        fi
    done
}

all_of() {
    while read -r line; do run $line </dev/null; done < <("$1")
    report
}

case "${1:-list}" in
list) parts && quick_parts ;;
--quick)
    OUT=results-quick
    all_of quick_parts
    ;;
all) all_of parts ;;
*)
    for name in "$@"; do
        case "$name" in
        report) report ;;
        pack) pack ;;
        *)
            line="$(parts && quick_parts)"
            line="$(grep "^$name " <<<"$line")" || { echo "no part $name; see: scripts/reproduce.sh list" >&2; exit 2; }
            run $line
            ;;
        esac
    done
    ;;
esac
