// ggml_laprox_attn() against the definition in float64.
//
// The reference walks over positions, not over chunks: it gathers the rows of each head's region that the mask shows,
// and holds a token's whole softmax. It reads K and V as they are stored (dequantised).

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

static constexpr double MAX_ERR = 5e-6; // of the largest output

struct test_case {
    std::string name;

    ggml_type type_k = GGML_TYPE_F16;
    ggml_type type_v = GGML_TYPE_F16;

    int64_t d_k       = 64;
    int64_t d_v       = 64;
    int64_t n_head_kv = 3;
    int64_t n_gqa     = 3;
    int64_t n_mask    = 700;
    int64_t n_tokens  = 1;

    bool  strided = true;  // q as the model's graph may hand it over: heads apart, tokens within
    bool  wide    = false; // rows of the mask wider than n_mask
    bool  dead    = false; // one token that sees nothing
    bool  empty   = false; // the last head has no rows
    bool  sinks   = false;
    float softcap = 0.0f;
    float sharp   = 1.0f;  // factor on the logits
    float hidden  = 0.3f;  // share of the columns that are masked
};

struct region {
    int64_t r0;
    int64_t c0;
};

static std::vector<double> stored(ggml_type type, int64_t d, const std::vector<float> & f32, std::vector<uint8_t> & bytes) {
    const int64_t n = f32.size() / d;

    std::vector<float> back(f32);

    bytes.resize(ggml_row_size(type, d) * n);
    if (type == GGML_TYPE_F32) {
        memcpy(bytes.data(), f32.data(), bytes.size());
    } else {
        ggml_quantize_chunk(type, f32.data(), bytes.data(), 0, n, d, nullptr);
        ggml_get_type_traits(type)->to_float(bytes.data(), back.data(), d * n);
    }

    return std::vector<double>(back.begin(), back.end());
}

static bool run(ggml_backend_t backend, const test_case & tc, uint32_t seed) {
    std::mt19937                          rng(seed);
    std::normal_distribution<float>       normal;
    std::uniform_real_distribution<float> uniform;

    const int64_t n_head = tc.n_head_kv * tc.n_gqa;
    const float   scale  = tc.sharp / std::sqrt((float) tc.d_k);

    // heads of different lengths, in an order that is not theirs, with rows of nobody in between
    std::vector<region> regions(tc.n_head_kv);

    int64_t n_rows = 5;
    for (int64_t g = tc.n_head_kv - 1; g >= 0; --g) {
        regions[g].c0 = tc.empty && g == tc.n_head_kv - 1 ? tc.n_mask : g * tc.n_mask / (tc.n_head_kv + 1);
        regions[g].r0 = n_rows;
        n_rows += tc.n_mask - regions[g].c0 + 3;
    }

    std::vector<float> q(tc.d_k * n_head * tc.n_tokens); // [n_tokens][n_head][d_k]
    std::vector<float> k(tc.d_k * n_rows);
    std::vector<float> v(tc.d_v * n_rows);
    for (auto * x : { &q, &k, &v }) {
        for (auto & e : *x) {
            e = normal(rng);
        }
    }

    std::vector<float> sinks(n_head);
    for (auto & x : sinks) {
        x = 4.0f * normal(rng);
    }

    std::vector<float> mask(tc.n_mask * tc.n_tokens);
    for (auto & m : mask) {
        m = uniform(rng) < tc.hidden ? -INFINITY : uniform(rng) < 0.5f ? 0.0f
                                                                       : -uniform(rng);
        m = ggml_fp16_to_fp32(ggml_fp32_to_fp16(m));
    }
    if (tc.dead) {
        std::fill_n(mask.begin() + tc.n_tokens / 2 * tc.n_mask, tc.n_mask, -INFINITY);
    }

    // a row that no token sees holds NaN
    std::vector<bool> seen(n_rows, false);
    for (const auto & r : regions) {
        for (int64_t t = 0; t < tc.n_tokens; ++t) {
            for (int64_t c = r.c0; c < tc.n_mask; ++c) {
                seen[r.r0 + c - r.c0] = seen[r.r0 + c - r.c0] || mask[t * tc.n_mask + c] != -INFINITY;
            }
        }
    }
    for (int64_t i = 0; i < n_rows; ++i) {
        if (!seen[i]) {
            std::fill_n(k.begin() + i * tc.d_k, tc.d_k, std::numeric_limits<float>::quiet_NaN());
            std::fill_n(v.begin() + i * tc.d_v, tc.d_v, std::numeric_limits<float>::quiet_NaN());
        }
    }

    std::vector<uint8_t> k_bytes;
    std::vector<uint8_t> v_bytes;

    const auto k64 = stored(tc.type_k, tc.d_k, k, k_bytes);
    const auto v64 = stored(tc.type_v, tc.d_v, v, v_bytes);

    // the definition, [n_tokens][n_head][d_v]
    std::vector<double> ref(tc.d_v * n_head * tc.n_tokens, 0.0);
    double              largest = 0.0;

    for (int64_t t = 0; t < tc.n_tokens; ++t) {
        for (int64_t h = 0; h < n_head; ++h) {
            const auto & r = regions[h / tc.n_gqa];

            std::vector<double>  weight;
            std::vector<int64_t> row;

            double sum = tc.sinks ? std::exp((double) sinks[h]) : 0.0;
            for (int64_t c = r.c0; c < tc.n_mask; ++c) {
                const double m = mask[t * tc.n_mask + c];
                if (m == -INFINITY) {
                    continue;
                }
                row.push_back(r.r0 + c - r.c0);

                double s = 0.0;
                for (int64_t e = 0; e < tc.d_k; ++e) {
                    s += (double) q[(t * n_head + h) * tc.d_k + e] * k64[row.back() * tc.d_k + e];
                }
                s *= (double) scale;
                if (tc.softcap != 0.0f) {
                    s = tc.softcap * std::tanh(s / tc.softcap);
                }
                weight.push_back(std::exp(s + m));
                sum += weight.back();
            }
            for (size_t i = 0; i < row.size(); ++i) {
                for (int64_t e = 0; e < tc.d_v; ++e) {
                    ref[(t * n_head + h) * tc.d_v + e] += weight[i] / sum * v64[row[i] * tc.d_v + e];
                }
            }
            for (int64_t e = 0; e < tc.d_v; ++e) {
                largest = std::max(largest, std::fabs(ref[(t * n_head + h) * tc.d_v + e]));
            }
        }
    }

    std::vector<float> first;

    double err  = 0.0;
    bool   same = true;

    for (int n_threads : { 1, 2, 3, 8 }) {
        ggml_context * ctx = ggml_init({ ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true });

        ggml_tensor * tq = tc.strided ? ggml_permute(ctx, ggml_new_tensor_3d(ctx, GGML_TYPE_F32, tc.d_k, tc.n_tokens, n_head), 0, 2, 1, 3)
                                      : ggml_new_tensor_3d(ctx, GGML_TYPE_F32, tc.d_k, n_head, tc.n_tokens);
        ggml_tensor * tk = ggml_new_tensor_2d(ctx, tc.type_k, tc.d_k, n_rows);
        ggml_tensor * tv = ggml_new_tensor_2d(ctx, tc.type_v, tc.d_v, n_rows);
        ggml_tensor * tr = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2, tc.n_head_kv);
        ggml_tensor * tm = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, tc.n_mask + (tc.wide ? 24 : 0), tc.n_tokens);

        ggml_tensor * out = ggml_laprox_attn(ctx, tq, tk, tv, ggml_view_2d(ctx, tm, tc.n_mask, tc.n_tokens, tm->nb[1], 0), tr, scale, tc.softcap);
        ggml_tensor * ts  = tc.sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_head) : nullptr;
        ggml_laprox_add_sinks(out, ts);

        ggml_cgraph * gf = ggml_new_graph(ctx);
        ggml_build_forward_expand(gf, out);

        ggml_backend_buffer_t buf = ggml_backend_alloc_ctx_tensors(ctx, backend);

        if (ts) {
            memcpy(ts->data, sinks.data(), ggml_nbytes(ts));
        }
        memcpy(tk->data, k_bytes.data(), k_bytes.size());
        memcpy(tv->data, v_bytes.data(), v_bytes.size());
        for (int64_t t = 0; t < tc.n_tokens; ++t) {
            for (int64_t h = 0; h < n_head; ++h) {
                memcpy((char *) tq->data + h * tq->nb[1] + t * tq->nb[2], &q[(t * n_head + h) * tc.d_k], tc.d_k * sizeof(float));
            }
            for (int64_t c = 0; c < tm->ne[0]; ++c) {
                // what lies beyond n_mask is not ours
                ((ggml_fp16_t *) tm->data)[t * tm->ne[0] + c] = ggml_fp32_to_fp16(c < tc.n_mask ? mask[t * tc.n_mask + c] : 0.0f);
            }
        }
        for (int64_t g = 0; g < tc.n_head_kv; ++g) {
            ((int32_t *) tr->data)[2 * g]     = regions[g].r0;
            ((int32_t *) tr->data)[2 * g + 1] = regions[g].c0;
        }

        ggml_backend_cpu_set_n_threads(backend, n_threads);

        std::vector<float> got;
        if (ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS && out->ne[0] == tc.d_v && out->ne[1] == n_head && out->ne[2] == tc.n_tokens) {
            got.resize(ggml_nelements(out));
            ggml_backend_tensor_get(out, got.data(), 0, ggml_nbytes(out));
        }

        ggml_backend_buffer_free(buf);
        ggml_free(ctx);

        if (n_threads == 1) {
            first = got;
            err   = got.size() == ref.size() ? 0.0 : INFINITY;
            for (size_t i = 0; i < got.size() && i < ref.size(); ++i) {
                const double e = std::fabs(got[i] - ref[i]) / std::max(largest, 1e-30);
                err            = e >= 0.0 ? std::max(err, e) : INFINITY; // NaN, too
            }
        }
        same = same && got.size() == first.size() && memcmp(got.data(), first.data(), got.size() * sizeof(float)) == 0;
    }

    const bool ok = err <= MAX_ERR && same;

    printf("%-4s %-32s %.1e  threads %s\n", ok ? "ok" : "FAIL", tc.name.c_str(), err, same ? "identical" : "DIFFER");

    return ok;
}

static test_case make_case(const char * name, void (*edit)(test_case &)) {
    test_case tc;
    tc.name = name;
    edit(tc);
    return tc;
}

int main() {
    std::vector<test_case> cases;

    for (ggml_type type_k : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
        for (int64_t n_tokens : { 1, 5 }) {
            for (float softcap : { 0.0f, 5.0f }) {
                test_case tc;
                tc.name     = std::string(ggml_type_name(type_k)) + (n_tokens > 1 ? " 5 tokens" : "") + (softcap > 0.0f ? " softcap" : "");
                tc.type_k   = type_k;
                tc.type_v   = type_k;
                tc.n_tokens = n_tokens;
                tc.softcap  = softcap;
                cases.push_back(tc);
            }
        }
    }

    for (int n_gqa : { 1, 2, 5, 7, 16 }) {
        test_case tc;
        tc.name  = "gqa " + std::to_string(n_gqa);
        tc.n_gqa = n_gqa;
        cases.push_back(tc);
    }

    cases.push_back(make_case("q8_0 K, q4_0 V", [](test_case & tc) { tc.type_k = GGML_TYPE_Q8_0; tc.type_v = GGML_TYPE_Q4_0; }));
    cases.push_back(make_case("d 256", [](test_case & tc) { tc.d_k = tc.d_v = 256; tc.n_head_kv = 1; tc.n_gqa = 4; }));
    cases.push_back(make_case("d_k 96, d_v 64", [](test_case & tc) { tc.d_k = 96; }));
    cases.push_back(make_case("d_k 13, d_v 37", [](test_case & tc) { tc.d_k = 13; tc.d_v = 37; }));
    cases.push_back(make_case("one column", [](test_case & tc) { tc.n_mask = 1; tc.hidden = 0.0f; }));
    cases.push_back(make_case("255 columns", [](test_case & tc) { tc.n_mask = 255; }));
    cases.push_back(make_case("256 columns", [](test_case & tc) { tc.n_mask = 256; }));
    cases.push_back(make_case("257 columns", [](test_case & tc) { tc.n_mask = 257; }));
    cases.push_back(make_case("3000 columns, most masked", [](test_case & tc) { tc.n_mask = 3000; tc.hidden = 0.995f; tc.n_tokens = 3; }));
    cases.push_back(make_case("a token that sees nothing", [](test_case & tc) { tc.dead = true; tc.n_tokens = 4; }));
    cases.push_back(make_case("nothing at all", [](test_case & tc) { tc.dead = true; }));
    cases.push_back(make_case("a head without rows", [](test_case & tc) { tc.empty = true; }));
    cases.push_back(make_case("wide mask", [](test_case & tc) { tc.wide = true; tc.n_tokens = 8; }));
    cases.push_back(make_case("contiguous q", [](test_case & tc) { tc.strided = false; tc.n_tokens = 8; }));
    cases.push_back(make_case("sinks", [](test_case & tc) { tc.sinks = true; tc.n_tokens = 2; }));
    cases.push_back(make_case("sinks, a token that sees nothing", [](test_case & tc) { tc.sinks = tc.dead = true; tc.n_tokens = 4; tc.type_v = GGML_TYPE_Q8_0; }));
    cases.push_back(make_case("sharp attention", [](test_case & tc) { tc.sharp = 20.0f; tc.type_k = GGML_TYPE_F32; }));

    ggml_backend_t backend = ggml_backend_cpu_init();

    int n_fail = 0;
    for (size_t i = 0; i < cases.size(); ++i) {
        n_fail += !run(backend, cases[i], 2000 + i);
    }

    ggml_backend_free(backend);

    printf("%d of %zu cases failed\n", n_fail, cases.size());

    return n_fail == 0 ? 0 : 1;
}
