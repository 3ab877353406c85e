#!/usr/bin/env bash
# Compile the CUDA backend's part of ours with nvcc: no GPU is needed. A table of registers and spills goes to standard
# output, and the script fails where a kernel leaves its limits.
#
#     scripts/check_cuda_build.sh [report.tsv]
#
# Our kernels and the patched dispatch of ggml-cuda are compiled for every architecture below. A machine without nvcc fails,
# unless LAPROX_NO_NVCC=1 says that it has none.
set -euo pipefail
cd "$(dirname "$0")/.."

ARCHS="75 80 86 89 90 120"
# most registers of a thread, and bytes that it may spill: what was measured, and a little more. the first line that fits a
# kernel counts. 128 registers are what lets two blocks of 256 threads run side by side, which is worth a spill of two words;
# those of laprox_attn<1, false> and <2, false>, two words and one on sm_120 alone, are ptxas's own choice: registers are left
LIMITS='
laprox_attn<1, true>                              80   0
laprox_attn<2, true>                              88   0
laprox_attn<[12], false>                         128   8
laprox_attn<4, (true|false)>                     128   0
laprox_attn<8, true>                             176   0
laprox_attn<8, false>                            208   0
laprox_attn_combine                               64   0
laprox_score_gram<.*>                             48   0
laprox_score_queries<.*>                          32   0
laprox_score_lse                                  48   0
laprox_score_max_sum<laprox_tile_mma<112>>       128  16
laprox_score_max_sum<laprox_tile_mma<(192|256)>> 224   0
laprox_score_max_sum<laprox_tile_mma<.*>>        128   0
laprox_score_(norm|stat)<laprox_tile_mma<(192|256)>>  200  0
laprox_score_(norm|stat)<laprox_tile_mma<.*>>    112   0
laprox_score_.*<laprox_tile_simt>                112   0
'

PYTHON="${PYTHON:-python3}"
NVCC="${NVCC:-nvcc}"
report="${1:-}"

if ! command -v "$NVCC" > /dev/null; then
    if [ "${LAPROX_NO_NVCC:-}" = 1 ]; then
        echo "check_cuda_build: left out, LAPROX_NO_NVCC=1"
        exit 0
    fi
    echo "check_cuda_build: nvcc was not found, expected it on PATH or in NVCC; LAPROX_NO_NVCC=1 leaves this out" >&2
    exit 1
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

compile() { # file archs,with,commas options...
    local name arch archs=()
    name="$(basename "$1" .cu)-sm_$2"
    for arch in ${2//,/ }; do
        archs+=(-gencode "arch=compute_$arch,code=sm_$arch")
    done
    if ! "$NVCC" -O3 -std=c++17 -use_fast_math -extended-lambda "${archs[@]}" -Xcompiler -Wall,-Wno-unused-function -c "$1" \
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

# the largest first
jobs=("$src/ggml-cuda.cu ${ARCHS// /,}")
for arch in $ARCHS; do
    for file in "$src"/laprox-*.cu; do
        jobs+=("$file $arch -Xptxas -v")
    done
done

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
# nvcc's host compiler comes with c++filt
c++filt < "$work/mangled.tsv" | sed -E 's/^void //; s/\(laprox_[a-z]+_params\)//; s/> >/>>/' > "$work/report.tsv"
sort -o "$work/report.tsv" "$work/report.tsv"
[ -z "$report" ] || cp "$work/report.tsv" "$report"

echo "registers of each kernel (bytes spilled), static shared memory 0 unless said"
LIMITS="$LIMITS" awk -F'\t' -v archs="$ARCHS" '
    BEGIN {
        n_limits = split(ENVIRON["LIMITS"], limit, "\n")
        for (i = 1; i <= n_limits; ++i) {
            if (match(limit[i], / +[0-9]+ +[0-9]+$/)) {
                pattern[++n_patterns] = "^" substr(limit[i], 1, RSTART - 1) "$"
                split(substr(limit[i], RSTART), number, " ")
                max_registers[n_patterns] = number[1] + 0
                max_spill[n_patterns]     = number[2] + 0
            }
        }
    }
    { if (!($1 in seen)) { seen[$1] = 1; names[++n] = $1 }
      cell[$1, $2] = $3 ($4 > 0 ? "(" $4 ")" : "") ($5 > 0 ? " smem=" $5 : "")
      for (i = 1; i <= n_patterns && $1 !~ pattern[i]; ++i) {}
      if (i > n_patterns) {
          bad = bad "\n  " $1 " has no limit"
      } else if ($3 > max_registers[i] || $4 > max_spill[i]) {
          bad = bad "\n  " $1 " " $2 ": " $3 " registers of " max_registers[i] ", " $4 " bytes spilled of " max_spill[i]
      } }
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
        if (bad != "") { print "check_cuda_build: outside the limits:" bad; exit 1 }
    }' "$work/report.tsv"
