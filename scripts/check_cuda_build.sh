#!/usr/bin/env bash
# Compile the CUDA backend's part of ours with nvcc: no GPU is needed. A table of registers and spills goes to standard
# output, and the script fails where a kernel leaves its limits.
#
#     scripts/check_cuda_build.sh [report.tsv]
#
# Our kernels are compiled for every architecture below; the patched dispatch of ggml-cuda for one, because it holds no
# kernel of ours. Where nvcc is missing this says so and succeeds.
set -euo pipefail
cd "$(dirname "$0")/.."

ARCHS="75 80 86 89 90 120"
MAX_REGISTERS=255 # a thread cannot have more; what does not fit is spilled
MAX_SPILL=0       # bytes stored
# kernels that may spill some bytes, as a regular expression: at 128 registers two blocks fit, which is worth more
MAY_SPILL='^laprox_score_max_sum<laprox_tile_mma<112>>$'

PYTHON="${PYTHON:-python3}"
NVCC="${NVCC:-nvcc}"
report="${1:-}"

if ! command -v "$NVCC" > /dev/null; then
    echo "check_cuda_build: skipped, nvcc was not found (set NVCC=path/to/nvcc)"
    exit 0
fi

"$PYTHON" scripts/vendor.py
src=vendor/llama.cpp/ggml/src/ggml-cuda
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# ggml-cuda includes the headers of cuBLAS, which a small toolkit comes without
headers="${LAPROX_CACHE:-$HOME/.cache/laprox-llamacpp}/cublas-13.1.1.3"
includes=(-I vendor/llama.cpp/ggml/include -I vendor/llama.cpp/ggml/src -I "$src")
echo '#include <cublas_v2.h>' > "$work/probe.cu"
if ! "$NVCC" -E "$work/probe.cu" > /dev/null 2>&1; then
    if [ ! -f "$headers/cublas_v2.h" ]; then
        echo "check_cuda_build: cublas_v2.h is missing, taking it from nvidia-cublas==13.1.1.3"
        "$PYTHON" -m pip download --quiet --no-deps --disable-pip-version-check --dest "$work" nvidia-cublas==13.1.1.3
        mkdir -p "$headers"
        "$PYTHON" - "$work"/nvidia_cublas-*.whl "$headers" << 'END'
import sys, zipfile
from pathlib import Path

with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        if "/include/" in name and name.endswith((".h", ".hpp")):
            (Path(sys.argv[2]) / Path(name).name).write_bytes(wheel.read(name))
END
    fi
    includes+=(-I "$headers")
fi

compile() { # file arch options...
    local name
    name="$(basename "$1" .cu)-sm_$2"
    if ! "$NVCC" -O3 -std=c++17 -use_fast_math -extended-lambda -arch="sm_$2" -Xcompiler -Wall,-Wno-unused-function -c "$1" \
        -o "$work/$name.o" "${includes[@]}" -DGGML_CUDA_USE_GRAPHS -DGGML_CUDA_PEER_MAX_BATCH_SIZE=128 "${@:3}" > "$work/$name.log" 2>&1; then
        cat "$work/$name.log" >&2
        echo "check_cuda_build: $1 does not compile for sm_$2" >&2
        return 1
    fi
    if grep -E "laprox-[a-z-]+\.cuh?[(:].*warning" "$work/$name.log" >&2; then
        echo "check_cuda_build: $1 compiles with warnings for sm_$2" >&2
        return 1
    fi
}

jobs=()
for arch in $ARCHS; do
    for file in "$src"/laprox-*.cu; do
        jobs+=("$file $arch -Xptxas -v")
    done
done
jobs+=("$src/ggml-cuda.cu 80")

export NVCC work src
export -f compile
printf '%s\n' "${jobs[@]}" | INCLUDES="${includes[*]}" xargs -P "$(nproc)" -I {} bash -c 'read -ra includes <<< "$INCLUDES"; compile {}'

# one line per kernel and architecture
cat "$work"/laprox-*.log | awk -v OFS='\t' '
    /Compiling entry function/ { split($0, part, "\x27"); name = part[2]; arch = part[4] }
    /bytes spill stores/       { match($0, /[0-9]+ bytes spill stores/); spill = substr($0, RSTART) + 0 }
    /Used [0-9]+ registers/    {
        match($0, /Used [0-9]+/); registers = substr($0, RSTART + 5) + 0
        shared = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART) + 0 : 0
        print name, arch, registers, spill, shared
    }' | sed -E 's/\(laprox_[a-z]+_params\)//' > "$work/mangled.tsv"
if command -v c++filt > /dev/null; then
    c++filt < "$work/mangled.tsv" | sed -E 's/^void //; s/\(laprox_[a-z]+_params\)//; s/> >/>>/' > "$work/report.tsv"
else
    cp "$work/mangled.tsv" "$work/report.tsv"
fi
sort -o "$work/report.tsv" "$work/report.tsv"
[ -z "$report" ] || cp "$work/report.tsv" "$report"

echo "registers of each kernel (bytes spilled), static shared memory 0 unless said"
awk -F'\t' -v archs="$ARCHS" -v max_registers="$MAX_REGISTERS" -v max_spill="$MAX_SPILL" -v may_spill="$MAY_SPILL" '
    { if (!($1 in seen)) { seen[$1] = 1; names[++n] = $1 }
      cell[$1, $2] = $3 ($4 > 0 ? "(" $4 ")" : "") ($5 > 0 ? " smem=" $5 : "")
      if ($3 > max_registers || ($4 > max_spill && $1 !~ may_spill)) { bad = bad "\n  " $1 " " $2 ": " $3 " registers, " $4 " bytes spilled" } }
    END {
        n_archs = split(archs, arch, " ")
        printf "%-50s", "kernel"; for (i = 1; i <= n_archs; ++i) printf "%10s", "sm_" arch[i]; print ""
        for (j = 1; j <= n; ++j) {
            printf "%-50s", names[j]
            for (i = 1; i <= n_archs; ++i) {
                key = names[j] SUBSEP "sm_" arch[i]
                if (!(key in cell)) { bad = bad "\n  " names[j] " is missing for sm_" arch[i] }
                printf "%10s", cell[key]
            }
            print ""
        }
        if (n == 0) { bad = "\n  no kernel was found in the output of ptxas" }
        if (bad != "") { print "check_cuda_build: over " max_registers " registers or " max_spill " bytes of spill:" bad; exit 1 }
    }' "$work/report.tsv"
