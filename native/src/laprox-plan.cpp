#include "laprox-plan.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

// Scores are ranked by a 32-bit key that orders like the float. Finite floats end at KEY_FLT_MAX; the room above holds
// the sinks, so that "forced" needs no case of its own in the selection.
static constexpr uint32_t KEY_FLT_MAX = 0xFF7FFFFFu;
static constexpr uint32_t MAX_SINK    = UINT32_MAX - KEY_FLT_MAX;

// the average costs n_cand*kernel (a running sum would make the result depend on far positions)
static constexpr uint32_t MAX_AVG_KERNEL = 1023;

static std::string format(const char * fmt, ...) {
    char buf[512];

    va_list ap;
    va_start(ap, fmt);
    vsnprintf(buf, sizeof(buf), fmt, ap);
    va_end(ap);

    return buf;
}

// on the bits: holds under -ffinite-math-only too
static bool is_finite(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return (bits & 0x7F800000u) != 0x7F800000u;
}

static bool all_finite(const float * x, size_t n) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; ++i) {
        bad |= is_finite(x[i]) ? 0 : 1;
    }
    return bad == 0;
}

static uint32_t score_key(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));

    if (bits == 0x80000000u) {
        bits = 0; // -0 ties with +0
    }

    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

//
// arguments
//

static std::string check_args(
        const laprox_plan_params & params,
        uint32_t                   n_layer,
        const uint32_t *           n_head_kv,
        uint32_t                   n_cand,
        const float *              scores,
        const float *              residual) {
    if (n_layer == 0 || n_head_kv == nullptr) {
        return "plan: no layers, expected n_layer >= 1 with n_head_kv set";
    }

    uint64_t n_head = 0;
    for (uint32_t il = 0; il < n_layer; ++il) {
        if (n_head_kv[il] == 0) {
            return format("plan: layer %" PRIu32 " has no KV heads, expected at least 1; leave the layer out", il);
        }
        n_head += n_head_kv[il];
    }

    if (n_head > UINT32_MAX || n_cand > (uint32_t) INT32_MAX) {
        return format("plan: %" PRIu64 " heads of %" PRIu32 " candidates, expected at most 2^32-1 of 2^31-1", n_head, n_cand);
    }
    if (params.n_keep > n_head * n_cand) {
        return format("plan: n_keep is %" PRIu64 ", expected at most %" PRIu64 " (%" PRIu64 " heads of %" PRIu32 " candidates)",
                params.n_keep, n_head * n_cand, n_head, n_cand);
    }
    if (n_cand > 0 && scores == nullptr) {
        return "plan: scores is NULL, expected an array of n_head*n_cand elements";
    }
    if (std::min(params.n_sink, n_cand) > MAX_SINK) {
        return format("plan: n_sink is %" PRIu32 ", expected at most %" PRIu32, params.n_sink, MAX_SINK);
    }

    switch (params.pool) {
        case LAPROX_POOL_NONE:
            break;
        case LAPROX_POOL_REACH:
            if (!(params.pool_decay >= 0.0f && params.pool_decay <= 1.0f)) {
                return format("plan: pool_decay is %g, expected 0 to 1", (double) params.pool_decay);
            }
            break;
        case LAPROX_POOL_AVG:
        case LAPROX_POOL_MAX:
            if (params.pool_size % 2 == 0) {
                return format("plan: pool_size is %" PRIu32 ", expected an odd kernel for average and maximum pooling", params.pool_size);
            }
            if (params.pool == LAPROX_POOL_AVG && params.pool_size > MAX_AVG_KERNEL) {
                return format("plan: pool_size is %" PRIu32 ", expected at most %" PRIu32 " for average pooling", params.pool_size, MAX_AVG_KERNEL);
            }
            break;
        default:
            return format("plan: pool is %" PRId32 ", expected a value of enum laprox_pool", params.pool);
    }

    switch (params.normalize) {
        case LAPROX_NORMALIZE_NONE:
        case LAPROX_NORMALIZE_LAYER_SUM:
        case LAPROX_NORMALIZE_ZSCORE:
            break;
        case LAPROX_NORMALIZE_RESIDUAL:
            if (residual == nullptr) {
                return "plan: residual is NULL, expected one value per layer for LAPROX_NORMALIZE_RESIDUAL";
            }
            for (uint32_t il = 0; il < n_layer; ++il) {
                if (!is_finite(residual[il]) || residual[il] <= 0.0f) {
                    return format("plan: residual of layer %" PRIu32 " is %g, expected a finite value above 0", il, (double) residual[il]);
                }
            }
            break;
        default:
            return format("plan: normalize is %" PRId32 ", expected a value of enum laprox_normalize", params.normalize);
    }

    if (params.alloc != LAPROX_ALLOC_MODEL && params.alloc != LAPROX_ALLOC_LAYER && params.alloc != LAPROX_ALLOC_HEAD) {
        return format("plan: alloc is %" PRId32 ", expected a value of enum laprox_alloc", params.alloc);
    }

    return "";
}

//
// pool: one head, x [n] -> y [n], n > 0
//

// y_i = max of x over |d| <= radius, inside 0..n-1: maxima of blocks of one window's length from the left and from the
// right, each window is the end of one block and the start of the next (van Herk, Gil and Werman)
static void pool_max(const float * x, float * y, uint32_t n, uint32_t radius, std::vector<float> & scratch) {
    radius = std::min(radius, n - 1);

    const size_t window = 2 * (size_t) radius + 1;
    const size_t n_pad  = n + 2 * (size_t) radius;

    scratch.resize(2 * n_pad);
    float * left  = scratch.data();         // [n_pad] running maximum from the block's first element
    float * right = scratch.data() + n_pad; // [n_pad] ... from the block's last element

    std::fill(left, left + radius, std::numeric_limits<float>::lowest());
    std::copy(x, x + n, left + radius);
    std::fill(left + radius + n, left + n_pad, std::numeric_limits<float>::lowest());

    for (size_t i0 = 0; i0 < n_pad; i0 += window) {
        const size_t i1 = std::min(i0 + window, n_pad);

        right[i1 - 1] = left[i1 - 1];
        for (size_t i = i1 - 1; i > i0; --i) {
            right[i - 1] = std::max(left[i - 1], right[i]);
        }
        for (size_t i = i0 + 1; i < i1; ++i) {
            left[i] = std::max(left[i], left[i - 1]);
        }
    }

    for (size_t i = 0; i < n; ++i) {
        y[i] = std::max(right[i], left[i + window - 1]);
    }
}

// the sum in double, from the lowest position up, then one division and one rounding to float
static void pool_avg(const float * x, float * y, uint32_t n, uint32_t kernel) {
    constexpr int64_t n_tile = 512;

    const int64_t radius = kernel / 2;

    double sum[n_tile];

    for (int64_t i0 = 0; i0 < n; i0 += n_tile) {
        const int64_t i1 = std::min<int64_t>(i0 + n_tile, n);

        std::fill(sum, sum + (i1 - i0), 0.0);
        for (int64_t d = -radius; d <= radius; ++d) {
            const int64_t first = std::max<int64_t>(i0, -d);
            const int64_t last  = std::min<int64_t>(i1, n - d);
            for (int64_t i = first; i < last; ++i) {
                sum[i - i0] += x[i + d];
            }
        }
        for (int64_t i = i0; i < i1; ++i) {
            y[i] = (float) (sum[i - i0] / kernel);
        }
    }
}

static void pool_head(const laprox_plan_params & params, const float * x, float * y, uint32_t n, std::vector<float> & scratch) {
    switch (params.pool) {
        case LAPROX_POOL_REACH:
            pool_max(x, y, n, params.pool_size, scratch);
            for (uint32_t i = 0; i < n; ++i) {
                y[i] = std::max(x[i], params.pool_decay * y[i]);
            }
            break;
        case LAPROX_POOL_AVG:
            pool_avg(x, y, n, params.pool_size);
            break;
        case LAPROX_POOL_MAX:
            pool_max(x, y, n, params.pool_size / 2, scratch);
            break;
        default:
            std::copy(x, x + n, y);
            break;
    }
}

//
// normalize: one layer in place, s [n_head][n_cand]
//

static std::string normalize_layer(
        const laprox_plan_params & params,
        uint32_t                   il,
        float *                    s,
        uint32_t                   n_head,
        uint32_t                   n_cand,
        const float *              residual) {
    const size_t n = (size_t) n_head * n_cand;

    switch (params.normalize) {
        case LAPROX_NORMALIZE_RESIDUAL:
            for (size_t i = 0; i < n; ++i) {
                s[i] = s[i] / residual[il];
            }
            break;
        case LAPROX_NORMALIZE_LAYER_SUM: {
            const double sum = std::accumulate(s, s + n, 0.0);

            if (sum > 0.0) {
                for (size_t i = 0; i < n; ++i) {
                    s[i] = (float) (s[i] / sum);
                }
            } else if (std::any_of(s, s + n, [](float x) { return x != 0.0f; })) {
                return format("plan: scores of layer %" PRIu32 " sum to %g, expected a positive sum for LAPROX_NORMALIZE_LAYER_SUM", il, sum);
            }
        } break;
        case LAPROX_NORMALIZE_ZSCORE:
            for (uint32_t h = 0; h < n_head; ++h) {
                float * sh = s + (size_t) h * n_cand;

                const double mean = std::accumulate(sh, sh + n_cand, 0.0) / n_cand;

                double sq = 0.0;
                for (uint32_t i = 0; i < n_cand; ++i) {
                    sq += (sh[i] - mean) * (sh[i] - mean);
                }

                // a constant head (one candidate, say) has nothing to tell apart
                const double std_dev = n_cand > 1 ? std::sqrt(sq / (n_cand - 1)) : 0.0;
                for (uint32_t i = 0; i < n_cand; ++i) {
                    sh[i] = std_dev > 0.0 ? (float) ((sh[i] - mean) / std_dev) : 0.0f;
                }
            }
            break;
        default:
            break;
    }

    if (!all_finite(s, n)) {
        return format("plan: scores of layer %" PRIu32 " overflow when they are normalized, expected values inside the float range", il);
    }

    return "";
}

// pooled and normalised scores of one layer, x and out [n_head][n_cand], not the same
static std::string rank_layer(
        const laprox_plan_params & params,
        uint32_t                   il,
        const float *              x,
        float *                    out,
        uint32_t                   n_head,
        uint32_t                   n_cand,
        const float *              residual,
        std::vector<float> &       scratch) {
    for (size_t i = 0; i < (size_t) n_head * n_cand; i += n_cand) {
        if (!all_finite(x + i, n_cand)) {
            return format("plan: scores of layer %" PRIu32 ", KV head %" PRIu32 " hold NaN or infinity, expected finite values",
                    il, (uint32_t) (i / n_cand));
        }
        pool_head(params, x + i, out + i, n_cand, scratch);
    }

    return normalize_layer(params, il, out, n_head, n_cand, residual);
}

//
// allocate and select
//

// heads [begin, end) share one top-K
struct plan_unit {
    uint32_t begin;
    uint32_t end;
    uint64_t n_keep;
};

static std::vector<plan_unit> plan_units(int32_t alloc, uint64_t n_keep, uint32_t n_layer, const uint32_t * n_head_kv, uint32_t n_head) {
    std::vector<plan_unit> units;

    if (alloc == LAPROX_ALLOC_MODEL) {
        units.push_back({ 0, n_head, n_keep });
        return units;
    }

    const uint64_t quot = n_keep / n_head;
    const uint64_t rem  = n_keep % n_head;

    if (alloc == LAPROX_ALLOC_HEAD) {
        for (uint32_t h = 0; h < n_head; ++h) {
            units.push_back({ h, h + 1, quot + (h < rem ? 1 : 0) });
        }
        return units;
    }

    // largest remainder: layer il is due n_keep*n_head_kv[il]/n_head = quot*n_head_kv[il] + rem*n_head_kv[il]/n_head
    std::vector<std::pair<uint64_t, uint32_t>> fraction(n_layer); // what rounding down takes, layer

    uint64_t n_left = n_keep;
    uint32_t h      = 0;
    for (uint32_t il = 0; il < n_layer; ++il) {
        const uint64_t share = rem * n_head_kv[il];
        const uint64_t n     = quot * n_head_kv[il] + share / n_head;

        units.push_back({ h, h + n_head_kv[il], n });
        fraction[il] = { share % n_head, il };
        n_left -= n;
        h += n_head_kv[il];
    }

    std::stable_sort(fraction.begin(), fraction.end(), [](const auto & a, const auto & b) { return a.first > b.first; });
    for (uint64_t i = 0; i < n_left; ++i) {
        units[fraction[i].second].n_keep++;
    }

    return units;
}

// the k-th largest of key [n], 1 <= k <= n, and how many of the keys equal to it belong to the k largest:
// a radix selection from the top bits down, no copy of the keys
static uint32_t kth_largest(const uint32_t * key, size_t n, uint64_t k, uint64_t & n_equal) {
    static constexpr struct {
        int shift;
        int bits;
    } digits[] = {
        { 21, 11 },
        { 10, 11 },
        { 0,  10 }
    };

    uint32_t prefix = 0; // the digits found so far, in place
    uint32_t known  = 0; // their mask

    for (const auto & digit : digits) {
        uint64_t count[1 << 11] = {};

        const uint32_t mask = ((uint32_t) 1 << digit.bits) - 1;
        for (size_t i = 0; i < n; ++i) {
            if ((key[i] & known) == prefix) {
                count[(key[i] >> digit.shift) & mask]++;
            }
        }

        uint32_t d = mask;
        while (count[d] < k) {
            k -= count[d--];
        }

        prefix |= d << digit.shift;
        known |= mask << digit.shift;
    }

    n_equal = k;

    return prefix;
}

static llama_pos * select_unit(const plan_unit & unit, const uint32_t * keys, uint32_t n_cand, uint32_t * n_kept, llama_pos * pos) {
    std::fill(n_kept + unit.begin, n_kept + unit.end, 0);
    if (unit.n_keep == 0) {
        return pos;
    }

    const uint32_t * key = keys + (size_t) unit.begin * n_cand;

    uint64_t       n_equal;
    const uint32_t bound = kth_largest(key, (size_t) (unit.end - unit.begin) * n_cand, unit.n_keep, n_equal);

    for (uint32_t h = unit.begin; h < unit.end; ++h, key += n_cand) {
        const llama_pos * first = pos;
        for (uint32_t i = 0; i < n_cand; ++i) {
            if (key[i] < bound) {
                continue;
            }
            if (key[i] == bound) {
                if (n_equal == 0) {
                    continue;
                }
                n_equal--;
            }
            *pos++ = (llama_pos) i;
        }
        n_kept[h] = (uint32_t) (pos - first);
    }

    return pos;
}

// work(), or why there was no memory for it
template<typename F>
static laprox_status guard_alloc(uint32_t n_head, uint32_t n_cand, std::string & error, F && work) {
    try {
        return work();
    } catch (const std::bad_alloc &) {
    } catch (const std::length_error &) {
    }

    error = format("plan: no memory for %" PRIu32 " heads of %" PRIu32 " scores, expected 4 bytes each", n_head, n_cand);

    return LAPROX_E_ALLOC;
}

laprox_status laprox_rank_impl(
        const laprox_plan_params & params,
        uint32_t                   n_layer,
        const uint32_t *           n_head_kv,
        uint32_t                   n_cand,
        const float *              scores,
        const float *              residual,
        float *                    out,
        std::string &              error) {
    error = check_args(params, n_layer, n_head_kv, n_cand, scores, residual);
    if (error.empty() && n_cand > 0 && out == nullptr) {
        error = "plan: out is NULL, expected an array of n_head*n_cand elements";
    }
    if (!error.empty()) {
        return LAPROX_E_ARG;
    }

    const size_t n_head = std::accumulate(n_head_kv, n_head_kv + n_layer, (size_t) 0);

    return guard_alloc((uint32_t) n_head, n_cand, error, [&] {
        std::vector<float> res(n_head * n_cand); // out may be scores, and stays as it is on failure
        std::vector<float> scratch;

        size_t offs = 0;
        for (uint32_t il = 0; il < n_layer && n_cand > 0; ++il) {
            error = rank_layer(params, il, scores + offs, res.data() + offs, n_head_kv[il], n_cand, residual, scratch);
            if (!error.empty()) {
                return LAPROX_E_ARG;
            }
            offs += (size_t) n_head_kv[il] * n_cand;
        }

        std::copy(res.begin(), res.end(), out);

        return LAPROX_OK;
    });
}

laprox_status laprox_plan_impl(
        const laprox_plan_params & params,
        uint32_t                   n_layer,
        const uint32_t *           n_head_kv,
        uint32_t                   n_cand,
        const float *              scores,
        const float *              residual,
        uint32_t *                 n_kept,
        llama_pos *                pos,
        std::string &              error) {
    error = check_args(params, n_layer, n_head_kv, n_cand, scores, residual);
    if (error.empty() && (n_kept == nullptr || (params.n_keep > 0 && pos == nullptr))) {
        error = "plan: n_kept or pos is NULL, expected arrays of n_head and n_keep elements";
    }
    if (!error.empty()) {
        return LAPROX_E_ARG;
    }

    const uint32_t n_head = std::accumulate(n_head_kv, n_head_kv + n_layer, (uint32_t) 0);

    return guard_alloc(n_head, n_cand, error, [&] {
        std::vector<uint32_t> keys((size_t) n_head * n_cand); // [n_head][n_cand]
        std::vector<float>    layer;                        // [n_head_kv[il]][n_cand]
        std::vector<float>    scratch;

        size_t offs = 0;
        for (uint32_t il = 0; il < n_layer && n_cand > 0; ++il) {
            layer.resize((size_t) n_head_kv[il] * n_cand);

            error = rank_layer(params, il, scores + offs, layer.data(), n_head_kv[il], n_cand, residual, scratch);
            if (!error.empty()) {
                return LAPROX_E_ARG;
            }

            uint32_t * key = keys.data() + offs;
            for (size_t i = 0; i < layer.size(); ++i) {
                key[i] = score_key(layer[i]);
            }

            // above every score, lower positions first: when n_keep is short, no head goes without position 0
            // before another has its second
            for (size_t i = 0; i < layer.size(); i += n_cand) {
                for (uint32_t j = 0; j < std::min(params.n_sink, n_cand); ++j) {
                    key[i + j] = UINT32_MAX - j;
                }
            }

            offs += layer.size();
        }

        const std::vector<plan_unit> units = plan_units(params.alloc, params.n_keep, n_layer, n_head_kv, n_head);

        // nothing fails from here on: the results are written
        for (const plan_unit & unit : units) {
            pos = select_unit(unit, keys.data(), n_cand, n_kept, pos);
        }

        return LAPROX_OK;
    });
}
