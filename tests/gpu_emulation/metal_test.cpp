// GGML_OP_LAPROX_SCORE and GGML_OP_LAPROX_ATTN as the encoder runs them, on the emulated device, against float64
//
//     metal_test score|attn <first seed> <number of cases>
//     metal_test refusals
//
// The first seeds, from 1 on, have the shapes of shapes.h; those of the others are drawn.

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "laprox-metal.h"
#include "metal_device.h"
#include "shapes.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

using emulator::schedule;

// what the encoder needs of ggml
void ggml_abort(const char * file, int line, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, fmt, args);
    va_end(args);
    _Exit(4);
}

static std::mt19937 rng;

static int uniform(int a, int b) {
    return std::uniform_int_distribution<int>(a, b)(rng);
}

static double normal() {
    return std::normal_distribution<double>()(rng);
}

static bool chance(double p) {
    return std::bernoulli_distribution(p)(rng);
}

template<typename T>
static T pick(std::initializer_list<T> of) {
    return of.begin()[uniform(0, (int) of.size() - 1)];
}

//
// tensors: in buffers of their own, of their exact size, with what no value is in full of NaN
//

struct tensor : ggml_tensor {
    std::unique_ptr<char, decltype(&free)> memory { nullptr, free };
    ggml_metal_buffer                      metal_buffer;
    ggml_backend_buffer                    backend_buffer;
    std::unique_ptr<ggml_tensor>           base; // of a view

    char * at(int64_t i1, int64_t i2 = 0) { return (char *) data + i1 * nb[1] + i2 * nb[2]; }
};

static size_t row_bytes(ggml_type type, int64_t n) {
    switch (type) {
        case GGML_TYPE_F32: return 4 * n;
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: return 2 * n;
        case GGML_TYPE_Q8_0: return n / 32 * 34;
        case GGML_TYPE_Q4_0: return n / 32 * 18;
        case GGML_TYPE_I32: return 4 * n;
        default: abort();
    }
}

static size_t item_bytes(ggml_type type) {
    return type == GGML_TYPE_Q8_0 ? 34 : type == GGML_TYPE_Q4_0 ? 18
                                                                : row_bytes(type, 1);
}

// the strides of dimensions 1 and 2 come from the caller; extra bytes may follow; n_bytes: less than the shape, if not 0
static std::unique_ptr<tensor> make_tensor(
        ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, size_t nb1, size_t nb2, size_t extra = 0, size_t offset = 0, size_t n_bytes = 0) {
    std::unique_ptr<tensor> t(new tensor());

    const size_t size = offset + (n_bytes ? n_bytes : (ne1 - 1) * nb1 + (ne2 - 1) * nb2 + row_bytes(type, ne0)) + extra;

    t->memory.reset((char *) aligned_alloc(32, (size + 31) / 32 * 32));
    if (size % 32 != 0) {
        // malloc aligns to 16, which is all that loads need, and ends at the last byte
        t->memory.reset((char *) malloc(size));
    }
    memset(t->memory.get(), 0xFF, size);
    t->metal_buffer.base      = t->memory.get();
    t->backend_buffer         = {};
    t->backend_buffer.context = &t->metal_buffer;

    t->type  = type;
    t->ne[0] = ne0;
    t->ne[1] = ne1;
    t->ne[2] = ne2;
    t->ne[3] = 1;
    t->nb[0] = item_bytes(type);
    t->nb[1] = nb1;
    t->nb[2] = nb2;
    t->nb[3] = nb2 * ne2;
    t->data  = t->memory.get() + offset;
    if (offset) {
        t->base.reset(new ggml_tensor());
        t->base->buffer = &t->backend_buffer;
        t->view_src     = t->base.get();
        t->view_offs    = offset;
    } else {
        t->buffer = &t->backend_buffer;
    }
    return t;
}

static uint16_t to_half(double x) { // exact for what is representable
    if (x == 0.0) {
        return 0;
    }
    if (std::isinf(x)) {
        return x < 0 ? 0xFC00 : 0x7C00;
    }
    const int    e = std::ilogb(x);
    const double f = std::fabs(x) / std::ldexp(1.0, e) - 1.0;
    if (e < -14 || e > 15 || f * 1024 != std::floor(f * 1024)) {
        abort();
    }
    return (x < 0 ? 0x8000 : 0) | (e + 15) << 10 | (int) (f * 1024);
}

// writes a random row and returns its values
static std::vector<double> random_row(ggml_type type, char * row, int64_t n) {
    std::vector<double> res(n);
    if (type == GGML_TYPE_F32) {
        for (int64_t i = 0; i < n; ++i) {
            const float x = (float) normal();
            memcpy(row + 4 * i, &x, 4);
            res[i] = x;
        }
    } else if (type == GGML_TYPE_F16) {
        for (int64_t i = 0; i < n; ++i) {
            res[i]           = std::min(2047.0, std::max(-2047.0, std::round(normal() * 512))) / 512;
            const uint16_t x = to_half(res[i]);
            memcpy(row + 2 * i, &x, 2);
        }
    } else if (type == GGML_TYPE_BF16) {
        for (int64_t i = 0; i < n; ++i) {
            res[i]        = std::min(255.0, std::max(-255.0, std::round(normal() * 64))) / 64;
            const float x = (float) res[i];
            memcpy(row + 2 * i, (const char *) &x + 2, 2);
        }
    } else {
        const bool q8 = type == GGML_TYPE_Q8_0;
        for (int64_t ib = 0; ib < n / 32; ++ib, row += item_bytes(type)) {
            const double   d = (q8 ? 1 : 16) * uniform(16, 47) / 2048.0 * (chance(0.1) ? -1 : 1);
            const uint16_t x = to_half(d);
            memcpy(row, &x, 2);
            for (int j = 0; j < (q8 ? 32 : 16); ++j) {
                if (q8) {
                    const int8_t q   = (int8_t) uniform(-127, 127);
                    row[2 + j]       = q;
                    res[32 * ib + j] = d * q;
                } else {
                    const int lo = uniform(0, 15), hi = uniform(0, 15);
                    row[2 + j]            = (char) (lo | hi << 4);
                    res[32 * ib + j]      = d * (lo - 8);
                    res[32 * ib + j + 16] = d * (hi - 8);
                }
            }
        }
    }
    return res;
}

static void set_mask(tensor & m, int64_t i, int64_t t, double x) {
    if (m.type == GGML_TYPE_F16) {
        const uint16_t y = to_half(x);
        memcpy(m.at(t) + 2 * i, &y, 2);
    } else {
        const float y = (float) x;
        memcpy(m.at(t) + 4 * i, &y, 4);
    }
}

// -INF, 0 and finite values of [n, w]; n_visible: columns that any query may see
static std::vector<double> random_mask(tensor & m, int n, int w, int n_visible) {
    const int  kind  = uniform(0, 3); // nothing hidden, causal, random, whole queries
    const bool bias  = chance(0.3);
    const bool holes = chance(0.3); // columns that no query sees

    std::vector<double> res((size_t) n * w, 0.0);
    std::vector<bool>   hole(n);
    for (int i = 0; i < n; ++i) {
        hole[i] = i >= n_visible || (holes && chance(0.2));
    }
    for (int t = 0; t < w; ++t) {
        const bool blind = kind == 3 && chance(0.3);
        for (int i = 0; i < n; ++i) {
            double x = bias && chance(0.5) ? uniform(-24, 8) / 8.0 : 0.0;
            if (hole[i] || blind || (kind == 1 && i > n_visible - w + t) || (kind == 2 && chance(0.4))) {
                x = -INFINITY;
            }
            res[(size_t) t * n + i] = x;
            set_mask(m, i, t, x);
        }
    }
    return res;
}

//
// rows of K or V, of [d, n, n_head_kv] or [d, n]
//

static ggml_type random_type(int d) {
    return d % 32 == 0 ? pick({ GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 })
                       : pick({ GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 });
}

// unit of strides and offsets: what loads of 4 elements need, and whole items
static size_t stride_unit(ggml_type type) {
    return type == GGML_TYPE_F32 ? 16 : type == GGML_TYPE_F16 ? 8
                                                              : item_bytes(type);
}

struct rows {
    std::unique_ptr<tensor> t;
    std::vector<double>     values; // NaN where the row is never seen
};

// seen[i2*n + i1]; the memory ends behind the last row that is seen
static rows random_rows(ggml_type type, int d, int n, int n2, const std::vector<bool> & seen) {
    const size_t unit  = stride_unit(type);
    const size_t row   = row_bytes(type, d) + unit * (chance(0.5) ? 0 : uniform(1, 3));
    // heads behind each other, or rows behind each other as in the cache
    const bool   inner = chance(0.5);
    const size_t nb1   = inner ? row * n2 : row;
    const size_t nb2   = inner ? row : row * n;

    size_t n_bytes = row_bytes(type, d);
    for (int i2 = 0; i2 < n2; ++i2) {
        for (int i1 = 0; i1 < n; ++i1) {
            if (seen[(size_t) i2 * n + i1]) {
                n_bytes = std::max(n_bytes, i1 * nb1 + i2 * nb2 + row_bytes(type, d));
            }
        }
    }
    rows res;
    res.t = make_tensor(type, d, n, n2, nb1, nb2, 0, chance(0.3) ? unit * uniform(1, 3) : 0, n_bytes);
    for (int i2 = 0; i2 < n2; ++i2) {
        for (int i1 = 0; i1 < n; ++i1) {
            std::vector<double> x(d, NAN);
            if (seen[(size_t) i2 * n + i1]) {
                x = random_row(type, res.t->at(i1, i2), d);
            }
            res.values.insert(res.values.end(), x.begin(), x.end());
        }
    }
    return res;
}

static std::unique_ptr<tensor> make_result(ggml_op op, int64_t ne0, int64_t ne1, int64_t ne2, std::initializer_list<ggml_tensor *> src, float scale, float softcap) {
    std::unique_ptr<tensor> res = make_tensor(GGML_TYPE_F32, ne0, ne1, ne2, 4 * ne0, 4 * ne0 * ne1);

    res->op = op;
    std::copy(src.begin(), src.end(), res->src);
    ggml_set_op_params_f32(res.get(), 0, scale);
    ggml_set_op_params_f32(res.get(), 1, softcap);
    return res;
}

// runs the op in every schedule; all results are the same to the bit
static std::vector<float> compute(const tensor & op, int max_threads, uint32_t seed, std::string & error) {
    std::vector<float> first;
    for (const schedule s : { schedule::forward, schedule::backward, schedule::shuffled }) {
        std::unique_ptr<tensor> dst = make_tensor(GGML_TYPE_F32, op.ne[0], op.ne[1], op.ne[2], op.nb[1], op.nb[2], ggml_metal_laprox_extra(&op));

        dst->op = op.op;
        memcpy(dst->src, op.src, sizeof(op.src));
        memcpy(dst->op_params, op.op_params, sizeof(op.op_params));

        ggml_metal_library lib = { max_threads };
        ggml_metal_encoder enc = { s, seed, {}, {} };
        ggml_metal_op_laprox(&enc, &lib, dst.get(), [&enc] { enc.flush(); });
        enc.flush();

        const float *            x = (const float *) dst->data;
        const std::vector<float> res(x, x + op.ne[0] * op.ne[1] * op.ne[2]);
        if (first.empty()) {
            first = res;
        } else if (memcmp(first.data(), res.data(), res.size() * sizeof(float)) != 0) {
            error = "the result depends on the order of threads";
        }
    }
    return first;
}

static double worst = 0.0; // error relative to what is allowed

static void compare(const std::vector<float> & got, const std::vector<double> & want, double absolute, std::string & error) {
    double scale = 0.0;
    for (const double x : want) {
        scale = std::max(scale, std::fabs(x));
    }
    for (size_t i = 0; i < want.size(); ++i) {
        const double allowed = 2e-5 * std::fabs(want[i]) + absolute * scale;
        const double off     = std::fabs(got[i] - want[i]);
        if (!(off <= allowed)) {
            char text[128];
            snprintf(text, sizeof(text), "element %zu of %zu is %.9g, expected %.9g", i, want.size(), got[i], want[i]);
            error = text;
            return;
        }
        worst = std::max(worst, off == 0.0 ? 0.0 : off / allowed);
    }
}

static std::string describe(const char * fmt, ...) GGML_ATTRIBUTE_FORMAT(1, 2);

static std::string describe(const char * fmt, ...) {
    char    text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    return text;
}

static const std::initializer_list<int> widths = { 64, 80, 96, 112, 128, 192, 256 };

// multiply-adds of a case that is drawn, at most
static constexpr int64_t max_work = 1500000;

static shapes::score random_score_shape() {
    shapes::score s = {};

    s.d_k   = pick(widths);
    s.d_v   = chance(0.8) ? s.d_k : pick({ 64, 96, 128 });
    s.n_gqa = chance(0.3) ? 1 : uniform(1, 16);
    s.w     = pick({ 1, 2, 7, 8, 9, 16, 17, 32, 33 });
    s.n_kv  = pick({ 1, 2, 15, 16, 31, 32, 33, 63, 65, 100, 127, 255, 256, 257, 300, 520 });
    while ((int64_t) s.n_gqa * s.w * s.n_kv * s.d_k > max_work) {
        if (s.w > 9) {
            s.w -= 8;
        } else if (s.n_gqa > 4) {
            s.n_gqa /= 2;
        } else {
            s.n_kv = s.n_kv * 2 / 3;
        }
    }
    s.type_k = random_type(s.d_k);
    s.type_v = random_type(s.d_v);
    s.what   = pick({ reference::MAX, reference::L2, reference::SUM });
    s.group  = chance(0.3);
    s.d_v    = chance(0.7) ? s.d_v : 0;

    return s;
}

// [n_head], one more logit per head; nullptr: none
static std::unique_ptr<tensor> random_sinks(bool some, int n_head, std::vector<double> & values) {
    if (!some) {
        return nullptr;
    }
    auto res = make_tensor(GGML_TYPE_F32, n_head, 1, 1, 4 * n_head, 4 * n_head);
    for (int h = 0; h < n_head; ++h) {
        const float x = uniform(-32, 32) / 8.0f;
        memcpy((char *) res->data + 4 * h, &x, 4);
        values.push_back(x);
    }
    return res;
}

static std::string test_score(uint32_t seed, std::string & error) {
    reference::score_problem p;

    const shapes::score s = seed - 1 < shapes::SCORE.size() ? shapes::SCORE[seed - 1] : random_score_shape();

    const bool gram  = s.d_v != 0;
    const bool thin  = chance(0.15); // null vectors of G: rounding of v^T G v may be all there is of it, and below 0
    const int  n_gqa = s.n_gqa;

    p.d_k       = s.d_k;
    p.d_v       = gram ? s.d_v : 64;
    p.w         = s.w;
    p.n_kv      = s.n_kv;
    p.n_head_kv = std::clamp<int>(max_work / ((int64_t) n_gqa * p.w * p.n_kv * p.d_k), 1, uniform(1, 3));
    p.n_head    = p.n_head_kv * n_gqa;
    p.scale     = (float) (pick({ 0.5, 1.0, 2.0 }) / std::sqrt(p.d_k));
    p.softcap   = seed % 3 == 0 ? pick({ 2.0, 30.0 }) : 0.0;
    p.what      = s.what;
    p.group     = s.group;

    // q: heads and queries in either order, also elements apart
    const size_t nbq0 = chance(0.2) ? 8 : 4;
    const size_t rowq = nbq0 * p.d_k + 4 * uniform(0, 3);
    const bool   perm = chance(0.5);

    auto q   = make_tensor(GGML_TYPE_F32, p.d_k, p.w, p.n_head, perm ? rowq * p.n_head : rowq, perm ? rowq : rowq * p.w, nbq0 * p.d_k);
    q->nb[0] = nbq0;
    for (int h = 0; h < p.n_head; ++h) {
        for (int t = 0; t < p.w; ++t) {
            for (int a = 0; a < p.d_k; ++a) {
                const float x = (float) normal();
                memcpy(q->at(t, h) + a * nbq0, &x, 4);
                p.q.push_back(x);
            }
        }
    }

    const int n_visible = chance(0.5) ? p.n_kv : uniform(1, p.n_kv);

    const ggml_type type_m = seed % 2 ? GGML_TYPE_F32 : GGML_TYPE_F16;
    const size_t    nbm1   = row_bytes(type_m, p.n_kv + uniform(0, 3));

    auto mask = make_tensor(type_m, p.n_kv, p.w, 1, nbm1, nbm1 * p.w);
    p.mask    = random_mask(*mask, p.n_kv, p.w, n_visible);

    std::vector<bool> seen((size_t) p.n_kv * p.n_head_kv, false);
    for (size_t i = 0; i < seen.size(); ++i) {
        for (int t = 0; t < p.w; ++t) {
            seen[i] = seen[i] || p.mask[(size_t) t * p.n_kv + i % p.n_kv] != -INFINITY;
        }
    }
    rows k = random_rows(s.type_k, p.d_k, p.n_kv, p.n_head_kv, seen);
    p.k    = k.values;

    rows                    v;
    std::unique_ptr<tensor> g;
    if (gram) {
        v   = random_rows(s.type_v, p.d_v, p.n_kv, p.n_head_kv, seen);
        p.v = v.values;

        const size_t nbg1 = 4 * (p.d_v + uniform(0, 2));

        g = make_tensor(GGML_TYPE_F32, p.d_v, p.d_v, p.n_head, nbg1, nbg1 * p.d_v);
        p.gram.resize((size_t) p.d_v * p.d_v * p.n_head);
        for (int h = 0; h < p.n_head; ++h) {
            // G = W W^T
            const int           n_w = thin ? uniform(0, 8) : uniform(16, 48);
            std::vector<double> w((size_t) p.d_v * n_w);
            for (double & x : w) {
                x = normal();
            }
            for (int a = 0; a < p.d_v; ++a) {
                for (int b = 0; b <= a; ++b) {
                    double x = 0.0;
                    for (int c = 0; c < n_w; ++c) {
                        x += w[a * n_w + c] * w[b * n_w + c];
                    }
                    const float y = (float) x;
                    memcpy(g->at(a, h) + 4 * b, &y, 4);
                    memcpy(g->at(b, h) + 4 * a, &y, 4);
                    p.gram[((size_t) h * p.d_v + a) * p.d_v + b] = y;
                    p.gram[((size_t) h * p.d_v + b) * p.d_v + a] = y;
                }
            }
        }
    }

    const auto sinks = random_sinks(seed % 3 == 1, p.n_head, p.sinks);

    auto op = make_result(GGML_OP_LAPROX_SCORE, p.n_kv, p.n_head_kv, 1, { q.get(), k.t.get(), v.t.get(), mask.get(), g.get(), sinks.get() }, (float) p.scale, (float) p.softcap);
    ggml_set_op_params_i32(op.get(), 2, p.what);
    ggml_set_op_params_i32(op.get(), 3, p.group ? GGML_LAPROX_SCORE_GQA_ATTENTION : GGML_LAPROX_SCORE_GQA_MEAN);

    const int max_threads = pick({ 1024, 256, 128, 32 });

    std::string text = describe("d=%d,%d n_head_kv=%d n_gqa=%d w=%d n_kv=%d types=%d,%d mask=%d gram=%d scale=%g softcap=%g stat=%d group=%d sinks=%d threads=%d",
            p.d_k, p.d_v, p.n_head_kv, n_gqa, p.w, p.n_kv, k.t->type, gram ? v.t->type : -1, type_m, gram, p.scale, p.softcap, p.what, p.group, sinks != nullptr, max_threads);

    const bool supported = !gram || p.d_k > 128 || p.d_v <= 128;
    if (ggml_metal_laprox_supports_op(op.get(), true) != supported) {
        error = "supports_op";
    } else if (supported) {
        const std::vector<float> got = compute(*op, max_threads, seed, error);
        if (error.empty()) {
            compare(got, reference::score(p), gram && thin ? 2e-3 : 1e-6, error);
        }
    }
    return text;
}

static shapes::attn random_attn_shape() {
    shapes::attn s = {};

    s.d_k      = pick(widths);
    s.d_v      = chance(0.8) ? s.d_k : pick(widths);
    s.n_gqa    = chance(0.3) ? 1 : uniform(1, 16);
    s.n_tokens = pick({ 1, 1, 1, 2, 3, 8 });
    s.n_mask   = pick({ 1, 2, 31, 32, 33, 100, 127, 128, 129, 255, 257, 300, 400 });
    while ((int64_t) s.n_gqa * s.n_tokens * s.n_mask * s.d_k > max_work) {
        s.n_tokens > 1 ? s.n_tokens /= 2 : s.n_gqa /= 2;
    }
    s.type_k = random_type(s.d_k);
    s.type_v = random_type(s.d_v);

    return s;
}

static std::string test_attn(uint32_t seed, std::string & error) {
    reference::attn_problem p;

    const shapes::attn s = seed - 1 < shapes::ATTN.size() ? shapes::ATTN[seed - 1] : random_attn_shape();

    const int n_gqa = s.n_gqa;

    p.d_k       = s.d_k;
    p.d_v       = s.d_v;
    p.n_tokens  = s.n_tokens;
    p.n_mask    = s.n_mask;
    p.n_head_kv = std::clamp<int>(max_work / ((int64_t) n_gqa * p.n_tokens * p.n_mask * p.d_k), 1, uniform(1, 4));
    p.n_head    = p.n_head_kv * n_gqa;
    p.scale     = (float) (pick({ 0.5, 1.0, 2.0 }) / std::sqrt(p.d_k));
    p.softcap   = seed % 3 == 0 ? pick({ 2.0, 30.0 }) : 0.0;

    const size_t rowq = 4 * (p.d_k + uniform(0, 3));
    const bool   perm = chance(0.5);

    auto q = make_tensor(GGML_TYPE_F32, p.d_k, p.n_head, p.n_tokens, perm ? rowq * p.n_tokens : rowq, perm ? rowq : rowq * p.n_head);
    for (int t = 0; t < p.n_tokens; ++t) {
        for (int h = 0; h < p.n_head; ++h) {
            const std::vector<double> x = random_row(GGML_TYPE_F32, q->at(h, t), p.d_k);
            p.q.insert(p.q.end(), x.begin(), x.end());
        }
    }

    const size_t nbm1 = 2 * (p.n_mask + uniform(0, 3));

    auto mask = make_tensor(GGML_TYPE_F16, p.n_mask, p.n_tokens, 1, nbm1, nbm1 * p.n_tokens);
    p.mask    = random_mask(*mask, p.n_mask, p.n_tokens, chance(0.5) ? p.n_mask : uniform(1, p.n_mask));

    // regions in any order, with room between them
    auto              regions = make_tensor(GGML_TYPE_I32, 2, p.n_head_kv, 1, 8, 8 * p.n_head_kv);
    int               n_rows  = uniform(0, 3);
    std::vector<bool> seen;
    p.regions.resize(2 * p.n_head_kv);
    const bool backward = chance(0.3);
    for (int j = 0; j < p.n_head_kv; ++j) {
        const int g          = backward ? p.n_head_kv - 1 - j : j;
        // now and then nothing is kept
        const int c0         = chance(0.3) ? 0 : uniform(0, p.n_mask);
        p.regions[2 * g]     = n_rows;
        p.regions[2 * g + 1] = c0;
        n_rows += p.n_mask - c0 + uniform(0, 5);
        seen.resize(n_rows, false);
        for (int i = c0; i < p.n_mask; ++i) {
            for (int t = 0; t < p.n_tokens; ++t) {
                if (p.mask[(size_t) t * p.n_mask + i] != -INFINITY) {
                    seen[p.regions[2 * g] + i - c0] = true;
                }
            }
        }
    }
    seen.resize(++n_rows, false);
    memcpy(regions->data, p.regions.data(), 8 * p.n_head_kv);

    rows k = random_rows(s.type_k, p.d_k, n_rows, 1, seen);
    rows v = random_rows(s.type_v, p.d_v, n_rows, 1, seen);
    p.k    = k.values;
    p.v    = v.values;

    const auto sinks = random_sinks(seed % 3 == 1, p.n_head, p.sinks);

    auto op = make_result(GGML_OP_LAPROX_ATTN, p.d_v, p.n_head, p.n_tokens, { q.get(), k.t.get(), v.t.get(), mask.get(), regions.get(), sinks.get() }, (float) p.scale, (float) p.softcap);

    const int max_threads = pick({ 1024, 128, 64 });

    std::string text = describe("d=%d,%d n_head_kv=%d n_gqa=%d n_tokens=%d n_mask=%d types=%d,%d scale=%g softcap=%g sinks=%d threads=%d",
            p.d_k, p.d_v, p.n_head_kv, n_gqa, p.n_tokens, p.n_mask, k.t->type, v.t->type, p.scale, p.softcap, sinks != nullptr, max_threads);

    if (!ggml_metal_laprox_supports_op(op.get(), true)) {
        error = "supports_op";
    } else {
        const std::vector<float> got = compute(*op, max_threads, seed, error);
        if (error.empty()) {
            compare(got, reference::attn(p), 1e-6, error);
        }
    }
    return text;
}

//
// what must be refused: one thing wrong at a time
//

static int test_refusals() {
    int n_failed = 0;

    const auto check = [&n_failed](const char * what, const tensor & op, bool expected, bool has_simdgroup_mm = true) {
        if (ggml_metal_laprox_supports_op(&op, has_simdgroup_mm) != expected) {
            printf("FAILED refusals: %s\n", what);
            ++n_failed;
        }
    };

    struct wrong {
        const char * what;

        std::function<void(tensor & q, tensor & k, tensor & v, tensor & mask, tensor & last)> f;
    };

    const auto none = [](tensor &, tensor &, tensor &, tensor &, tensor &) {};

    const std::vector<wrong> both = {
        { "width of K",                 [](tensor & q, tensor & k, tensor &,   tensor &,   tensor &) { q.ne[0] = k.ne[0] = 72; }   },
        { "width of V",                 [](tensor &,   tensor &,   tensor & v, tensor &,   tensor & g) { v.ne[0] = g.ne[0] = 88; } },
        { "type of K",                  [](tensor &,   tensor & k, tensor &,   tensor &,   tensor &) { k.type = GGML_TYPE_Q5_0; k.nb[0] = 22; }                           },
        { "type of V",                  [](tensor &,   tensor &,   tensor & v, tensor &,   tensor &) { v.type = GGML_TYPE_Q4_1; v.nb[0] = 20; }                           },
        { "elements of K apart",        [](tensor &,   tensor & k, tensor &,   tensor &,   tensor &) { k.nb[0] = 4; }              },
        { "elements of V apart",        [](tensor &,   tensor &,   tensor & v, tensor &,   tensor &) { v.nb[0] = 4; }              },
        { "rows of K not aligned",      [](tensor &,   tensor & k, tensor &,   tensor &,   tensor &) { k.nb[1] += 2; }             },
        { "rows of V not aligned",      [](tensor &,   tensor &,   tensor & v, tensor &,   tensor &) { v.nb[1] += 4; }             },
        { "heads of K not aligned",     [](tensor &,   tensor & k, tensor &,   tensor &,   tensor &) { k.nb[2] += 4; }             },
        { "view of K not aligned",      [](tensor &,   tensor & k, tensor &,   tensor &,   tensor &) { k.view_offs = 4; }          },
        { "elements of the mask apart", [](tensor &,   tensor &,   tensor &,   tensor & m, tensor &) { m.nb[0] = 4; }              },
        { "type of the mask",           [](tensor &,   tensor &,   tensor &,   tensor & m, tensor &) { m.type = GGML_TYPE_BF16; }  },
    };

    for (const ggml_op op : { GGML_OP_LAPROX_SCORE, GGML_OP_LAPROX_ATTN }) {
        const bool is_score = op == GGML_OP_LAPROX_SCORE;

        std::vector<wrong> all = both;
        all.insert(all.begin(), { "", none });
        if (is_score) {
            all.push_back({ "17 heads of a KV head", [](tensor & q, tensor &, tensor &, tensor &, tensor &) { q.ne[2] = 34; } });
            all.push_back({ "513 queries", [](tensor & q, tensor &, tensor &, tensor &, tensor &) { q.ne[1] = 513; } });
            all.push_back({ "rows of Gram apart", [](tensor &, tensor &, tensor &, tensor &, tensor & g) { g.nb[0] = 8; } });
            all.push_back({ "V wider than the tile", [](tensor &, tensor &, tensor & v, tensor &, tensor & g) { v.ne[0] = g.ne[0] = g.ne[1] = 192; } });
        } else {
            all.push_back({ "17 heads of a KV head", [](tensor & q, tensor &, tensor &, tensor &, tensor &) { q.ne[1] = 34; } });
            all.push_back({ "33 tokens", [](tensor & q, tensor &, tensor &, tensor &, tensor &) { q.ne[2] = 33; } });
            all.push_back({ "elements of q apart", [](tensor & q, tensor &, tensor &, tensor &, tensor &) { q.nb[0] = 8; } });
        }
        for (const wrong & w : all) {
            auto q    = is_score ? make_tensor(GGML_TYPE_F32, 64, 8, 4, 256, 2048) : make_tensor(GGML_TYPE_F32, 64, 4, 8, 256, 1024);
            auto k    = make_tensor(GGML_TYPE_F16, 64, 32, is_score ? 2 : 1, 128, 4096);
            auto v    = make_tensor(GGML_TYPE_F16, 64, 32, is_score ? 2 : 1, 128, 4096);
            auto mask = make_tensor(GGML_TYPE_F16, 32, 8, 1, 64, 512);
            auto last = is_score ? make_tensor(GGML_TYPE_F32, 64, 64, 4, 256, 16384) : make_tensor(GGML_TYPE_I32, 2, 2, 1, 8, 16);
            w.f(*q, *k, *v, *mask, *last);
            auto res = make_result(op, 32, 2, 1, { q.get(), k.get(), v.get(), mask.get(), last.get() }, 1.0f, 0.0f);
            check(w.what, *res, w.what[0] == '\0');
            check("no simdgroup matrices", *res, false, false);
        }
    }
    return n_failed;
}

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "refusals" && argc == 2) {
        const int n_failed = test_refusals();
        printf("refusals: %d failed\n", n_failed);
        return n_failed != 0;
    }
    if ((what != "score" && what != "attn") || argc != 4) {
        fprintf(stderr, "usage: metal_test score|attn <first seed> <number of cases>, or metal_test refusals\n");
        return 2;
    }

    const uint32_t first    = (uint32_t) strtoul(argv[2], nullptr, 10);
    const uint32_t n        = (uint32_t) strtoul(argv[3], nullptr, 10);
    int            n_failed = 0;
    for (uint32_t seed = first; seed < first + n; ++seed) {
        rng.seed(seed);
        std::string       error;
        const std::string text = what == "score" ? test_score(seed, error) : test_attn(seed, error);
        if (!error.empty()) {
            printf("FAILED %s %u: %s: %s\n", what.c_str(), seed, text.c_str(), error.c_str());
            ++n_failed;
        }
    }
    printf("%s: %u cases, %d failed, largest error %.2g of the allowed one\n", what.c_str(), n, n_failed, worst);
    return n_failed != 0;
}
