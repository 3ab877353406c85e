#include "laprox-pages.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

// pages whose bounds lie side by side, so that the sums over the channels run over pages
static constexpr int64_t LAPROX_PAGES_BLOCK = 64;

// partial sums of a product of two rows
static constexpr int64_t LAPROX_PAGES_LANES = 16;

static int64_t laprox_div_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

//
// layout
//

void laprox_pages::add_layer(int32_t il, int64_t n_head, int64_t n_head_kv, int64_t n_embd_head_k, int64_t n_embd_head_v) {
    laprox_pages_layer layer;

    layer.pages         = this;
    layer.dense         = il < (int64_t) params.n_layer_dense;
    layer.n_gqa         = n_head / n_head_kv;
    layer.n_embd_head_k = n_embd_head_k;
    layer.n_embd_head_v = n_embd_head_v;

    layer.heads.resize(n_head_kv);

    layers.push_back(std::move(layer));

    scratch.resize(std::max<size_t>(scratch.size(), n_head_kv));
}

int64_t laprox_pages::n_chosen() const {
    return std::max(params.n_pages_min, params.n_rows / params.page_size);
}

template<typename T>
static void laprox_at_least(std::vector<T> & x, size_t n) {
    if (x.size() < n) {
        x.reserve(n); // no more than that
        x.resize(n);
    }
}

void laprox_pages::place(size_t ikv, int64_t h, int64_t row0, int64_t n_kept, int64_t mask0, int64_t n_rows) {
    auto & layer = layers[ikv];
    auto & head  = layer.heads[h];
    auto & buf   = scratch[h];

    head.row0   = row0;
    head.n_kept = n_kept;
    head.mask0  = mask0;

    if (layer.dense) {
        return;
    }

    const int64_t n_pages  = laprox_div_up(n_rows, params.page_size);
    const int64_t n_blocks = laprox_div_up(n_pages, LAPROX_PAGES_BLOCK);
    const int64_t n_read   = std::min(n_pages, n_chosen() * layer.n_gqa) * params.page_size;

    laprox_at_least(head.bounds, n_blocks * 2 * layer.n_embd_head_k * LAPROX_PAGES_BLOCK);
    laprox_at_least(head.covered, n_pages * params.page_size);

    laprox_at_least(buf.visible, n_pages * params.page_size);
    laprox_at_least(buf.page, n_pages);
    laprox_at_least(buf.score, n_blocks * LAPROX_PAGES_BLOCK);
    laprox_at_least(buf.chosen, n_pages * layer.n_gqa);
    laprox_at_least(buf.row, n_read);
    laprox_at_least(buf.weight, n_read * layer.n_gqa);
    laprox_at_least(buf.cur, std::max(layer.n_embd_head_k, layer.n_embd_head_v));
}

void laprox_pages::forget() {
    for (auto & layer : layers) {
        for (auto & head : layer.heads) {
            head.covered = {};
            head.bounds  = {};
        }
    }

    for (auto & buf : scratch) {
        buf = {};
    }
}

void laprox_pages::forget_from(int64_t i) {
    for (auto & layer : layers) {
        for (auto & head : layer.heads) {
            // whole pages: what is left of one may have narrower bounds
            const int64_t row = (head.n_kept + i) / params.page_size * params.page_size;

            std::fill(head.covered.begin() + std::min<size_t>(row, head.covered.size()), head.covered.end(), 0);
        }
    }
}

void laprox_pages::begin(int64_t i_new, int64_t n_seen) {
    this->i_new = i_new;

    rows_seen  = 0;
    rows_dense = 0;

    for (auto & layer : layers) {
        for (auto & head : layer.heads) {
            rows_seen += head.n_kept + n_seen;
            rows_dense += layer.dense ? head.n_kept + n_seen : 0;

            head.rows_read = 0;
        }
    }
}

uint64_t laprox_pages::n_rows_read() const {
    uint64_t n = rows_dense;
    for (const auto & layer : layers) {
        for (const auto & head : layer.heads) {
            n += head.rows_read;
        }
    }

    return n;
}

uint64_t laprox_pages::n_bytes() const {
    uint64_t n = 0;
    for (const auto & layer : layers) {
        for (const auto & head : layer.heads) {
            n += head.bounds.size() * sizeof(float) + head.covered.size();
        }
    }

    return n;
}

//
// op
//

ggml_tensor * laprox_pages::build(
        ggml_context * ctx,
        size_t         ikv,
        ggml_tensor *  q,
        ggml_tensor *  k,
        ggml_tensor *  v,
        ggml_tensor *  kq_mask,
        float          kq_scale,
        float          soft_cap) {
    auto & layer = layers[ikv];

    layer.kq_scale = kq_scale;
    layer.soft_cap = soft_cap;

    ggml_tensor * src[] = { q, k, v, kq_mask };

    return ggml_custom_4d(ctx, GGML_TYPE_F32, layer.n_embd_head_v, q->ne[1], 1, 1, src, 4, compute, layer.heads.size(), &layer);
}

void laprox_pages::compute(ggml_tensor * dst, int ith, int nth, void * userdata) {
    auto & layer = *(laprox_pages_layer *) userdata;

    GGML_ASSERT(dst->src[0]->type == GGML_TYPE_F32 && dst->src[0]->nb[0] == sizeof(float));
    GGML_ASSERT(dst->src[3]->type == GGML_TYPE_F16);

    for (size_t h = ith; h < layer.heads.size(); h += nth) {
        layer.pages->compute_head(dst, layer, h);
    }
}

// as ggml's own, in a form that is vectorised without F16C
static void laprox_f16_to_f32(const ggml_fp16_t * src, float * dst, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t sign = (uint32_t) (src[i] & 0x8000) << 16;
        const uint32_t bits = (uint32_t) (src[i] & 0x7fff) << 13;

        float abs; // the exponents differ by 112; exact, for denormals too
        memcpy(&abs, &bits, sizeof(abs));
        abs *= 0x1p112f;

        uint32_t res;
        memcpy(&res, &abs, sizeof(res));
        res |= sign | (bits >= 0x0f800000 ? 0x7f800000 : 0); // infinite, or not a number
        memcpy(dst + i, &res, sizeof(res));
    }
}

// row [n] of K or V, straight from the cache when it is F32
static const float * laprox_get_row(const ggml_tensor * x, int64_t h, int64_t row, float * buf) {
    // regions in one tensor have no stride between heads
    const char * src = (const char *) x->data + row * x->nb[1] + (x->ne[2] > 1 ? h * x->nb[2] : 0);

    switch (x->type) {
        case GGML_TYPE_F32: return (const float *) src;
        case GGML_TYPE_F16: laprox_f16_to_f32((const ggml_fp16_t *) src, buf, x->ne[0]); break;
        case GGML_TYPE_BF16: ggml_bf16_to_fp32_row((const ggml_bf16_t *) src, buf, x->ne[0]); break;
        default: ggml_get_type_traits(x->type)->to_float(src, buf, x->ne[0]); break;
    }

    return buf;
}

static float laprox_dot(const float * a, const float * b, int64_t n) {
    float sum[LAPROX_PAGES_LANES] = {};

    int64_t i = 0;
    for (; i + LAPROX_PAGES_LANES <= n; i += LAPROX_PAGES_LANES) {
        for (int64_t j = 0; j < LAPROX_PAGES_LANES; ++j) {
            sum[j] += a[i + j] * b[i + j];
        }
    }
    for (; i < n; ++i) {
        sum[0] += a[i] * b[i];
    }

    float res = 0.0f;
    for (float s : sum) {
        res += s;
    }

    return res;
}

void laprox_pages::compute_head(ggml_tensor * dst, laprox_pages_layer & layer, int64_t h) {
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * k       = dst->src[1];
    const ggml_tensor * v       = dst->src[2];
    const ggml_tensor * kq_mask = dst->src[3];

    auto & head = layer.heads[h];
    auto & buf  = scratch[h];

    const int64_t d_k    = layer.n_embd_head_k;
    const int64_t d_v    = layer.n_embd_head_v;
    const int64_t n_gqa  = layer.n_gqa;
    const int64_t n_page = params.page_size;
    const int64_t n_rows = kq_mask->ne[0] - head.mask0;

    const int64_t n_pages  = laprox_div_up(n_rows, n_page);
    const int64_t n_blocks = laprox_div_up(n_pages, LAPROX_PAGES_BLOCK);

    GGML_ASSERT(n_pages * n_page <= (int64_t) head.covered.size());

    const auto get_q = [&](int64_t g) { return (const float *) ((const char *) q->data + (h * n_gqa + g) * q->nb[1]); };

    // what the token sees

    const auto * mask = (const ggml_fp16_t *) kq_mask->data + head.mask0;

    for (int64_t i = 0; i < n_rows; ++i) {
        buf.visible[i] = mask[i] != 0xfc00; // -INFINITY
    }
    std::fill(buf.visible.begin() + n_rows, buf.visible.begin() + n_pages * n_page, 0);

    // bounds of the pages where that is something else than before, the newest among them

    int64_t n_cand = 0;

    for (int64_t p = 0; p < n_pages; ++p) {
        const uint8_t * visible = buf.visible.data() + p * n_page;
        uint8_t *       covered = head.covered.data() + p * n_page;

        if (memchr(visible, 1, n_page)) {
            buf.page[n_cand++] = p;
        }
        if (memcmp(visible, covered, n_page) == 0) {
            continue;
        }

        float * lo = head.bounds.data() + p / LAPROX_PAGES_BLOCK * 2 * d_k * LAPROX_PAGES_BLOCK + p % LAPROX_PAGES_BLOCK;
        float * hi = lo + d_k * LAPROX_PAGES_BLOCK;

        bool first = true;

        for (int64_t i = 0; i < n_page; ++i) {
            if (!visible[i]) {
                continue;
            }

            const float * row = laprox_get_row(k, h, head.row0 + p * n_page + i, buf.cur.data());

            for (int64_t c = 0; c < d_k; ++c) {
                float & lo_c = lo[c * LAPROX_PAGES_BLOCK];
                float & hi_c = hi[c * LAPROX_PAGES_BLOCK];

                lo_c = first ? row[c] : std::min(lo_c, row[c]);
                hi_c = first ? row[c] : std::max(hi_c, row[c]);
            }

            first = false;
        }

        memcpy(covered, visible, n_page);
    }

    // pages of each query head

    const int64_t p_new    = (head.n_kept + i_new) / n_page;
    const int64_t n_choose = std::min(n_cand, n_chosen());

    std::fill(buf.chosen.begin(), buf.chosen.begin() + n_pages * n_gqa, n_choose == n_cand);

    for (int64_t g = 0; g < n_gqa && n_choose < n_cand; ++g) {
        const float * q_g = get_q(g);

        for (int64_t b = 0; b < n_blocks; ++b) {
            float score[LAPROX_PAGES_BLOCK] = {};

            for (int64_t c = 0; c < d_k; ++c) {
                // max(q_c*min_c, q_c*max_c)
                const float * bound = head.bounds.data() + ((b * 2 + (q_g[c] >= 0.0f)) * d_k + c) * LAPROX_PAGES_BLOCK;

                for (int64_t j = 0; j < LAPROX_PAGES_BLOCK; ++j) {
                    score[j] += q_g[c] * bound[j];
                }
            }

            for (int64_t j = 0; j < LAPROX_PAGES_BLOCK; ++j) {
                // finite, and no NaN
                buf.score[b * LAPROX_PAGES_BLOCK + j] = score[j] < FLT_MAX ? score[j] : FLT_MAX;
            }
        }

        buf.score[p_new] = INFINITY;

        std::nth_element(buf.page.begin(), buf.page.begin() + n_choose, buf.page.begin() + n_cand, [&](uint32_t a, uint32_t b) {
            return buf.score[a] != buf.score[b] ? buf.score[a] > buf.score[b] : a < b;
        });

        for (int64_t i = 0; i < n_choose; ++i) {
            buf.chosen[g * n_pages + buf.page[i]] = 1;
        }
    }

    // logits over the rows that some query head chose

    const int64_t n_stride = std::min(n_pages, n_chosen() * n_gqa) * n_page;

    int64_t n_read = 0;

    for (int64_t p = 0; p < n_pages; ++p) {
        bool any = false;
        for (int64_t g = 0; g < n_gqa; ++g) {
            any = any || buf.chosen[g * n_pages + p];
        }

        for (int64_t i = p * n_page; any && i < (p + 1) * n_page; ++i) {
            if (!buf.visible[i]) {
                continue;
            }

            const float * row = laprox_get_row(k, h, head.row0 + i, buf.cur.data());

            for (int64_t g = 0; g < n_gqa; ++g) {
                float logit = -INFINITY;

                if (buf.chosen[g * n_pages + p]) {
                    logit = layer.kq_scale * laprox_dot(get_q(g), row, d_k);
                    if (layer.soft_cap != 0.0f) {
                        logit = layer.soft_cap * tanhf(logit / layer.soft_cap);
                    }
                }

                buf.weight[g * n_stride + n_read] = logit;
            }

            buf.row[n_read++] = i;
        }
    }

    head.rows_read = n_read;

    // softmax, and the mean of their values

    for (int64_t g = 0; g < n_gqa; ++g) {
        float * weight = buf.weight.data() + g * n_stride;

        const float max = *std::max_element(weight, weight + n_read);

        double sum = 0.0;
        for (int64_t i = 0; i < n_read; ++i) {
            weight[i] = expf(weight[i] - max);
            sum += weight[i];
        }
        for (int64_t i = 0; i < n_read; ++i) {
            weight[i] = (float) (weight[i] / sum);
        }
    }

    float * out = (float *) dst->data + h * n_gqa * d_v;

    std::fill(out, out + n_gqa * d_v, 0.0f);

    for (int64_t i = 0; i < n_read; ++i) {
        const float * row = laprox_get_row(v, h, head.row0 + buf.row[i], buf.cur.data());

        for (int64_t g = 0; g < n_gqa; ++g) {
            const float w = buf.weight[g * n_stride + i];

            // 0: not chosen
            for (int64_t c = 0; w != 0.0f && c < d_v; ++c) {
                out[g * d_v + c] += w * row[c];
            }
        }
    }
}
