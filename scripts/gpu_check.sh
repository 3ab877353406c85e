#!/usr/bin/env bash
# One command on a machine with an NVIDIA GPU: builds the CUDA backend for the card that is there, tests our ops on it,
# compares kept sets with the CPU's, and measures memory, decode speed and the op's time. Prints a table, writes JSON.
#
#   scripts/gpu_check.sh [MODEL] [OUT.json]
#
# MODEL is a known name or a GGUF file (default: smollm2-135m, fetched when there is a network). Wants nvcc, cmake and a C++
# compiler. The Python that runs it (PYTHON) has numpy, click, rich and llama-cpp-python, whose own libraries are not used.
# Estimated, not measured yet: ten minutes on 16 cores, most of it the build. It is made in BUILD (build/gpu), and again
# only what changed. LIBRARIES names the folder that a build on another machine left (build/gpu/bin, all of it): then
# nothing is built and no nvcc is needed. To make it where there is no GPU, run the two cmake lines below for the card.
#
# For a machine without a network, on one that has it and the same Python and CPU family:
#
#   python scripts/vendor.py                                     # the sources, into vendor/
#   pip wheel --wheel-dir carry numpy click rich typing-extensions diskcache jinja2
#   pip wheel --wheel-dir carry --no-deps llama-cpp-python==0.3.36 \
#       --config-settings=cmake.define.LLAMA_BUILD=OFF --config-settings=cmake.define.LLAVA_BUILD=OFF
#   python -c 'from laprox_llamacpp import models; print(models.fetch("smollm2-135m"))'   # copy this file to carry/
#
# then carry the checkout, vendor/ and carry/ in it, and there:
#
#   python3 -m venv carry/venv && carry/venv/bin/pip install --no-index --find-links carry numpy click rich llama-cpp-python
#   PYTHON=carry/venv/bin/python scripts/gpu_check.sh carry/SmolLM2-135M-Instruct.Q4_1.gguf
set -euo pipefail
here="$PWD"
cd "$(dirname "$0")/.."

# of a file that the caller names
from_here() { case "$1" in /*) echo "$1" ;; *) echo "$here/$1" ;; esac; }

MODEL="${1:-smollm2-135m}"
[[ ! -f "$(from_here "$MODEL")" ]] || MODEL="$(from_here "$MODEL")"
OUT="$(from_here "${2:-gpu_check.json}")"
PYTHON="${PYTHON:-python3}"
LIBRARIES="${LIBRARIES:-}"

command -v nvidia-smi >/dev/null || { echo "no nvidia-smi: this machine has no NVIDIA driver, expected a GPU" >&2; exit 2; }

if [[ -z "$LIBRARIES" ]]; then
    BUILD="${BUILD:-build/gpu}"
    LOG="${OUT%.json}.log"
    command -v nvcc >/dev/null || { echo "no nvcc on PATH, expected the CUDA toolkit (/usr/local/cuda/bin?)" >&2; exit 2; }
    arch="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)"
    echo "== build for sm_$arch (log: $LOG)"
    {
        cmake -S . -B "$BUILD" -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$arch" \
            -DLAPROX_BUILD_TESTS=ON
        cmake --build "$BUILD" -j "$(nproc)" --target laprox test-backend-ops
    } >"$LOG" 2>&1 || { tail -20 "$LOG" >&2; exit 1; }
    LIBRARIES="$BUILD/bin"
else
    LIBRARIES="$(from_here "$LIBRARIES")"
fi
for file in libllama.so test-backend-ops; do
    [[ -e "$LIBRARIES/$file" ]] || { echo "no $file in $LIBRARIES, expected what the build leaves in bin" >&2; exit 2; }
done
LIBRARIES="$(cd "$LIBRARIES" && pwd)"

export LLAMA_CPP_LIB_PATH="$LIBRARIES" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export LD_LIBRARY_PATH="$LIBRARIES${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$PYTHON" scripts/gpu_check.py --ops "$LIBRARIES/test-backend-ops" --model "$MODEL" --out "$OUT"
