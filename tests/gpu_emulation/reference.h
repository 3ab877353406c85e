// GGML_OP_LAPROX_SCORE and GGML_OP_LAPROX_ATTN in float64, written from their definition in ggml.h

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace reference {

enum stat { MAX,
    L2,
    SUM };

// a hidden position may hold anything: its logit is never formed
inline double logit(const double * q, const double * k, int d, double scale, double softcap, double mask) {
    if (mask == -INFINITY) {
        return -INFINITY;
    }
    double s = 0.0;
    for (int a = 0; a < d; ++a) {
        s += q[a] * k[a];
    }
    s *= scale;
    return (softcap != 0.0 ? softcap * std::tanh(s / softcap) : s) + mask;
}

// logits -> attention; all 0 where nothing is visible. sink: one more logit in the sum, -INF: none
inline std::vector<double> soft_max(const std::vector<double> & s, double sink) {
    double              m = *std::max_element(s.begin(), s.end());
    std::vector<double> a(s.size(), 0.0);
    if (m == -INFINITY) {
        return a;
    }
    m          = std::max(m, sink);
    double sum = std::exp(sink - m);
    for (size_t i = 0; i < s.size(); ++i) {
        a[i] = std::exp(s[i] - m);
        sum += a[i];
    }
    for (double & x : a) {
        x /= sum;
    }
    return a;
}

// q [d_k, w, n_head], k [d_k, n_kv, n_head_kv], v [d_v, n_kv, n_head_kv], mask [n_kv, w], gram [d_v, d_v, n_head] or empty,
// sinks [n_head] or empty
// -> [n_kv, n_head_kv]
struct score_problem {
    int    d_k, d_v, w, n_kv, n_head, n_head_kv;
    double scale, softcap;
    stat   what;
    bool   group; // the mean over the query group before the statistic

    std::vector<double> q, k, v, mask, gram, sinks;
};

inline double column_stat(stat what, const std::vector<double> & a) { // over the queries
    double res = 0.0;
    for (const double x : a) {
        res = what == MAX ? std::max(res, x) : what == L2 ? res + x * x
                                                          : res + x;
    }
    return what == L2 ? std::sqrt(res) : res;
}

inline std::vector<double> score(const score_problem & p) {
    const int n_gqa = p.n_head / p.n_head_kv;

    std::vector<double> res((size_t) p.n_kv * p.n_head_kv);

    for (int g = 0; g < p.n_head_kv; ++g) {
        std::vector<std::vector<double>> attn; // of (head of the group, query)
        for (int r = 0; r < n_gqa; ++r) {
            for (int t = 0; t < p.w; ++t) {
                const double * q = &p.q[((size_t) (g * n_gqa + r) * p.w + t) * p.d_k];

                std::vector<double> s(p.n_kv);
                for (int i = 0; i < p.n_kv; ++i) {
                    s[i] = logit(q, &p.k[((size_t) g * p.n_kv + i) * p.d_k], p.d_k, p.scale, p.softcap, p.mask[(size_t) t * p.n_kv + i]);
                }
                attn.push_back(soft_max(s, p.sinks.empty() ? -INFINITY : p.sinks[g * n_gqa + r]));
            }
        }
        for (int i = 0; i < p.n_kv; ++i) {
            bool visible = false;
            for (int t = 0; t < p.w; ++t) {
                visible = visible || p.mask[(size_t) t * p.n_kv + i] != -INFINITY;
            }
            if (!visible) {
                continue; // 0, whatever v holds
            }

            double sum_stat = 0.0, sum_value = 0.0, sum_product = 0.0;

            std::vector<double> mean(p.w, 0.0);
            for (int r = 0; r < n_gqa; ++r) {
                std::vector<double> column(p.w);
                for (int t = 0; t < p.w; ++t) {
                    column[t] = attn[r * p.w + t][i];
                    mean[t] += column[t] / n_gqa;
                }
                double value = 1.0;
                if (!p.gram.empty()) {
                    const double * v = &p.v[((size_t) g * p.n_kv + i) * p.d_v];
                    const double * G = &p.gram[(size_t) (g * n_gqa + r) * p.d_v * p.d_v];
                    value            = 0.0;
                    for (int a = 0; a < p.d_v; ++a) {
                        for (int b = 0; b < p.d_v; ++b) {
                            value += v[a] * G[(size_t) a * p.d_v + b] * v[b];
                        }
                    }
                    value = std::sqrt(std::max(value, 0.0));
                }
                sum_stat += column_stat(p.what, column);
                sum_value += value;
                sum_product += column_stat(p.what, column) * value;
            }
            res[(size_t) g * p.n_kv + i] = p.group ? column_stat(p.what, mean) * sum_value / n_gqa : sum_product / n_gqa;
        }
    }
    return res;
}

// q [d_k, n_head, n_tokens], k [d_k, n_rows], v [d_v, n_rows], mask [n_mask, n_tokens], regions (row, column) of each KV head,
// sinks [n_head] or empty -> [d_v, n_head, n_tokens]
struct attn_problem {
    int    d_k, d_v, n_head, n_head_kv, n_tokens, n_mask;
    double scale, softcap;

    std::vector<double> q, k, v, mask, sinks;
    std::vector<int>    regions;
};

inline std::vector<double> attn(const attn_problem & p) {
    const int n_gqa = p.n_head / p.n_head_kv;

    std::vector<double> res((size_t) p.d_v * p.n_head * p.n_tokens, 0.0);

    for (int t = 0; t < p.n_tokens; ++t) {
        for (int h = 0; h < p.n_head; ++h) {
            const int r0 = p.regions[h / n_gqa * 2];
            const int c0 = p.regions[h / n_gqa * 2 + 1];

            std::vector<double> s(p.n_mask + 1, -INFINITY); // never empty
            for (int i = c0; i < p.n_mask; ++i) {
                s[i] = logit(&p.q[((size_t) t * p.n_head + h) * p.d_k], &p.k[(size_t) (r0 + i - c0) * p.d_k], p.d_k, p.scale, p.softcap, p.mask[(size_t) t * p.n_mask + i]);
            }
            const std::vector<double> a = soft_max(s, p.sinks.empty() ? -INFINITY : p.sinks[h]);
            for (int i = c0; i < p.n_mask; ++i) {
                for (int e = 0; e < p.d_v && a[i] != 0.0; ++e) {
                    res[((size_t) t * p.n_head + h) * p.d_v + e] += a[i] * p.v[(size_t) (r0 + i - c0) * p.d_v + e];
                }
            }
        }
    }
    return res;
}

} // namespace reference
