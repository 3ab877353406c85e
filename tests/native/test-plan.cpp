// The plan against brute force: every head pooled naively, every row of a unit sorted, on many small cases with ties;
// then the arguments it must refuse, and the time of a large case.

#include "laprox-plan.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

static int n_fail = 0;

#define CHECK(cond, ...)                                               \
    do {                                                               \
        if (!(cond)) {                                                 \
            n_fail++;                                                  \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond); \
            fprintf(stderr, __VA_ARGS__);                              \
            fprintf(stderr, "\n");                                     \
        }                                                              \
    } while (0)

struct plan_case {
    laprox_plan_params    params;
    std::vector<uint32_t> n_head_kv; // [n_layer]
    uint32_t              n_cand;
    std::vector<float>    scores;    // [n_head][n_cand]
    std::vector<float>    residual;  // [n_layer]

    uint32_t n_head() const { return std::accumulate(n_head_kv.begin(), n_head_kv.end(), 0u); }
};

struct plan_result {
    laprox_status          status;
    std::vector<uint32_t>  n_kept;
    std::vector<llama_pos> pos;
    std::string            error;
};

static plan_result run(const plan_case & c) {
    constexpr llama_pos guard = -77;

    plan_result r;
    r.n_kept.assign(c.n_head() + 1, 0xDEAD);
    // a refused n_keep may be absurd; nothing is written then
    r.pos.assign(std::min<uint64_t>(c.params.n_keep, (uint64_t) c.n_head() * c.n_cand) + 1, guard);
    r.status = laprox_plan_impl(c.params, (uint32_t) c.n_head_kv.size(), c.n_head_kv.data(), c.n_cand, c.scores.data(),
            c.residual.empty() ? nullptr : c.residual.data(), r.n_kept.data(), r.pos.data(), r.error);
    CHECK(r.n_kept.back() == 0xDEAD && r.pos.back() == guard, "wrote past the end");
    if (r.status != LAPROX_OK) {
        CHECK(std::all_of(r.n_kept.begin(), r.n_kept.end(), [](uint32_t x) { return x == 0xDEAD; }), "n_kept written on failure");
        CHECK(std::all_of(r.pos.begin(), r.pos.end(), [](llama_pos x) { return x == guard; }), "pos written on failure");
        CHECK(!r.error.empty() && r.error.find('\n') == std::string::npos, "error text '%s'", r.error.c_str());
    }
    r.n_kept.pop_back();
    r.pos.pop_back();
    return r;
}

static laprox_plan_params make_params(int32_t pool, uint32_t pool_size, float pool_decay, int32_t normalize, int32_t alloc, uint32_t n_sink, uint64_t n_keep) {
    laprox_plan_params p = {};
    p.struct_size        = sizeof(p);
    p.pool               = pool;
    p.pool_size          = pool_size;
    p.pool_decay         = pool_decay;
    p.normalize          = normalize;
    p.alloc              = alloc;
    p.n_sink             = n_sink;
    p.n_keep             = n_keep;
    return p;
}

//
// brute force
//

static double pool_naive(const laprox_plan_params & p, const float * x, int64_t n, int64_t i) {
    const int64_t radius = p.pool == LAPROX_POOL_REACH ? p.pool_size : p.pool_size / 2;

    double sum = 0.0;
    double max = -std::numeric_limits<double>::infinity();
    for (int64_t j = std::max<int64_t>(0, i - radius); j <= std::min(n - 1, i + radius); ++j) {
        sum += x[j];
        max = std::max(max, (double) x[j]);
    }

    switch (p.pool) {
        case LAPROX_POOL_REACH: return std::max((double) x[i], (double) p.pool_decay * max);
        case LAPROX_POOL_AVG: return sum / p.pool_size;
        case LAPROX_POOL_MAX: return max;
        default: return x[i];
    }
}

// final score of every row, [n_head][n_cand]
static std::vector<float> scores_naive(const plan_case & c) {
    std::vector<float> s(c.scores.size());

    size_t row = 0;
    for (size_t il = 0; il < c.n_head_kv.size(); ++il) {
        const size_t n_layer = (size_t) c.n_head_kv[il] * c.n_cand;

        for (size_t i = 0; i < n_layer; ++i) {
            s[row + i] = (float) pool_naive(c.params, &c.scores[row + i / c.n_cand * c.n_cand], c.n_cand, i % c.n_cand);
        }

        long double layer_sum = 0.0L;
        for (size_t i = 0; i < n_layer; ++i) {
            layer_sum += s[row + i];
        }

        for (uint32_t h = 0; h < c.n_head_kv[il]; ++h) {
            float * sh = s.data() + row + (size_t) h * c.n_cand;

            long double m1 = 0.0L;
            long double m2 = 0.0L;
            for (uint32_t i = 0; i < c.n_cand; ++i) {
                m1 += sh[i];
            }
            m1 /= c.n_cand;
            for (uint32_t i = 0; i < c.n_cand; ++i) {
                m2 += (sh[i] - m1) * (sh[i] - m1);
            }

            for (uint32_t i = 0; i < c.n_cand; ++i) {
                switch (c.params.normalize) {
                    case LAPROX_NORMALIZE_RESIDUAL: sh[i] = (float) ((long double) sh[i] / c.residual[il]); break;
                    case LAPROX_NORMALIZE_LAYER_SUM: sh[i] = layer_sum == 0 ? 0.0f : (float) (sh[i] / layer_sum); break;
                    case LAPROX_NORMALIZE_ZSCORE: sh[i] = m2 == 0 ? 0.0f : (float) ((sh[i] - m1) / std::sqrt(m2 / (c.n_cand - 1))); break;
                    default: break;
                }
            }
        }

        row += n_layer;
    }

    return s;
}

// the share of each part by largest remainder, the rest one by one to the part furthest below its due
static std::vector<uint64_t> shares_naive(uint64_t total, const std::vector<uint32_t> & weight) {
    const double sum = std::accumulate(weight.begin(), weight.end(), 0.0);

    std::vector<uint64_t> share;
    for (uint32_t w : weight) {
        share.push_back((uint64_t) std::floor(total * w / sum + 1e-9));
    }
    std::vector<bool> up(weight.size(), false);
    while (std::accumulate(share.begin(), share.end(), (uint64_t) 0) < total) {
        int best = -1;
        for (size_t i = 0; i < weight.size(); ++i) {
            if (!up[i] && (best < 0 || total * weight[i] / sum - share[i] > total * weight[best] / sum - share[best] + 1e-9)) {
                best = (int) i;
            }
        }
        share[best]++;
        up[best] = true;
    }
    return share;
}

static plan_result plan_naive(const plan_case & c) {
    const uint32_t           n_head = c.n_head();
    const std::vector<float> s      = scores_naive(c);

    std::vector<uint32_t> unit_heads = { n_head };
    if (c.params.alloc == LAPROX_ALLOC_LAYER) {
        unit_heads = c.n_head_kv;
    } else if (c.params.alloc == LAPROX_ALLOC_HEAD) {
        unit_heads.assign(n_head, 1);
    }
    const std::vector<uint64_t> share = shares_naive(c.params.n_keep, unit_heads);

    std::vector<bool> kept(s.size(), false);

    size_t begin = 0;
    for (size_t u = 0; u < unit_heads.size(); ++u) {
        std::vector<size_t> order((size_t) unit_heads[u] * c.n_cand);
        std::iota(order.begin(), order.end(), begin);
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
            const size_t pa = a % c.n_cand;
            const size_t pb = b % c.n_cand;
            const bool   sa = pa < c.params.n_sink;
            const bool   sb = pb < c.params.n_sink;
            if (sa != sb) {
                return sa;
            }
            return sa ? pa < pb : s[a] > s[b];
        });
        for (uint64_t i = 0; i < share[u]; ++i) {
            kept[order[i]] = true;
        }
        begin += order.size();
    }

    plan_result r;
    r.status = LAPROX_OK;
    r.n_kept.assign(n_head, 0);
    for (size_t i = 0; i < kept.size(); ++i) {
        if (kept[i]) {
            r.n_kept[i / c.n_cand]++;
            r.pos.push_back((llama_pos) (i % c.n_cand));
        }
    }
    return r;
}

//
// tests
//

static void test_brute_force() {
    std::mt19937 rng(1);

    const auto below = [&](uint32_t n) { return (uint32_t) (rng() % n); };

    struct {
        int32_t  pool;
        uint32_t size;
    } pools[] = {
        { LAPROX_POOL_NONE,  0    },
        { LAPROX_POOL_REACH, 0    },
        { LAPROX_POOL_REACH, 1    },
        { LAPROX_POOL_REACH, 12   },
        { LAPROX_POOL_REACH, 1000 },
        { LAPROX_POOL_AVG,   1    },
        { LAPROX_POOL_AVG,   7    },
        { LAPROX_POOL_AVG,   1023 },
        { LAPROX_POOL_MAX,   1    },
        { LAPROX_POOL_MAX,   7    },
        { LAPROX_POOL_MAX,   2001 },
    };

    int n_case = 0;
    for (const auto & pool : pools) {
        for (int32_t normalize = LAPROX_NORMALIZE_NONE; normalize <= LAPROX_NORMALIZE_ZSCORE; ++normalize) {
            for (int32_t alloc = LAPROX_ALLOC_MODEL; alloc <= LAPROX_ALLOC_HEAD; ++alloc) {
                for (int rep = 0; rep < 12; ++rep) {
                    plan_case c;

                    const bool uneven = below(2) == 0;
                    c.n_head_kv.resize(1 + below(5));
                    for (uint32_t & n : c.n_head_kv) {
                        n = uneven ? 1 + below(4) : 2;
                    }
                    c.n_cand = rep == 0 ? 0 : rep == 1 ? 1
                            : rep == 2                 ? 600
                                                       : 1 + below(60);

                    // 0: few integers, 1: spread over magnitudes, 2: all the same; signs where no sum divides
                    const uint32_t kind  = below(3);
                    const bool     minus = normalize != LAPROX_NORMALIZE_LAYER_SUM && below(2) == 0;
                    const float    same  = (float) below(3);
                    c.scores.resize((size_t) c.n_head() * c.n_cand);
                    for (float & x : c.scores) {
                        x = kind == 0 ? (float) below(4) : kind == 1 ? std::ldexp((float) (1 + below(1 << 24)), -(int) below(40))
                                                                     : same;
                        x = minus && below(2) == 0 ? -x : x;
                    }
                    if (normalize == LAPROX_NORMALIZE_RESIDUAL) {
                        for (size_t il = 0; il < c.n_head_kv.size(); ++il) {
                            c.residual.push_back(kind == 0 ? (float) (1 << below(3)) : 0.1f * (1 + below(1000)));
                        }
                    }

                    const uint64_t n_all  = c.scores.size();
                    const uint32_t n_sink = below(4) == 0 ? 100 : below(5);
                    for (uint64_t n_keep : { (uint64_t) 0, std::min<uint64_t>(n_all, 1), std::min<uint64_t>(n_all, c.n_head() + 1),
                                 n_all / 20, n_all / 3, n_all - n_all / 10, n_all }) {
                        c.params = make_params(pool.pool, pool.size, 0.3f, normalize, alloc, n_sink, n_keep);

                        const plan_result got  = run(c);
                        const plan_result want = plan_naive(c);

                        CHECK(got.status == LAPROX_OK, "%s", got.error.c_str());
                        CHECK(got.n_kept == want.n_kept && got.pos == want.pos,
                                "pool %d size %u normalize %d alloc %d sinks %u keep %llu of %llu, kind %u, %u candidates", pool.pool, pool.size,
                                normalize, alloc, n_sink, (unsigned long long) n_keep, (unsigned long long) n_all, kind, c.n_cand);
                        n_case++;
                    }
                }
            }
        }
    }
    printf("brute force: %d cases\n", n_case);
}

// expected by hand, so that a rule misread by the plan and by the brute force alike does not pass
static void test_by_hand() {
    plan_case c;

    const auto expect = [&](const char * name, std::vector<uint32_t> n_kept, std::vector<llama_pos> pos) {
        const plan_result got = run(c);
        CHECK(got.status == LAPROX_OK && got.n_kept == n_kept && got.pos == pos, "%s: %s", name, got.error.c_str());
    };

    c.n_head_kv = { 2, 1 };
    c.n_cand    = 4;

    c.scores = { 1, 5, 1, 1, 1, 1, 5, 1, 5, 1, 1, 1 };
    c.params = make_params(LAPROX_POOL_NONE, 0, 0, LAPROX_NORMALIZE_NONE, LAPROX_ALLOC_MODEL, 0, 5);
    expect("ties go to the lower head and position", { 3, 1, 1 }, { 0, 1, 2, 2, 0 });

    c.params.n_sink = 1;
    expect("a sink in every head, inside n_keep", { 2, 2, 1 }, { 0, 1, 0, 2, 0 });

    c.params.n_sink = 2;
    c.params.n_keep = 4;
    expect("short of sinks: position 0 everywhere first", { 2, 1, 1 }, { 0, 1, 0, 0 });

    c.params = make_params(LAPROX_POOL_NONE, 0, 0, LAPROX_NORMALIZE_NONE, LAPROX_ALLOC_LAYER, 0, 4);
    // due 8/3 and 4/3: the larger remainder is layer 0's
    expect("layer shares follow the number of KV heads", { 2, 1, 1 }, { 0, 1, 2, 0 });

    c.params.alloc = LAPROX_ALLOC_HEAD;
    expect("the remainder goes to the lower head", { 2, 1, 1 }, { 0, 1, 2, 0 });

    c.params   = make_params(LAPROX_POOL_NONE, 0, 0, LAPROX_NORMALIZE_RESIDUAL, LAPROX_ALLOC_MODEL, 0, 2);
    c.residual = { 10, 1 };
    expect("residual divides the layer", { 0, 0, 2 }, { 0, 1 });

    // layer sums 16 and 8: 5/16 < 5/8
    c.params.normalize = LAPROX_NORMALIZE_LAYER_SUM;
    expect("layer sum", { 1, 0, 1 }, { 1, 0 });

    c.residual  = {};
    c.n_head_kv = { 1 };
    c.n_cand    = 6;

    c.scores = { 0, 0, 10, 0, 0, 4 };
    c.params = make_params(LAPROX_POOL_REACH, 1, 0.5f, LAPROX_NORMALIZE_NONE, LAPROX_ALLOC_MODEL, 0, 3);
    // 0 5 10 5 2 4
    expect("reach lifts neighbours, keeps the peak", { 3 }, { 1, 2, 3 });
    c.params.pool_decay = 0.3f;
    // 0 3 10 3 1.2 4
    expect("reach below another peak", { 3 }, { 1, 2, 5 });

    c.scores = { 6, 0, 0, 3, 3, 3 };
    c.params = make_params(LAPROX_POOL_AVG, 3, 0, LAPROX_NORMALIZE_NONE, LAPROX_ALLOC_MODEL, 0, 3);
    // 2 2 1 2 3 2: the divisor is 3 at the border too
    expect("average pads with zeros", { 3 }, { 0, 1, 4 });

    c.scores = { 0, 0, 1, 0, 0, 2 };
    c.params = make_params(LAPROX_POOL_MAX, 3, 0, LAPROX_NORMALIZE_NONE, LAPROX_ALLOC_MODEL, 0, 3);
    // 0 1 1 1 2 2
    expect("maximum", { 3 }, { 1, 4, 5 });

    // head 0: mean 2, std 2; head 1: mean 20, std sqrt(300) = 17.3: z = 1 -1 0, 1.15 -.58 -.58
    c.n_head_kv = { 2 };
    c.n_cand    = 3;
    c.scores    = { 4, 0, 2, 40, 10, 10 };
    c.params    = make_params(LAPROX_POOL_NONE, 0, 0, LAPROX_NORMALIZE_ZSCORE, LAPROX_ALLOC_MODEL, 0, 3);
    expect("zscore compares inside the head", { 2, 1 }, { 0, 2, 0 });

    c.scores = { 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, 0.0f };
    c.params = make_params(LAPROX_POOL_NONE, 0, 0, LAPROX_NORMALIZE_NONE, LAPROX_ALLOC_MODEL, 0, 4);
    expect("the sign of zero is no rank", { 3, 1 }, { 0, 1, 2, 0 });
}

static void test_refused() {
    const plan_case good = [] {
        plan_case c;
        c.n_head_kv = { 2, 1 };
        c.n_cand    = 4;
        c.scores.assign(12, 1.0f);
        c.residual = { 1.0f, 1.0f };
        c.params   = make_params(LAPROX_POOL_REACH, 12, 0.3f, LAPROX_NORMALIZE_RESIDUAL, LAPROX_ALLOC_MODEL, 4, 6);
        return c;
    }();
    CHECK(run(good).status == LAPROX_OK, "the case that the others spoil");

    const auto refuse = [&](const char * name, void (*spoil)(plan_case &)) {
        plan_case c = good;
        spoil(c);
        const plan_result r = run(c);
        CHECK(r.status == LAPROX_E_ARG, "%s: status %d", name, r.status);
    };

    refuse("n_keep", [](plan_case & c) { c.params.n_keep = 13; });
    refuse("n_keep, huge", [](plan_case & c) { c.params.n_keep = UINT64_MAX; });
    refuse("NaN", [](plan_case & c) { c.scores[7] = std::numeric_limits<float>::quiet_NaN(); });
    refuse("infinity", [](plan_case & c) { c.scores[11] = std::numeric_limits<float>::infinity(); });
    refuse("minus infinity", [](plan_case & c) { c.scores[0] = -std::numeric_limits<float>::infinity(); });
    refuse("NaN under a sink", [](plan_case & c) { c.scores[0] = std::numeric_limits<float>::quiet_NaN(); });
    refuse("NaN, nothing kept", [](plan_case & c) { c.scores[7] = std::numeric_limits<float>::quiet_NaN(); c.params.n_keep = 0; });
    refuse("no heads", [](plan_case & c) { c.n_head_kv = { 3, 0 }; });
    refuse("no layers", [](plan_case & c) { c.n_head_kv = {}; c.params.n_keep = 0; });
    refuse("pool", [](plan_case & c) { c.params.pool = 4; });
    refuse("pool, negative", [](plan_case & c) { c.params.pool = -1; });
    refuse("decay", [](plan_case & c) { c.params.pool_decay = 1.5f; });
    refuse("decay, NaN", [](plan_case & c) { c.params.pool_decay = std::numeric_limits<float>::quiet_NaN(); });
    refuse("even average", [](plan_case & c) { c.params.pool = LAPROX_POOL_AVG; c.params.pool_size = 6; });
    refuse("huge average", [](plan_case & c) { c.params.pool = LAPROX_POOL_AVG; c.params.pool_size = 1025; });
    refuse("kernel of nothing", [](plan_case & c) { c.params.pool = LAPROX_POOL_MAX; c.params.pool_size = 0; });
    refuse("normalize", [](plan_case & c) { c.params.normalize = 4; });
    refuse("alloc", [](plan_case & c) { c.params.alloc = 3; });
    refuse("no residual", [](plan_case & c) { c.residual = {}; });
    refuse("residual 0", [](plan_case & c) { c.residual[1] = 0.0f; });
    refuse("residual, NaN", [](plan_case & c) { c.residual[0] = std::numeric_limits<float>::quiet_NaN(); });
    refuse("overflow", [](plan_case & c) { c.residual[0] = 1e-30f; c.scores[3] = 1e30f; });
    refuse("negative layer", [](plan_case & c) { c.params.pool = LAPROX_POOL_NONE; c.params.normalize = LAPROX_NORMALIZE_LAYER_SUM; c.scores[2] = -50.0f; });
    refuse("layer sum 0", [](plan_case & c) { c.params.pool = LAPROX_POOL_NONE; c.params.normalize = LAPROX_NORMALIZE_LAYER_SUM; c.scores[2] = -7.0f; });
}

static double time_ms(const plan_case & c) {
    const auto        t0 = std::chrono::steady_clock::now();
    const plan_result r  = run(c);
    const auto        t1 = std::chrono::steady_clock::now();
    CHECK(r.status == LAPROX_OK, "%s", r.error.c_str());
    CHECK(std::accumulate(r.n_kept.begin(), r.n_kept.end(), (uint64_t) 0) == c.params.n_keep, "kept total");
    return std::chrono::duration<double, std::milli>(t1 - t0).count();
}

// an 8B model at 32K: 32 layers of 8 KV heads
static void test_speed() {
    plan_case c;
    c.n_head_kv.assign(32, 8);
    c.n_cand = 32768;
    c.scores.resize((size_t) c.n_head() * c.n_cand);

    // products of powers: a long tail, like attention
    std::mt19937 rng(2);
    for (float & x : c.scores) {
        const float u = (float) (rng() >> 8) * 0x1p-24f;
        x             = u * u * u * u * u * u;
    }
    for (int il = 0; il < 32; ++il) {
        c.residual.push_back(1.0f + (float) il);
    }

    const uint64_t n_keep = (uint64_t) c.n_head() * 1606; // 5 % of 32768 less the window

    struct {
        const char *       name;
        laprox_plan_params params;
    } rows[] = {
        { "default", make_params(LAPROX_POOL_REACH, 12, 0.3f, LAPROX_NORMALIZE_RESIDUAL,  LAPROX_ALLOC_MODEL, 4, n_keep) },
        { "paper",   make_params(LAPROX_POOL_AVG,   7,  0.0f, LAPROX_NORMALIZE_LAYER_SUM, LAPROX_ALLOC_MODEL, 0, n_keep) },
        { "zscore",  make_params(LAPROX_POOL_MAX,   7,  0.0f, LAPROX_NORMALIZE_ZSCORE,    LAPROX_ALLOC_HEAD,  4, n_keep) },
    };
    for (const auto & row : rows) {
        c.params = row.params;

        double best = std::numeric_limits<double>::max();
        for (int rep = 0; rep < 3; ++rep) {
            best = std::min(best, time_ms(c));
        }
        printf("32 layers x 8 heads x 32768 positions, %-7s: %.0f ms\n", row.name, best);
        CHECK(best < 2000.0, "%s took %.0f ms", row.name, best);
    }
}

int main() {
    test_by_hand();
    test_brute_force();
    test_refused();
    test_speed();

    printf("%s\n", n_fail == 0 ? "OK" : "FAIL");

    return n_fail == 0 ? 0 : 1;
}
