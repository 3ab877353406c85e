#include "laprox-kv.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <cstring>

// Queries, keys and values of an observed prompt, as the model made them: for scores that are computed elsewhere.

std::array<uint32_t, 3> laprox_kv::rows_shape(int32_t kind, uint32_t ikv) const {
    if (ikv >= layers.size()) {
        laprox_throw(LAPROX_E_ARG, format("evictable layer %u of %zu", ikv, layers.size()));
    }
    if (ragged() || n_prompt == 0) {
        laprox_throw(LAPROX_E_STATE, "rows are those of an observed prompt that is not evicted yet");
    }

    const auto & layer = layers[ikv];

    switch (kind) {
        case LAPROX_ROWS_Q:
            return { (uint32_t) layer.n_head, n_window, (uint32_t) layer.n_embd_head_k };
        case LAPROX_ROWS_K:
            return { (uint32_t) layer.n_head_kv, n_prompt, (uint32_t) layer.n_embd_head_k };
        case LAPROX_ROWS_V:
            return { (uint32_t) layer.n_head_kv, n_prompt, (uint32_t) layer.n_embd_head_v };
        default:
            laprox_throw(LAPROX_E_ARG, format("unknown kind of rows %d", kind));
    }
}

// x [n] in blocks of n_rot through the rotation, which is its own inverse
static void laprox_rotate(const std::vector<float> & rot, uint32_t n_rot, float * x, uint32_t n, std::vector<float> & tmp) {
    tmp.assign(x, x + n);

    for (uint32_t i0 = 0; i0 < n; i0 += n_rot) {
        for (uint32_t i = 0; i < n_rot; ++i) {
            double sum = 0.0;
            for (uint32_t j = 0; j < n_rot; ++j) {
                sum += (double) rot[i * n_rot + j] * tmp[i0 + j];
            }
            x[i0 + i] = (float) sum;
        }
    }
}

void laprox_kv::get_rows(int32_t kind, uint32_t ikv, float * dst) const {
    const auto size  = rows_shape(kind, ikv);
    const auto cells = cells_by_pos();

    lctx->synchronize();

    const bool rotated = kind == LAPROX_ROWS_V ? kv.attn_rot_v : kv.attn_rot_k;

    // as the cache chooses it: blocks of 64 for V, the largest that divides all widths for K
    uint32_t n_rot = 64;
    while (kind != LAPROX_ROWS_V && kv.n_embd_head_k_all % (2 * n_rot) == 0) {
        n_rot *= 2;
    }

    const auto * src = kind == LAPROX_ROWS_Q ? layers[ikv].q_obs : kind == LAPROX_ROWS_K ? kv.layers[ikv].k
                                                                                         : kv.layers[ikv].v;

    const size_t n_row = ggml_row_size(src->type, size[2]);

    std::vector<uint8_t> row(n_row);
    std::vector<float>   tmp;

    for (uint32_t h = 0; h < size[0]; ++h) {
        for (uint32_t i = 0; i < size[1]; ++i, dst += size[2]) {
            const size_t offs = kind == LAPROX_ROWS_Q ? h * src->nb[1] + i * src->nb[2] : cells[i] * src->nb[1] + h * n_row;

            ggml_backend_tensor_get(src, row.data(), offs, n_row);

            if (src->type == GGML_TYPE_F32) {
                memcpy(dst, row.data(), n_row);
            } else {
                ggml_get_type_traits(src->type)->to_float(row.data(), dst, size[2]);
            }

            if (rotated) {
                laprox_rotate(kv.attn_rot_hadamard.at(n_rot), n_rot, dst, size[2], tmp);
            }
        }
    }
}
