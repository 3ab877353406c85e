"""Logits of a plain llama.cpp context, by llama-cpp-python alone: runs on any build, patched or not.

    python plain_logits.py MODEL IDS.npy TYPE WINDOW OUT.npy

TYPE is the GGML_TYPE_* number of the cache. Decodes all but the last WINDOW ids, then those, then each of the first six
again, and writes the logits after each, [8, n_vocab].
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import llama_cpp as lib
import numpy as np


def main(model_path: str, ids_path: str, kind: str, window: str, out_path: str) -> None:
    ids, w = np.load(ids_path), int(window)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(model_path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = 1024
    params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    params.n_seq_max = 1
    params.flash_attn_type = 1
    params.type_k = params.type_v = int(kind)
    params.swa_full = False
    ctx = lib.llama_init_from_model(model, params)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    pos = 0

    def decode(tokens: Sequence[int]) -> np.ndarray:
        nonlocal pos
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = int(token), pos + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(tokens) - 1
        assert lib.llama_decode(ctx, batch) == 0
        lib.llama_batch_free(batch)
        pos += len(tokens)
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(ctx, -1), shape=(n_vocab,)).copy()

    steps = [ids[:-w], ids[-w:], *([token] for token in ids[:6])]
    np.save(out_path, np.stack([decode(step) for step in steps]))


if __name__ == "__main__":
    main(*sys.argv[1:])
