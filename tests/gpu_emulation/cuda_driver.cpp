// The CUDA kernels of both ops against float64, on the shapes of shapes.h, then on such that are drawn at random:
//
//     cuda_driver score-mma|score-simt|attn n_cases seed
//     cuda_driver refusals
//
// Every case runs in three orders of threads and blocks, which must agree to the bit. Whatever a kernel may not read is
// NaN or lies behind the end of its allocation. One line per case; exit code 1 where one is wrong.

#include "shapes.h"

#include "laprox-attn-kernel.cuh"
#include "laprox-score-kernel.cuh"
#include "laprox-supported.h"

#include <memory>
#include <random>
#include <string>

static std::mt19937 rng;

static int draw(int a, int b) {
    return std::uniform_int_distribution<int>(a, b)(rng);
}

static int pick(const std::vector<int> & v) {
    return v[draw(0, (int) v.size() - 1)];
}

// memory to the byte, aligned as CUDA promises, full of NaN
struct buffer {
    char * data;

    explicit buffer(size_t n) {
        if (posix_memalign((void **) &data, 256, n)) {
            abort();
        }
        memset(data, 0xFF, n);
    }
    ~buffer() { free(data); }
    buffer(const buffer &) = delete;

    template<class T>
    T & at(size_t offs) { return *(T *) (data + offs); }
};

//
// formats, from their definition
//

static double half_value(uint16_t bits) {
    const int    exp = bits >> 10 & 0x1F;
    const double man = bits & 0x3FF;
    const double abs = exp == 0 ? std::ldexp(man, -24) : std::ldexp(man + 1024, exp - 25);
    return bits & 0x8000 ? -abs : abs;
}

// exact: numbers that F16 holds, and so do products of two in F32; sums are what is left to round
static float draw_number(bool exact) {
    return exact ? draw(-64, 64) / 32.0f : std::normal_distribution<float>()(rng);
}

// numbers of which the larger half leaves the range of F16
static constexpr float WIDE = 0x1p16f;

static double clamp_f16(double x) {
    return std::min(std::max(x, -65504.0), 65504.0);
}

static size_t row_bytes(ggml_type type, int d) {
    switch (type) {
        case GGML_TYPE_F32: return d * 4;
        case GGML_TYPE_Q8_0: return d / 32 * 34;
        case GGML_TYPE_Q4_0: return d / 32 * 18;
        default: return d * 2;
    }
}

// a row of d elements at data -> what it holds; factor: of types that have the range of F32
static void draw_row(ggml_type type, char * data, int d, bool exact, float factor, double * values) {
    for (int a = 0; a < d; a += 32) {
        char *         block = data + row_bytes(type, a);
        const uint16_t scale = exact ? 0x2400 : (uint16_t) draw(0x2000, 0x27FF); // 2^-6, or about that
        for (int j = 0; j < 32 && a + j < d; ++j) {
            const float x = draw_number(exact) * (type == GGML_TYPE_F32 || type == GGML_TYPE_BF16 ? factor : 1.0f);
            switch (type) {
                case GGML_TYPE_F32:
                    memcpy(block + 4 * j, &x, 4);
                    values[a + j] = x;
                    break;
                case GGML_TYPE_F16: {
                    const half h = __float2half(x);
                    memcpy(block + 2 * j, &h, 2);
                    values[a + j] = half_value(h.bits);
                } break;
                case GGML_TYPE_BF16: {
                    uint32_t u;
                    memcpy(&u, &x, 4);
                    const uint16_t b = u >> 16;
                    memcpy(block + 2 * j, &b, 2);
                    values[a + j] = std::ldexp((b >> 7 & 0xFF) ? 128 + (b & 0x7F) : 0, (b >> 7 & 0xFF) - 134) * (b & 0x8000 ? -1 : 1);
                } break;
                case GGML_TYPE_Q8_0: {
                    const int8_t q = draw(-127, 127);
                    memcpy(block, &scale, 2);
                    block[2 + j]  = q;
                    values[a + j] = half_value(scale) * q;
                } break;
                case GGML_TYPE_Q4_0: {
                    const int q = draw(0, 15);
                    memcpy(block, &scale, 2);
                    char & both   = block[2 + j % 16];
                    both          = j < 16 ? q : both | q << 4;
                    values[a + j] = half_value(scale) * (q - 8);
                } break;
                default: abort();
            }
        }
    }
}

//
// results
//

static int n_wrong = 0;

// max |got - want| in units of bound*(|want| + mean |want|); 0 must be 0
static void compare(const std::string & name, const std::vector<float> & got, const std::vector<double> & want, double bound) {
    double mean = 0.0, err = 0.0, ref = 0.0, worst = 0.0;
    size_t n_zero = 0;
    for (double x : want) {
        mean += std::fabs(x) / want.size();
    }
    for (size_t i = 0; i < want.size(); ++i) {
        const double delta = std::fabs(got[i] - want[i]);
        const double here  = want[i] == 0.0 ? (got[i] == 0.0f ? 0.0 : INFINITY) : delta / (bound * (std::fabs(want[i]) + mean));
        worst              = here > worst || std::isnan(here) ? here : worst;
        n_zero += want[i] == 0.0;
        err += delta * delta;
        ref += want[i] * want[i];
        if (std::isnan(here)) {
            break;
        }
    }
    const bool ok = worst <= 1.0;
    n_wrong += !ok;
    printf("%s %s worst=%.3f nmse=%.1e zeros=%zu/%zu\n", ok ? "ok   " : "WRONG", name.c_str(), worst, ref > 0.0 ? err / ref : err, n_zero, want.size());
    fflush(stdout);
}

// in three orders
static std::vector<float> run(const std::string & name, float * dst, size_t n, const std::function<void()> & f) {
    std::vector<float> first;
    for (const emulation::order o : { emulation::order::forward, emulation::order::reverse, emulation::order::random }) {
        emulation::set_order(o, rng());
        std::fill(dst, dst + n, NAN);
        f();
        if (first.empty()) {
            first.assign(dst, dst + n);
        } else if (memcmp(first.data(), dst, n * sizeof(float)) != 0) {
            ++n_wrong;
            printf("WRONG %s: the result depends on the order of threads\n", name.c_str());
        }
    }
    return first;
}

//
// cases
//

static const std::vector<int> WIDTHS = { 64, 80, 96, 112, 128, 192, 256 };
static const std::vector<int> TYPES  = { GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };

// a type for rows of d elements
static ggml_type draw_type(int d) {
    const ggml_type type = (ggml_type) pick(TYPES);
    return d % 32 == 0 ? type : (ggml_type) (type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0 ? GGML_TYPE_F16 : type);
}

// K or V of a cache [d, n_head_kv, n_kv] with some bytes between the rows; hidden positions stay NaN
struct cache {
    std::unique_ptr<buffer> data;
    laprox_rows             rows;
    std::vector<double>     values; // [d, n_kv, n_head_kv]

    cache(ggml_type type, int d, int n_kv, int n_head_kv, bool exact, const std::vector<bool> & hidden, float factor = 1.0f) {
        const size_t nb2 = row_bytes(type, d);
        const size_t nb1 = nb2 * n_head_kv + 16 * draw(0, 2);

        data.reset(new buffer(nb1 * (n_kv - 1) + nb2 * n_head_kv));
        rows = { data->data, (int64_t) nb1, (int64_t) nb2, type };
        values.assign((size_t) d * n_kv * n_head_kv, NAN);
        for (int g = 0; g < n_head_kv; ++g) {
            for (int i = 0; i < n_kv; ++i) {
                if (!hidden[i]) {
                    draw_row(type, data->data + i * nb1 + g * nb2, d, exact, factor, &values[((size_t) g * n_kv + i) * d]);
                }
            }
        }
    }
};

// as after a prompt: causal, some hidden columns, some queries with nothing, some finite biases
static std::vector<double> draw_mask(int n, int w) {
    std::vector<double> mask((size_t) n * w, 0.0);

    const bool causal  = draw(0, 1);
    const int  n_empty = w > 1 && draw(0, 3) == 0 ? draw(0, w - 1) : -1;
    const int  n_pad   = draw(0, 1) ? draw(0, n / 3) : 0;
    const bool biased  = draw(0, 3) == 0;

    std::vector<bool> holes(n);
    for (int i = 0; i < n; ++i) {
        holes[i] = i >= n - n_pad || (causal && draw(0, 9) == 0);
    }
    for (int t = 0; t < w; ++t) {
        for (int i = 0; i < n; ++i) {
            double & m = mask[(size_t) t * n + i];
            m          = biased ? -draw(0, 40) / 16.0 : 0.0;
            if (holes[i] || t == n_empty || (causal && n - n_pad > w && i > n - n_pad - w + t)) {
                m = -INFINITY;
            }
        }
    }
    return mask;
}

static std::vector<bool> hidden_columns(const std::vector<double> & mask, int n, int w) {
    std::vector<bool> hidden(n, true);
    for (int i = 0; i < n; ++i) {
        for (int t = 0; t < w; ++t) {
            hidden[i] = hidden[i] && mask[(size_t) t * n + i] == -INFINITY;
        }
    }
    return hidden;
}

static void store_mask(buffer & data, ggml_type type, const std::vector<double> & mask, int n, int w, size_t nb1) {
    for (int t = 0; t < w; ++t) {
        for (int i = 0; i < n; ++i) {
            const float x = (float) mask[(size_t) t * n + i];
            if (type == GGML_TYPE_F16) {
                data.at<half>(t * nb1 + i * 2) = __float2half(x);
            } else {
                data.at<float>(t * nb1 + i * 4) = x;
            }
        }
    }
}

static shapes::score draw_score_shape(bool mma) {
    shapes::score s = {};

    const bool large = draw(0, 7) == 0; // several chunks, more queries than a tile holds

    s.d_k   = !mma && draw(0, 7) == 0 ? 8 * draw(8, 32) : pick(WIDTHS);
    s.d_v   = draw(0, 3) == 0 ? pick(WIDTHS) : s.d_k;
    s.n_gqa = draw(0, 2) == 0 ? 4 : draw(1, 16);
    s.w     = pick({ 1, 5, 7, 32, 32, 64 });
    s.n_kv  = pick({ 1, 2, 31, 32, 33, 63, 65, 95, 100, 128, 129 });
    if (large) {
        s.w    = std::min(512 / s.n_gqa, draw(64, 130));
        s.n_kv = draw(260, 600);
    }
    s.type_k = draw_type(s.d_k);
    s.type_v = draw_type(s.d_v);
    s.what   = (reference::stat) draw(0, 2);
    s.group  = draw(0, 2) == 0;
    s.d_v    = draw(0, 3) != 0 ? s.d_v : 0;

    return s;
}

// one more logit per head, about as large as the others or far above them; now and then none
static void draw_sinks(bool some, int n_head, buffer & data, std::vector<double> & values) {
    for (int h = 0; some && h < n_head; ++h) {
        data.at<float>(h * sizeof(float)) = draw(-32, 32) / 8.0f;
        values.push_back(data.at<float>(h * sizeof(float)));
    }
}

static void score_case(int index, bool mma) {
    reference::score_problem ref = {};
    laprox_score_params      p   = {};

    shapes::score s = index < (int) shapes::SCORE.size() ? shapes::SCORE[index] : draw_score_shape(mma);
    if (!mma && s.d_k == 80) {
        s.d_k = 8 * draw(8, 32); // a width that has no tensor core kernel
    }

    const bool exact = index % 4 != 3; // else the rounding to F16 counts
    const bool wide  = exact && (index == 4 || index == 6 || index % 16 == 14);
    const bool value = s.d_v != 0;
    const int  gqa   = s.n_gqa;

    ref.d_k       = s.d_k;
    ref.d_v       = value ? s.d_v : 64;
    ref.n_head_kv = draw(1, 2);
    ref.n_head    = ref.n_head_kv * gqa;
    ref.w         = s.w;
    ref.n_kv      = s.n_kv;
    ref.softcap   = index % 3 == 1 ? pick({ 5, 50 }) : 0;
    ref.scale     = (exact ? 0.25 : 1.0) / std::sqrt(ref.d_k) * (draw(0, 3) == 0 ? 8 : 1);
    ref.what      = s.what;
    ref.group     = s.group;
    ref.mask      = draw_mask(ref.n_kv, ref.w);

    const std::vector<bool> hidden = hidden_columns(ref.mask, ref.n_kv, ref.w);

    cache k(s.type_k, ref.d_k, ref.n_kv, ref.n_head_kv, exact, hidden, wide ? WIDE : 1.0f);
    cache v(s.type_v, ref.d_v, ref.n_kv, ref.n_head_kv, exact, hidden, wide ? WIDE : 1.0f);
    ref.k = k.values;
    ref.v = v.values;

    // [d_k, n_head, w] or [d_k, w, n_head], with a gap
    const bool   permuted = draw(0, 1);
    const size_t row      = (ref.d_k + draw(0, 3)) * sizeof(float);
    const size_t q_nb1    = permuted ? row * ref.n_head : row;
    const size_t q_nb2    = permuted ? row : row * ref.w;
    buffer       q(row * (ref.n_head * ref.w - 1) + ref.d_k * sizeof(float));
    for (int h = 0; h < ref.n_head; ++h) {
        for (int t = 0; t < ref.w; ++t) {
            for (int a = 0; a < ref.d_k; ++a) {
                const float x                              = draw_number(exact) * (wide ? WIDE : 1.0f);
                q.at<float>(t * q_nb1 + h * q_nb2 + 4 * a) = x;
                ref.q.push_back(x);
            }
        }
    }
    if (wide) { // logits as ever; the tensor cores' kernels stop at the ends of the range
        ref.scale /= WIDE * (s.type_k == GGML_TYPE_F32 || s.type_k == GGML_TYPE_BF16 ? WIDE : 1.0f);
        for (auto * x : { &ref.q, &ref.k, &ref.v }) {
            std::transform(x->begin(), x->end(), x->begin(), [mma](double y) { return mma ? clamp_f16(y) : y; });
        }
    }

    const ggml_type mask_type = index % 2 ? GGML_TYPE_F16 : GGML_TYPE_F32;
    const size_t    mask_nb1  = (ref.n_kv + draw(0, 1)) * (mask_type == GGML_TYPE_F16 ? 2 : 4);
    buffer          mask(mask_nb1 * ref.w);
    store_mask(mask, mask_type, ref.mask, ref.n_kv, ref.w, mask_nb1);

    // G = W W^T of a small rank; small integers, so that F16 holds every sum; one whose scale no normal number inverts
    const int    d       = ref.d_v;
    const size_t g_nb1   = (d + draw(0, 2)) * sizeof(float);
    const size_t g_nb2   = g_nb1 * (d + draw(0, 1));
    const float  g_scale = index == 8 ? 0x1p-136f : exact ? std::ldexp(1.0f, draw(-30, 30))
                                                          : std::exp(std::normal_distribution<float>(0, 10)(rng));
    buffer       gram(g_nb2 * ref.n_head);
    for (int h = 0; h < ref.n_head && value; ++h) {
        const int          n = 16;
        std::vector<float> W((size_t) d * n);
        for (float & x : W) {
            x = exact ? draw(-2, 2) : draw_number(false);
        }
        for (int a = 0; a < d; ++a) {
            for (int b = 0; b < d; ++b) {
                float sum = 0.0f;
                for (int e = 0; e < n; ++e) {
                    sum += W[a * n + e] * W[b * n + e];
                }
                gram.at<float>(h * g_nb2 + a * g_nb1 + b * 4) = sum * g_scale;
                ref.gram.push_back(sum * g_scale);
            }
        }
    }

    buffer sinks(ref.n_head * sizeof(float));
    draw_sinks(index % 3 == 2, ref.n_head, sinks, ref.sinks);

    buffer dst((size_t) ref.n_kv * ref.n_head_kv * sizeof(float));

    p.q         = q.data;
    p.mask      = mask.data;
    p.gram      = value ? gram.data : nullptr;
    p.sinks     = ref.sinks.empty() ? nullptr : (const float *) sinks.data;
    p.k         = k.rows;
    p.v         = v.rows;
    p.dst       = (float *) dst.data;
    p.mask_nb1  = mask_nb1;
    p.mask_type = mask_type;
    p.d_k       = ref.d_k;
    p.d_v       = value ? ref.d_v : 0;
    p.w         = ref.w;
    p.n_kv      = ref.n_kv;
    p.n_head_kv = ref.n_head_kv;
    p.n_gqa     = gqa;
    p.logit     = laprox_logit((float) ref.scale, (float) ref.softcap);
    p.stat      = ref.what;
    p.group     = ref.group;
    for (int i = 0; i < 3; ++i) {
        p.q_nb[i]    = i == 0 ? 4 : i == 1 ? q_nb1
                                           : q_nb2;
        p.gram_nb[i] = i == 0 ? 4 : i == 1 ? g_nb1
                                           : g_nb2;
    }

    if (mma && !laprox_score_has_mma(p)) {
        emulation::fail("no tensor core kernel for this width");
    }
    buffer scratch(laprox_score_init(p, mma, nullptr));
    laprox_score_init(p, mma, scratch.data);

    char name[256];
    snprintf(name, sizeof(name), "score-%s %d d_k=%d d_v=%d w=%d n_kv=%d chunks=%d tiles=%d heads=%dx%d k=%d v=%d mask=%d stat=%d group=%d cap=%g scale=%.3g exact=%d wide=%d sinks=%d",
            mma ? "mma" : "simt", index, ref.d_k, p.d_v, ref.w, ref.n_kv, p.n_chunks, p.n_tiles, ref.n_head_kv, gqa, k.rows.type, value ? v.rows.type : -1,
            mask_type, ref.what, ref.group, ref.softcap, ref.scale, exact, wide, !ref.sinks.empty());

    const auto got = run(name, p.dst, ref.n_kv * ref.n_head_kv, [&] { laprox_score_launch(p, mma, nullptr); });
    compare(name, got, reference::score(ref), !mma || exact ? 4e-5 : 4e-2);
}

static shapes::attn draw_attn_shape() {
    shapes::attn s = {};

    s.d_k      = pick(WIDTHS);
    s.d_v      = draw(0, 3) == 0 ? pick(WIDTHS) : s.d_k;
    s.n_gqa    = draw(1, 16);
    s.n_tokens = pick({ 1, 1, 2, 8 });
    s.n_mask   = pick({ 1, 2, 31, 64, 65, 100, 300 });
    s.type_k   = draw_type(s.d_k);
    s.type_v   = draw_type(s.d_v);
    if (draw(0, 15) == 0) {
        s.n_mask   = draw(8193, 17000);
        s.n_tokens = 1;
    }

    return s;
}

static void attn_case(int index) {
    reference::attn_problem ref = {};
    laprox_attn_params      p   = {};

    const shapes::attn s = index < (int) shapes::ATTN.size() ? shapes::ATTN[index] : draw_attn_shape();

    const int gqa = s.n_gqa;

    ref.d_k       = s.d_k;
    ref.d_v       = s.d_v;
    ref.n_head_kv = draw(1, 3);
    ref.n_head    = ref.n_head_kv * gqa;
    ref.n_tokens  = s.n_tokens;
    ref.n_mask    = s.n_mask;
    ref.softcap   = index % 3 == 1 ? pick({ 5, 50 }) : 0;
    ref.scale     = 1.0 / std::sqrt(ref.d_k) * (draw(0, 3) == 0 ? 8 : 1);
    ref.mask      = draw_mask(ref.n_mask, ref.n_tokens);

    // the regions one after the other, in any order of the heads, with a row of NaN between them
    std::vector<int> order(ref.n_head_kv);
    for (int g = 0; g < ref.n_head_kv; ++g) {
        order[g] = g;
    }
    std::shuffle(order.begin(), order.end(), rng);
    ref.regions.resize(2 * ref.n_head_kv);

    const auto        hidden = hidden_columns(ref.mask, ref.n_mask, ref.n_tokens);
    std::vector<bool> no_row;
    for (int g : order) {
        no_row.push_back(true);
        ref.regions[2 * g]     = (int) no_row.size();
        ref.regions[2 * g + 1] = draw(0, 3) == 0 ? draw(0, ref.n_mask) : draw(0, ref.n_mask / 2);
        no_row.insert(no_row.end(), hidden.begin() + ref.regions[2 * g + 1], hidden.end());
    }
    const int n_rows = (int) no_row.size();

    cache k(s.type_k, ref.d_k, n_rows, 1, false, no_row);
    cache v(s.type_v, ref.d_v, n_rows, 1, false, no_row);
    ref.k = k.values;
    ref.v = v.values;

    const size_t q_nb1 = (ref.d_k + draw(0, 3)) * sizeof(float);
    const size_t q_nb2 = q_nb1 * (ref.n_head + draw(0, 1));
    buffer       q(q_nb2 * ref.n_tokens);
    for (int t = 0; t < ref.n_tokens; ++t) {
        for (int h = 0; h < ref.n_head; ++h) {
            for (int a = 0; a < ref.d_k; ++a) {
                const float x                              = draw_number(false);
                q.at<float>(t * q_nb2 + h * q_nb1 + 4 * a) = x;
                ref.q.push_back(x);
            }
        }
    }

    const size_t mask_nb1 = (ref.n_mask + draw(0, 1)) * 2;
    buffer       mask(mask_nb1 * ref.n_tokens);
    store_mask(mask, GGML_TYPE_F16, ref.mask, ref.n_mask, ref.n_tokens, mask_nb1);

    buffer regions(ref.regions.size() * sizeof(int32_t));
    memcpy(regions.data, ref.regions.data(), ref.regions.size() * sizeof(int32_t));

    buffer sinks(ref.n_head * sizeof(float));
    draw_sinks(index % 3 == 2, ref.n_head, sinks, ref.sinks);

    const size_t n = (size_t) ref.d_v * ref.n_head * ref.n_tokens;
    buffer       dst(n * sizeof(float));

    p.q         = q.data;
    p.mask      = mask.data;
    p.regions   = (const int32_t *) regions.data;
    p.sinks     = ref.sinks.empty() ? nullptr : (const float *) sinks.data;
    p.k         = k.rows;
    p.v         = v.rows;
    p.dst       = (float *) dst.data;
    p.q_nb1     = q_nb1;
    p.q_nb2     = q_nb2;
    p.mask_nb1  = mask_nb1;
    p.d_k       = ref.d_k;
    p.d_v       = ref.d_v;
    p.n_head_kv = ref.n_head_kv;
    p.n_gqa     = gqa;
    p.n_tokens  = ref.n_tokens;
    p.n_mask    = ref.n_mask;
    p.logit     = laprox_logit((float) ref.scale, (float) ref.softcap);

    buffer scratch(laprox_attn_init(p, nullptr));
    laprox_attn_init(p, scratch.data);

    char name[256];
    snprintf(name, sizeof(name), "attn %d d_k=%d d_v=%d tokens=%d n_mask=%d chunk=%d chunks=%d heads=%dx%d k=%d v=%d cap=%g scale=%.3g sinks=%d",
            index, ref.d_k, ref.d_v, ref.n_tokens, ref.n_mask, p.chunk, p.n_chunks, ref.n_head_kv, gqa, k.rows.type, v.rows.type, ref.softcap, ref.scale, !ref.sinks.empty());

    const auto got = run(name, p.dst, n, [&] { laprox_attn_launch(p, nullptr); });
    compare(name, got, reference::attn(ref), 4e-5);
}

//
// what must be refused: one thing wrong at a time
//

struct operands {
    ggml_tensor q, k, v, mask, last; // last: gram, or regions
};

static ggml_tensor make_tensor(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) {
    ggml_tensor t = {};

    t.type  = type;
    t.ne[0] = ne0;
    t.ne[1] = ne1;
    t.ne[2] = ne2;
    t.ne[3] = 1;
    t.nb[0] = type == GGML_TYPE_I32 ? 4 : type == GGML_TYPE_Q8_0 ? 34
            : type == GGML_TYPE_Q4_0                             ? 18
            : type == GGML_TYPE_F32                              ? 4
                                                                 : 2;
    t.nb[1] = type == GGML_TYPE_I32 ? 4 * ne0 : row_bytes(type, ne0);
    t.nb[2] = t.nb[1] * ne1;
    t.nb[3] = t.nb[2] * ne2;

    return t;
}

static void test_refusals() {
    struct change {
        const char * what;
        bool         supported;

        std::function<void(operands &)> f;
    };

    // where rows need no alignment, but have types of their own
    const auto retype = [](ggml_tensor & x, ggml_type type) { x = make_tensor(type, x.ne[0], x.ne[1], x.ne[2]); };

    const std::vector<change> both = {
        { "nothing",                        true,  [](operands &) {}                                                                       },
        { "F32 K, BF16 V",                  true,  [=](operands & o) { retype(o.k, GGML_TYPE_F32), retype(o.v, GGML_TYPE_BF16); }          },
        { "Q8_0 K, Q4_0 V",                 true,  [=](operands & o) { retype(o.k, GGML_TYPE_Q8_0), retype(o.v, GGML_TYPE_Q4_0); }         },
        { "rows of a quantised K anywhere", true,  [=](operands & o) { retype(o.k, GGML_TYPE_Q8_0), o.k.nb[1] += 34, o.k.view_offs = 34; } },
        { "V of 80",                        true,  [](operands & o) { o.v.ne[0] = 80; }                                                    },
        { "K of 256",                       true,  [](operands & o) { o.k.ne[0] = o.q.ne[0] = 256; }                                       },
        { "K of 48",                        false, [](operands & o) { o.k.ne[0] = o.q.ne[0] = 48; }                                        },
        { "K of 72",                        false, [](operands & o) { o.k.ne[0] = o.q.ne[0] = 72; }                                        },
        { "K of 272",                       false, [](operands & o) { o.k.ne[0] = o.q.ne[0] = 272; }                                       },
        { "V of 320",                       false, [](operands & o) { o.v.ne[0] = 320; }                                                   },
        { "type of K",                      false, [](operands & o) { o.k.type = GGML_TYPE_Q5_0, o.k.nb[0] = 22; }                         },
        { "type of V",                      false, [](operands & o) { o.v.type = GGML_TYPE_Q4_1, o.v.nb[0] = 20; }                         },
        { "elements of K apart",            false, [](operands & o) { o.k.nb[0] = 4; }                                                     },
        { "elements of V apart",            false, [](operands & o) { o.v.nb[0] = 4; }                                                     },
        { "rows of K not aligned",          false, [](operands & o) { o.k.nb[1] += 8; }                                                    },
        { "rows of V not aligned",          false, [](operands & o) { o.v.nb[1] += 8; }                                                    },
        { "heads of K not aligned",         false, [](operands & o) { o.k.nb[2] += 2; }                                                    },
        { "view of K not aligned",          false, [](operands & o) { o.k.view_offs = 8; }                                                 },
        { "view of V not aligned",          false, [](operands & o) { o.v.view_offs = 4; }                                                 },
        { "elements of the mask apart",     false, [](operands & o) { o.mask.nb[0] = 8; }                                                  },
    };

    for (const bool is_score : { true, false }) {
        std::vector<change> all = both;
        if (is_score) {
            all.push_back({ "mask of F32", true, [=](operands & o) { retype(o.mask, GGML_TYPE_F32); } });
            all.push_back({ "16 heads of a KV head", true, [](operands & o) { o.q.ne[2] = 32; } });
            all.push_back({ "17 heads of a KV head", false, [](operands & o) { o.q.ne[2] = 34; } });
            all.push_back({ "more positions than a grid has blocks", false, [](operands & o) { o.k.ne[1] = o.v.ne[1] = o.mask.ne[0] = 64 * 65535 + 1; } });
            all.push_back({ "more KV heads than that", false, [](operands & o) { o.q.ne[2] = o.k.ne[2] = o.v.ne[2] = 65536; } });
        } else {
            all.push_back({ "mask of F32", false, [=](operands & o) { retype(o.mask, GGML_TYPE_F32); } });
            all.push_back({ "17 heads of a KV head", true, [](operands & o) { o.q.ne[1] = 34; } });
            all.push_back({ "elements of q apart", false, [](operands & o) { o.q.nb[0] = 8; } });
            all.push_back({ "more tokens than a grid has blocks", false, [](operands & o) { o.q.ne[2] = o.mask.ne[1] = 65536; } });
            all.push_back({ "more KV heads than that", false, [](operands & o) { o.q.ne[1] = o.last.ne[1] = 65536; } });
            all.push_back({ "more columns than an int", false, [](operands & o) { o.mask.ne[0] = (int64_t) 1 << 31; } });
        }
        for (const change & c : all) {
            operands o = is_score ? operands { make_tensor(GGML_TYPE_F32, 64, 8, 4), make_tensor(GGML_TYPE_F16, 64, 32, 2), make_tensor(GGML_TYPE_F16, 64, 32, 2),
                make_tensor(GGML_TYPE_F16, 32, 8, 1), make_tensor(GGML_TYPE_F32, 64, 64, 4) }
                                  : operands { make_tensor(GGML_TYPE_F32, 64, 4, 8), make_tensor(GGML_TYPE_F16, 64, 32, 1), make_tensor(GGML_TYPE_F16, 64, 32, 1),
                                        make_tensor(GGML_TYPE_F16, 32, 8, 1), make_tensor(GGML_TYPE_I32, 2, 2, 1) };
            c.f(o);

            ggml_tensor dst = {};
            dst.src[0]      = &o.q;
            dst.src[1]      = &o.k;
            dst.src[2]      = &o.v;
            dst.src[3]      = &o.mask;
            dst.src[4]      = &o.last;

            const bool ok = (is_score ? laprox_score_supported(&dst) : laprox_attn_supported(&dst)) == c.supported;
            n_wrong += !ok;
            printf("%s %s: %s\n", ok ? "ok   " : "WRONG", is_score ? "score" : "attn", c.what);
        }
    }
}

int main(int argc, char ** argv) {
    if (argc == 2 && std::string(argv[1]) == "refusals") {
        test_refusals();
        printf("%d wrong\n", n_wrong);
        return n_wrong ? 1 : 0;
    }
    const std::string what = argc == 4 ? argv[1] : "";
    if (what != "score-mma" && what != "score-simt" && what != "attn") {
        fprintf(stderr, "usage: cuda_driver score-mma|score-simt|attn n_cases seed, or cuda_driver refusals\n");
        return 2;
    }

    for (int i = 0; i < atoi(argv[2]); ++i) {
        rng.seed((uint32_t) (atoi(argv[3]) + i)); // so that one case can be had again
        if (what == "attn") {
            attn_case(i);
        } else {
            score_case(i, what == "score-mma");
        }
    }
    printf("%d wrong\n", n_wrong);
    return n_wrong ? 1 : 0;
}
