#include "laprox-kv.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <cmath>
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

// x [n] in blocks of n_rot through the Hadamard rotation (Sylvester's order), which is its own inverse
static void laprox_rotate(float * x, uint32_t n, uint32_t n_rot) {
    const float scale = 1.0f / std::sqrt((float) n_rot);

    for (float * block = x; block < x + n; block += n_rot) {
        for (uint32_t step = 1; step < n_rot; step *= 2) {
            for (uint32_t i = 0; i < n_rot; i += 2 * step) {
                for (uint32_t j = i; j < i + step; ++j) {
                    const float a = block[j];
                    const float b = block[j + step];

                    block[j]        = a + b;
                    block[j + step] = a - b;
                }
            }
        }
        for (uint32_t i = 0; i < n_rot; ++i) {
            block[i] *= scale;
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

    // one read: a device answers slowly, if fast
    const size_t n_read = kind == LAPROX_ROWS_Q ? ggml_nbytes(src) : kv.v_cells[0].used_max_p1() * src->nb[1];

    std::vector<uint8_t> data(n_read);
    ggml_backend_tensor_get(src, data.data(), 0, data.size());

    for (uint32_t h = 0; h < size[0]; ++h) {
        for (uint32_t i = 0; i < size[1]; ++i, dst += size[2]) {
            const auto * row = data.data() + (kind == LAPROX_ROWS_Q ? h * src->nb[1] + i * src->nb[2] : cells[i] * src->nb[1] + h * n_row);

            if (src->type == GGML_TYPE_F32) {
                memcpy(dst, row, n_row);
            } else {
                ggml_get_type_traits(src->type)->to_float(row, dst, size[2]);
            }

            if (rotated) {
                laprox_rotate(dst, size[2], n_rot);
            }
        }
    }
}
