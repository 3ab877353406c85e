// ggml_laprox_score() and its composition of stock ops against the definition in float64.
//
// The reference knows neither the Gram matrix nor streaming: it holds A_h whole and multiplies v_i by an explicit W_O^h.
// It reads K and V as they are stored (dequantised), so one tolerance holds for every cache type.

#include "laprox-score.h"

#include "ggml-alloc.h"
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

static constexpr double MAX_REL_ERR = 1e-3;

struct test_case {
    const char * name;

    ggml_type type_k = GGML_TYPE_F16;
    ggml_type type_v = GGML_TYPE_F16;
    ggml_type type_m = GGML_TYPE_F16;

    ggml_laprox_score_stat stat = GGML_LAPROX_SCORE_MAX;
    ggml_laprox_score_gqa  gqa  = GGML_LAPROX_SCORE_GQA_MEAN;

    int64_t d_k       = 64;
    int64_t d_v       = 64;
    int64_t n_head    = 9;
    int64_t n_head_kv = 3;
    int64_t n_kv      = 512;
    int64_t n_used    = 500; // positions from here on are padding, masked for every query
    int64_t w         = 32;
    int64_t d_model   = 96;  // width of W_O; below d_v the Gram matrix is singular

    bool  value    = true;
    bool  strided  = true;  // q, k, v as llama.cpp hands them over: [d, n_head, n] permuted
    bool  dead_row = false; // one fully masked query
    bool  nan_pad  = false; // NaN in the padding rows of K and V, only for the op
    bool  sinks    = false;
    float softcap  = 0.0f;
    float sharp    = 1.0f;  // factor on the logits
};

// rows [n][n_head][d] of one operand, as stored and as float64
struct operand {
    std::vector<uint8_t> bytes;
    std::vector<double>  f64;
};

static operand make_operand(
        std::mt19937 & rng, ggml_type type, int64_t d, int64_t n_head, int64_t n, int64_t n_used, bool nan_pad) {
    std::normal_distribution<float> normal;

    std::vector<float> f32(d * n_head * n);
    for (auto & x : f32) {
        x = normal(rng);
    }
    if (nan_pad) {
        std::fill(f32.begin() + d * n_head * n_used, f32.end(), std::numeric_limits<float>::quiet_NaN());
    }

    operand res;
    res.bytes.resize(ggml_row_size(type, d) * n_head * n);
    if (type == GGML_TYPE_F32) {
        memcpy(res.bytes.data(), f32.data(), res.bytes.size());
    } else {
        ggml_quantize_chunk(type, f32.data(), res.bytes.data(), 0, n_head * n, d, nullptr);
        ggml_get_type_traits(type)->to_float(res.bytes.data(), f32.data(), d * n_head * n);
    }
    res.f64.assign(f32.begin(), f32.end());

    return res;
}

struct problem {
    test_case tc;
    float     scale;

    operand             q;                    // [w][n_head][d_k]
    operand             k;                    // [n_kv][n_head_kv][d_k]
    operand             v;                    // [n_kv][n_head_kv][d_v]
    std::vector<bool>   masked;   // [w][n_kv]
    std::vector<double> w_o;      // [n_head][d_v][d_model]
    std::vector<float>  gram;     // [n_head][d_v][d_v]
    std::vector<float>  sinks;    // [n_head]
};

static problem make_problem(const test_case & tc, uint32_t seed) {
    std::mt19937 rng(seed);

    problem p;
    p.tc    = tc;
    p.scale = tc.sharp / std::sqrt((float) tc.d_k);

    p.q = make_operand(rng, GGML_TYPE_F32, tc.d_k, tc.n_head, tc.w, tc.w, false);
    p.k = make_operand(rng, tc.type_k, tc.d_k, tc.n_head_kv, tc.n_kv, tc.n_used, tc.nan_pad);
    p.v = make_operand(rng, tc.type_v, tc.d_v, tc.n_head_kv, tc.n_kv, tc.n_used, tc.nan_pad);

    // the queries are the last w of the used positions, causal among themselves
    p.masked.resize(tc.w * tc.n_kv);
    for (int64_t t = 0; t < tc.w; ++t) {
        for (int64_t i = 0; i < tc.n_kv; ++i) {
            p.masked[t * tc.n_kv + i] = i > tc.n_used - tc.w + t || (tc.dead_row && t == tc.w / 2);
        }
    }

    std::normal_distribution<double> normal;
    for (int64_t h = 0; h < tc.n_head; ++h) {
        p.sinks.push_back(4.0 * normal(rng));
    }

    p.w_o.resize(tc.n_head * tc.d_v * tc.d_model);
    for (auto & x : p.w_o) {
        x = normal(rng);
    }

    p.gram.resize(tc.n_head * tc.d_v * tc.d_v);
    for (int64_t h = 0; h < tc.n_head; ++h) {
        for (int64_t a = 0; a < tc.d_v; ++a) {
            for (int64_t b = 0; b < tc.d_v; ++b) {
                double sum = 0.0;
                for (int64_t e = 0; e < tc.d_model; ++e) {
                    sum += p.w_o[(h * tc.d_v + a) * tc.d_model + e] * p.w_o[(h * tc.d_v + b) * tc.d_model + e];
                }
                p.gram[(h * tc.d_v + a) * tc.d_v + b] = (float) sum;
            }
        }
    }

    return p;
}

// attention of one query head, [w][n_kv]; masked columns and fully masked rows are 0
static std::vector<double> attention(const problem & p, int64_t h) {
    const test_case & tc = p.tc;

    const int64_t g = h / (tc.n_head / tc.n_head_kv);

    std::vector<double> attn(tc.w * tc.n_kv, 0.0);

    for (int64_t t = 0; t < tc.w; ++t) {
        double sum = 0.0;
        for (int64_t i = 0; i < tc.n_kv; ++i) {
            if (p.masked[t * tc.n_kv + i]) {
                continue;
            }
            double dot = 0.0;
            for (int64_t e = 0; e < tc.d_k; ++e) {
                dot += p.q.f64[(t * tc.n_head + h) * tc.d_k + e] * p.k.f64[(i * tc.n_head_kv + g) * tc.d_k + e];
            }
            dot *= (double) p.scale;
            if (tc.softcap != 0.0f) {
                dot = tc.softcap * std::tanh(dot / tc.softcap);
            }
            attn[t * tc.n_kv + i] = std::exp(dot);
            sum += attn[t * tc.n_kv + i];
        }
        for (int64_t i = 0; i < tc.n_kv && sum > 0.0; ++i) {
            attn[t * tc.n_kv + i] /= sum + (tc.sinks ? std::exp((double) p.sinks[h]) : 0.0);
        }
    }

    return attn;
}

// statistic of column i of the attention
static double column_stat(const test_case & tc, const std::vector<double> & attn, int64_t i) {
    double a_max = 0.0;
    double a_sum = 0.0;
    double a_sqr = 0.0;
    for (int64_t t = 0; t < tc.w; ++t) {
        const double a = attn[t * tc.n_kv + i];
        a_max          = std::max(a_max, a);
        a_sum += a;
        a_sqr += a * a;
    }

    return tc.stat == GGML_LAPROX_SCORE_MAX ? a_max : tc.stat == GGML_LAPROX_SCORE_L2 ? std::sqrt(a_sqr)
                                                                                      : a_sum;
}

// ||v_i W_O^h||_2
static double value_norm(const problem & p, int64_t h, int64_t i) {
    const test_case & tc = p.tc;

    const int64_t g = h / (tc.n_head / tc.n_head_kv);

    double norm = 0.0;
    for (int64_t o = 0; o < tc.d_model; ++o) {
        double out = 0.0;
        for (int64_t e = 0; e < tc.d_v; ++e) {
            out += p.v.f64[(i * tc.n_head_kv + g) * tc.d_v + e] * p.w_o[(h * tc.d_v + e) * tc.d_model + o];
        }
        norm += out * out;
    }

    return std::sqrt(norm);
}

// the definition, [n_head_kv][n_kv]
static std::vector<double> reference(const problem & p) {
    const test_case & tc = p.tc;

    const int64_t n_gqa = tc.n_head / tc.n_head_kv;

    std::vector<double> res(tc.n_head_kv * tc.n_kv, 0.0);

    for (int64_t g = 0; g < tc.n_head_kv; ++g) {
        std::vector<std::vector<double>> attn;
        std::vector<double>              mean(tc.w * tc.n_kv, 0.0);
        for (int64_t r = 0; r < n_gqa; ++r) {
            attn.push_back(attention(p, g * n_gqa + r));
            for (size_t j = 0; j < mean.size(); ++j) {
                mean[j] += attn[r][j] / n_gqa;
            }
        }

        for (int64_t i = 0; i < tc.n_used; ++i) {
            double products = 0.0;
            double norms    = 0.0;
            for (int64_t r = 0; r < n_gqa; ++r) {
                const double norm = tc.value ? value_norm(p, g * n_gqa + r, i) : 1.0;

                products += column_stat(tc, attn[r], i) * norm / n_gqa;
                norms += norm / n_gqa;
            }
            res[g * tc.n_kv + i] = tc.gqa == GGML_LAPROX_SCORE_GQA_MEAN ? products : column_stat(tc, mean, i) * norms;
        }
    }

    return res;
}

// [d, n, n_head] over rows that are stored as [n][n_head][d] (a view) or as [n_head][n][d] (contiguous)
static ggml_tensor * new_operand(ggml_context * ctx, ggml_type type, int64_t d, int64_t n, int64_t n_head, bool strided) {
    return strided ? ggml_permute(ctx, ggml_new_tensor_3d(ctx, type, d, n_head, n), 0, 2, 1, 3)
                   : ggml_new_tensor_3d(ctx, type, d, n, n_head);
}

static void set_operand(ggml_tensor * t, const operand & x) {
    const size_t size = ggml_row_size(t->type, t->ne[0]);
    for (int64_t i = 0; i < t->ne[1]; ++i) {
        for (int64_t h = 0; h < t->ne[2]; ++h) {
            memcpy((char *) t->data + i * t->nb[1] + h * t->nb[2], x.bytes.data() + (i * t->ne[2] + h) * size, size);
        }
    }
}

// the two parts of a composed score: stat [n_head or n_head_kv][n_kv], norms [n_head_kv][n_kv][n_gqa] -> [n_head_kv][n_kv]
static std::vector<float> combine(const test_case & tc, const std::vector<float> & stat, const std::vector<float> & norms) {
    const int64_t n_gqa = tc.n_head / tc.n_head_kv;

    std::vector<float> res(tc.n_head_kv * tc.n_kv, 0.0f);
    for (int64_t h = 0; h < tc.n_head; ++h) {
        const int64_t g = h / n_gqa;
        for (int64_t i = 0; i < tc.n_kv; ++i) {
            const float a = stat[(tc.gqa == GGML_LAPROX_SCORE_GQA_MEAN ? h : g) * tc.n_kv + i];
            const float n = norms.empty() ? 1.0f : norms[(g * tc.n_kv + i) * n_gqa + h % n_gqa];
            res[g * tc.n_kv + i] += a * n / n_gqa;
        }
    }

    return res;
}

static std::vector<float> compute(ggml_backend_t backend, const problem & p, bool composed, int n_threads) {
    const test_case & tc = p.tc;

    ggml_context * ctx = ggml_init({ ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true });

    ggml_tensor * q    = new_operand(ctx, GGML_TYPE_F32, tc.d_k, tc.w, tc.n_head, tc.strided);
    ggml_tensor * k    = new_operand(ctx, tc.type_k, tc.d_k, tc.n_kv, tc.n_head_kv, tc.strided);
    ggml_tensor * v    = nullptr;
    ggml_tensor * gram = nullptr;
    if (tc.value) {
        v    = new_operand(ctx, tc.type_v, tc.d_v, tc.n_kv, tc.n_head_kv, tc.strided);
        gram = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, tc.d_v, tc.d_v, tc.n_head);
    }

    // the rows of the mask are wider than n_kv
    ggml_tensor * mask_buf = ggml_new_tensor_2d(ctx, tc.type_m, tc.n_kv + (tc.strided ? 40 : 0), tc.w);
    ggml_tensor * mask     = ggml_view_2d(ctx, mask_buf, tc.n_kv, tc.w, mask_buf->nb[1], 0);

    const bool mean = tc.gqa == GGML_LAPROX_SCORE_GQA_ATTENTION;

    ggml_tensor * sinks = tc.sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, tc.n_head) : nullptr;

    ggml_tensor * out  = composed ? laprox_build_attention_stat(ctx, q, k, mask, sinks, p.scale, tc.softcap, tc.stat, mean)
                                  : ggml_laprox_score(ctx, q, k, v, mask, gram, p.scale, tc.softcap, tc.stat, tc.gqa);
    ggml_tensor * norm = composed && tc.value ? laprox_build_value_norm(ctx, v, gram) : nullptr;

    if (!composed) {
        ggml_laprox_add_sinks(out, sinks);
    }

    ggml_cgraph * gf = ggml_new_graph(ctx);
    ggml_build_forward_expand(gf, out);
    if (norm) {
        ggml_build_forward_expand(gf, norm);
    }

    ggml_backend_buffer_t buf = ggml_backend_alloc_ctx_tensors(ctx, backend);

    set_operand(q, p.q);
    set_operand(k, p.k);
    if (sinks) {
        memcpy(sinks->data, p.sinks.data(), ggml_nbytes(sinks));
    }
    if (tc.value) {
        set_operand(v, p.v);
        memcpy(gram->data, p.gram.data(), ggml_nbytes(gram));
    }
    for (int64_t t = 0; t < tc.w; ++t) {
        for (int64_t i = 0; i < mask_buf->ne[0]; ++i) {
            // what lies beyond n_kv is not ours: 0 there would change the result if it were read
            const float x   = i < tc.n_kv && p.masked[t * tc.n_kv + i] ? -INFINITY : 0.0f;
            char *      dst = (char *) mask_buf->data + t * mask_buf->nb[1] + i * mask_buf->nb[0];
            if (tc.type_m == GGML_TYPE_F32) {
                *(float *) dst = x;
            } else {
                *(ggml_fp16_t *) dst = ggml_fp32_to_fp16(x);
            }
        }
    }

    ggml_backend_cpu_set_n_threads(backend, n_threads);
    std::vector<float> res;
    std::vector<float> norms;
    const int64_t      n_row = composed && !mean ? tc.n_head : tc.n_head_kv;
    if (ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS &&
            out->type == GGML_TYPE_F32 && out->ne[0] == tc.n_kv && out->ne[1] == n_row && ggml_nrows(out) == n_row) {
        res.resize(ggml_nelements(out));
        ggml_backend_tensor_get(out, res.data(), 0, ggml_nbytes(out));
    }
    if (norm) {
        norms.resize(ggml_nelements(norm));
        ggml_backend_tensor_get(norm, norms.data(), 0, ggml_nbytes(norm));
    }
    if (composed && !res.empty()) {
        res = combine(tc, res, norms);
    }

    ggml_backend_buffer_free(buf);
    ggml_free(ctx);

    return res;
}

// largest relative error; infinite for NaN, for a wrong shape and where only one of the two is 0
static double max_rel_err(const std::vector<float> & got, const std::vector<double> & ref, double floor) {
    if (got.size() != ref.size()) {
        return INFINITY;
    }
    double res = 0.0;
    for (size_t i = 0; i < ref.size(); ++i) {
        if (got[i] == ref[i]) {
            continue;
        }
        const double err = std::fabs(got[i] - ref[i]) / std::max(ref[i], floor);
        res              = err >= 0.0 ? std::max(res, err) : INFINITY;
    }
    return res;
}

static bool run(ggml_backend_t backend, const test_case & tc, uint32_t seed) {
    const problem p = make_problem(tc, seed);

    const std::vector<double> ref = reference(p);
    const std::vector<float>  one = compute(backend, p, false, 1);

    // the norm of a row in the null space of a singular Gram matrix is rounding noise: measured against the largest score
    const double floor = tc.d_model < tc.d_v ? *std::max_element(ref.begin(), ref.end()) : 1e-30;

    const double err_op = max_rel_err(one, ref, floor);

    double err_composed = 0.0;
    if (!tc.nan_pad) {
        const std::vector<double> op(one.begin(), one.end());
        err_composed = max_rel_err(compute(backend, p, true, 2), op, floor);
    }

    bool same = true;
    for (int n_threads : { 2, 3, 8 }) {
        const std::vector<float> many = compute(backend, p, false, n_threads);
        same                          = same && many.size() == one.size() && memcmp(many.data(), one.data(), one.size() * sizeof(float)) == 0;
    }

    const bool ok = err_op <= MAX_REL_ERR && err_composed <= MAX_REL_ERR && same;

    printf("%-4s %-28s op %.1e  composed %s%.1e  threads %s\n", ok ? "ok" : "FAIL", tc.name, err_op,
            tc.nan_pad ? "(not run) " : "", err_composed, same ? "identical" : "DIFFER");

    return ok;
}

static test_case make_case(const char * name, void (*edit)(test_case &)) {
    test_case tc;
    tc.name = name;
    edit(tc);
    return tc;
}

int main() {
    std::vector<test_case>   cases;
    std::vector<std::string> names;

    // every stat, with and without the value factor, with and without the soft cap, on every cache type
    const ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };
    const char *    stats[] = { "max", "l2", "sum" };

    names.reserve(256);
    for (ggml_type type : types) {
        for (int stat = 0; stat < 3; ++stat) {
            for (bool value : { true, false }) {
                for (float softcap : { 0.0f, 5.0f }) {
                    names.push_back(std::string(ggml_type_name(type)) + " " + stats[stat] + (value ? "" : " no-value") +
                            (softcap != 0.0f ? " softcap" : ""));
                    test_case tc;
                    tc.name    = names.back().c_str();
                    tc.type_k  = type;
                    tc.type_v  = type;
                    tc.stat    = (ggml_laprox_score_stat) stat;
                    tc.value   = value;
                    tc.softcap = softcap;
                    cases.push_back(tc);
                }
            }
        }
    }

    for (int stat = 0; stat < 3; ++stat) {
        for (bool value : { true, false }) {
            names.push_back(std::string("group attention ") + stats[stat] + (value ? "" : " no-value"));
            test_case tc;
            tc.name  = names.back().c_str();
            tc.stat  = (ggml_laprox_score_stat) stat;
            tc.value = value;
            tc.gqa   = GGML_LAPROX_SCORE_GQA_ATTENTION;
            cases.push_back(tc);
        }
    }
    cases.push_back(make_case("group attention, gqa 1", [](test_case & tc) { tc.n_head = tc.n_head_kv = 4; tc.gqa = GGML_LAPROX_SCORE_GQA_ATTENTION; }));
    cases.push_back(make_case("group attention, gqa 7, w 7", [](test_case & tc) { tc.n_head = 14; tc.n_head_kv = 2; tc.w = 7; tc.gqa = GGML_LAPROX_SCORE_GQA_ATTENTION; tc.stat = GGML_LAPROX_SCORE_L2; }));
    cases.push_back(make_case("group attention, masked query", [](test_case & tc) { tc.dead_row = true; tc.gqa = GGML_LAPROX_SCORE_GQA_ATTENTION; }));
    cases.push_back(make_case("contiguous", [](test_case & tc) { tc.strided = false; }));
    cases.push_back(make_case("mask f32", [](test_case & tc) { tc.type_m = GGML_TYPE_F32; }));
    cases.push_back(make_case("k f16, v q8_0", [](test_case & tc) { tc.type_v = GGML_TYPE_Q8_0; }));
    cases.push_back(make_case("k q4_0, v f32", [](test_case & tc) { tc.type_k = GGML_TYPE_Q4_0; tc.type_v = GGML_TYPE_F32; }));
    cases.push_back(make_case("gqa 1", [](test_case & tc) { tc.n_head = 4; tc.n_head_kv = 4; }));
    cases.push_back(make_case("gqa 4", [](test_case & tc) { tc.n_head = 8; tc.n_head_kv = 2; }));
    cases.push_back(make_case("gqa 7", [](test_case & tc) { tc.n_head = 14; tc.n_head_kv = 2; }));
    cases.push_back(make_case("d 128", [](test_case & tc) { tc.d_k = tc.d_v = 128; tc.d_model = 160; }));
    cases.push_back(make_case("d 256, softcap 50", [](test_case & tc) { tc.d_k = tc.d_v = 256; tc.d_model = 300; tc.n_head = 4; tc.n_head_kv = 1; tc.softcap = 50.0f; }));
    cases.push_back(make_case("d_k 96, d_v 64", [](test_case & tc) { tc.d_k = 96; }));
    cases.push_back(make_case("d 37", [](test_case & tc) { tc.d_k = tc.d_v = 37; }));
    cases.push_back(make_case("d_k 13, d_v 5", [](test_case & tc) { tc.d_k = 13; tc.d_v = 5; }));
    cases.push_back(make_case("w 1", [](test_case & tc) { tc.w = 1; }));
    cases.push_back(make_case("w 7, l2", [](test_case & tc) { tc.w = 7; tc.stat = GGML_LAPROX_SCORE_L2; }));
    cases.push_back(make_case("w 512", [](test_case & tc) { tc.w = 512; tc.n_kv = 768; tc.n_used = 700; tc.n_head = 2; tc.n_head_kv = 1; }));
    cases.push_back(make_case("n_kv 1, w 1", [](test_case & tc) { tc.n_kv = tc.n_used = tc.w = 1; }));
    cases.push_back(make_case("n_kv 33", [](test_case & tc) { tc.n_kv = tc.n_used = 33; }));
    cases.push_back(make_case("n_kv 257", [](test_case & tc) { tc.n_kv = tc.n_used = 257; }));
    cases.push_back(make_case("n_kv 1999, q8_0", [](test_case & tc) { tc.n_kv = 1999; tc.n_used = 1990; tc.type_k = tc.type_v = GGML_TYPE_Q8_0; }));
    cases.push_back(make_case("masked chunks", [](test_case & tc) { tc.n_kv = 1024; tc.n_used = 100; }));
    cases.push_back(make_case("masked query, max", [](test_case & tc) { tc.dead_row = true; }));
    cases.push_back(make_case("masked query, l2", [](test_case & tc) { tc.dead_row = true; tc.stat = GGML_LAPROX_SCORE_L2; }));
    cases.push_back(make_case("all masked", [](test_case & tc) { tc.dead_row = true; tc.w = 1; }));
    cases.push_back(make_case("NaN in padding", [](test_case & tc) { tc.nan_pad = true; }));
    cases.push_back(make_case("sharp attention", [](test_case & tc) { tc.sharp = 8.0f; tc.stat = GGML_LAPROX_SCORE_SUM; tc.type_k = GGML_TYPE_F32; }));
    cases.push_back(make_case("sinks, max", [](test_case & tc) { tc.sinks = true; }));
    cases.push_back(make_case("sinks, sum, q8_0, masked query", [](test_case & tc) { tc.sinks = tc.dead_row = true; tc.stat = GGML_LAPROX_SCORE_SUM; tc.type_k = GGML_TYPE_Q8_0; }));
    cases.push_back(make_case("sinks, l2, mean first", [](test_case & tc) { tc.sinks = true; tc.stat = GGML_LAPROX_SCORE_L2; tc.gqa = GGML_LAPROX_SCORE_GQA_ATTENTION; }));
    cases.push_back(make_case("sinks, sharp attention", [](test_case & tc) { tc.sinks = true; tc.sharp = 8.0f; }));
    cases.push_back(make_case("singular gram", [](test_case & tc) { tc.d_model = 8; }));

    ggml_backend_t backend = ggml_backend_cpu_init();

    int n_fail = 0;
    for (size_t i = 0; i < cases.size(); ++i) {
        n_fail += !run(backend, cases[i], 1000 + i);
    }

    ggml_backend_free(backend);

    printf("%d of %zu cases failed\n", n_fail, cases.size());

    return n_fail == 0 ? 0 : 1;
}
