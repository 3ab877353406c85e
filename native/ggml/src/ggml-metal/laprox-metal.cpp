#include "laprox-metal.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "kernels/laprox-impl.h"

#include <algorithm>
#include <cstdio>

// of a threadgroup, on every device
static constexpr size_t LAPROX_MAX_SMEM = 32768;

// simdgroups of a threadgroup, where the pipeline and the threadgroup memory allow it
static constexpr int LAPROX_SCORE_NSG = 8;
static constexpr int LAPROX_ATTN_NSG  = 4;

// more are a matter of flash attention, and the intermediate results grow with them
static constexpr int64_t LAPROX_ATTN_MAX_TOKENS = 32;

static constexpr int64_t LAPROX_SCORE_MAX_QUERIES = 512;

// LAPROX_ROW_*, -1 where there is none
static int laprox_row_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32: return LAPROX_ROW_F32;
        case GGML_TYPE_F16: return LAPROX_ROW_F16;
        case GGML_TYPE_BF16: return LAPROX_ROW_BF16;
        case GGML_TYPE_Q8_0: return LAPROX_ROW_Q8_0;
        case GGML_TYPE_Q4_0: return LAPROX_ROW_Q4_0;
        default: return -1;
    }
}

//
// supports_op
//

static bool laprox_head_width(int64_t d) {
    switch (d) {
        case 64:
        case 80:
        case 96:
        case 112:
        case 128:
        case 192:
        case 256:
            return true;
        default:
            return false;
    }
}

static bool laprox_aligned(const ggml_tensor * x, size_t n) {
    return x->nb[1] % n == 0 && x->nb[2] % n == 0 && x->view_offs % n == 0;
}

// rows of K or V: whole vectors of 4 elements are loaded
static bool laprox_rows(const ggml_tensor * x) {
    static const size_t size[]  = { 4, 2, 2, 34, 18 };
    static const size_t align[] = { 16, 8, 2, 2, 2 };

    const int type = laprox_row_type(x->type);

    return type >= 0 && x->nb[0] == size[type] && laprox_aligned(x, align[type]) && laprox_head_width(x->ne[0]);
}

static bool laprox_mask_rows(const ggml_tensor * x) {
    const size_t size = x->type == GGML_TYPE_F16 ? 2 : 4;

    return (x->type == GGML_TYPE_F16 || x->type == GGML_TYPE_F32) && x->nb[0] == size && laprox_aligned(x, size);
}

static bool laprox_float_rows(const ggml_tensor * x) {
    return x->type == GGML_TYPE_F32 && x->nb[0] % 4 == 0 && laprox_aligned(x, 4);
}

static bool laprox_score_supported(const ggml_tensor * op) {
    const ggml_tensor * q    = op->src[0];
    const ggml_tensor * k    = op->src[1];
    const ggml_tensor * v    = op->src[2];
    const ggml_tensor * mask = op->src[3];
    const ggml_tensor * gram = op->src[4];

    if (!laprox_float_rows(q) || !laprox_rows(k) || !laprox_mask_rows(mask)) {
        return false;
    }
    if (q->ne[1] > LAPROX_SCORE_MAX_QUERIES || q->ne[2] / k->ne[2] > LAPROX_MAX_GQA || k->ne[1] > INT32_MAX / 2) {
        return false;
    }
    if (!gram) {
        return true;
    }

    // the tile of K makes room for that of V
    const int64_t n_tile = LAPROX_SCORE_TILE(k->ne[0]);

    return laprox_rows(v) && n_tile * v->ne[0] <= 4096 && laprox_float_rows(gram) && gram->nb[0] == 4;
}

static bool laprox_attn_supported(const ggml_tensor * op) {
    const ggml_tensor * q    = op->src[0];
    const ggml_tensor * k    = op->src[1];
    const ggml_tensor * v    = op->src[2];
    const ggml_tensor * mask = op->src[3];

    return laprox_float_rows(q) && q->nb[0] == 4 &&
            laprox_rows(k) && laprox_rows(v) &&
            mask->type == GGML_TYPE_F16 && laprox_mask_rows(mask) && mask->ne[0] <= INT32_MAX / 2 &&
            q->ne[1] / op->src[4]->ne[1] <= LAPROX_MAX_GQA && q->ne[2] <= LAPROX_ATTN_MAX_TOKENS;
}

bool ggml_metal_laprox_supports_op(const ggml_tensor * op, bool has_simdgroup_mm) {
    switch (op->op) {
        case GGML_OP_LAPROX_SCORE: return has_simdgroup_mm && laprox_score_supported(op);
        case GGML_OP_LAPROX_ATTN: return has_simdgroup_mm && laprox_attn_supported(op); // has_simdgroup_mm: shuffles, too
        default: return false;
    }
}

//
// geometry
//

struct laprox_score_plan {
    ggml_metal_kargs_laprox_score args; // without nsg

    // behind the result, in bytes from its start
    size_t o_q;    // [d_k, 8*n_blk, n_head]
    size_t o_part; // [2, 8*n_blk*n_head, n_chunk]
    size_t o_lse;  // [8*n_blk*n_head]
    size_t size;
};

struct laprox_attn_plan {
    ggml_metal_kargs_laprox_attn args; // without nsg

    size_t o_stat; // [2, n_head, n_tokens, n_chunk]
    size_t o_part; // [d_v, n_head, n_tokens, n_chunk]
    size_t size;
};

static int laprox_div_up(int64_t a, int64_t b) {
    return (int) ((a + b - 1) / b);
}

static laprox_score_plan laprox_score_get_plan(const ggml_tensor * op) {
    const ggml_tensor * q    = op->src[0];
    const ggml_tensor * k    = op->src[1];
    const ggml_tensor * v    = op->src[2];
    const ggml_tensor * mask = op->src[3];
    const ggml_tensor * gram = op->src[4];

    const float softcap = ggml_get_op_params_f32(op, 1);

    laprox_score_plan p = {};

    p.args.n_kv    = (int32_t) k->ne[1];
    p.args.n_gqa   = (int32_t) (q->ne[2] / k->ne[2]);
    p.args.n_head  = (int32_t) q->ne[2];
    p.args.n_chunk = laprox_div_up(k->ne[1], LAPROX_SCORE_CHUNK);
    p.args.w       = (int32_t) q->ne[1];
    p.args.n_blk   = laprox_div_up(q->ne[1], 8);
    p.args.d_k     = (int32_t) k->ne[0];
    p.args.d_v     = v ? (int32_t) v->ne[0] : 0;
    p.args.sinks   = op->src[5] != nullptr;
    p.args.scale   = ggml_get_op_params_f32(op, 0) / (softcap != 0.0f ? softcap : 1.0f);
    p.args.softcap = softcap;
    p.args.nbq0    = q->nb[0];
    p.args.nbq1    = q->nb[1];
    p.args.nbq2    = q->nb[2];
    p.args.nbk1    = k->nb[1];
    p.args.nbk2    = k->nb[2];
    p.args.nbv1    = v ? v->nb[1] : 0;
    p.args.nbv2    = v ? v->nb[2] : 0;
    p.args.nbm1    = mask->nb[1];
    p.args.nbg1    = gram ? gram->nb[1] : 0;
    p.args.nbg2    = gram ? gram->nb[2] : 0;

    const size_t n_row = (size_t) 8 * p.args.n_blk * p.args.n_head;

    p.o_q    = GGML_PAD(sizeof(float) * op->ne[0] * op->ne[1], 32);
    p.o_part = p.o_q + sizeof(float) * n_row * p.args.d_k;
    p.o_lse  = p.o_part + sizeof(float) * n_row * 2 * p.args.n_chunk;
    p.size   = p.o_lse + sizeof(float) * n_row;

    return p;
}

static laprox_attn_plan laprox_attn_get_plan(const ggml_tensor * op) {
    const ggml_tensor * q    = op->src[0];
    const ggml_tensor * k    = op->src[1];
    const ggml_tensor * v    = op->src[2];
    const ggml_tensor * mask = op->src[3];

    const float softcap = ggml_get_op_params_f32(op, 1);

    laprox_attn_plan p = {};

    p.args.n_mask   = (int32_t) mask->ne[0];
    p.args.n_gqa    = (int32_t) (q->ne[1] / op->src[4]->ne[1]);
    p.args.n_head   = (int32_t) q->ne[1];
    p.args.n_tokens = (int32_t) q->ne[2];
    p.args.n_chunk  = laprox_div_up(mask->ne[0], LAPROX_ATTN_CHUNK);
    p.args.d_k      = (int32_t) k->ne[0];
    p.args.d_v      = (int32_t) v->ne[0];
    p.args.sinks    = op->src[5] != nullptr;
    p.args.scale    = ggml_get_op_params_f32(op, 0) / (softcap != 0.0f ? softcap : 1.0f);
    p.args.softcap  = softcap;
    p.args.nbq1     = q->nb[1];
    p.args.nbq2     = q->nb[2];
    p.args.nbk1     = k->nb[1];
    p.args.nbv1     = v->nb[1];
    p.args.nbm1     = mask->nb[1];

    const size_t n_part = (size_t) p.args.n_head * p.args.n_tokens * p.args.n_chunk;

    p.o_stat = GGML_PAD(sizeof(float) * op->ne[0] * op->ne[1] * op->ne[2], 32);
    p.o_part = p.o_stat + GGML_PAD(sizeof(float) * n_part * 2, 32);
    p.size   = p.o_part + sizeof(float) * n_part * p.args.d_v;

    return p;
}

size_t ggml_metal_laprox_extra(const ggml_tensor * op) {
    const size_t size = op->op == GGML_OP_LAPROX_SCORE ? laprox_score_get_plan(op).size : laprox_attn_get_plan(op).size;

    return size - sizeof(float) * op->ne[0] * op->ne[1] * op->ne[2];
}

// threadgroup memory, as laid out at the top of the kernels

static size_t laprox_stats_smem(const ggml_metal_kargs_laprox_score & a, int nsg) {
    const size_t n_tile = LAPROX_SCORE_TILE(a.d_k);

    return GGML_PAD(sizeof(float) * (n_tile * a.d_k + nsg * 8 * n_tile) + sizeof(uint16_t) * (32 * nsg + n_tile + 1), 16);
}

static size_t laprox_score_smem(const ggml_metal_kargs_laprox_score & a, int nsg) {
    const size_t n_tile = LAPROX_SCORE_TILE(a.d_k);

    return GGML_PAD(sizeof(float) * n_tile * (std::max(a.d_k, a.d_v) + nsg * 8 + a.n_gqa * nsg + a.n_gqa) +
                    sizeof(uint16_t) * (32 * nsg + n_tile + 1),
            16);
}

static size_t laprox_attn_smem(const ggml_metal_kargs_laprox_attn & a) {
    return GGML_PAD(sizeof(float) * a.n_gqa * (std::max(a.d_k, a.d_v) + LAPROX_ATTN_CHUNK) + sizeof(uint16_t) * LAPROX_ATTN_CHUNK, 16);
}

//
// encoder
//

static ggml_metal_buffer_id laprox_buffer(const ggml_tensor * t, size_t offs = 0) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;

    ggml_metal_buffer_id res = ggml_metal_buffer_get_id((ggml_metal_buffer_t) buffer->context, t);

    res.offs += offs;

    return res;
}

static ggml_metal_pipeline_with_params laprox_pipeline(ggml_metal_library_t lib, const char * base) {
    ggml_metal_pipeline_with_params res = ggml_metal_library_get_pipeline(lib, base);
    if (!res.pipeline) {
        res = ggml_metal_library_compile_pipeline(lib, base, base, nullptr);
    }

    return res;
}

// a pipeline with the function constants FC_LAPROX + 0 ..
static ggml_metal_pipeline_with_params laprox_pipeline(ggml_metal_library_t lib, const char * base, const int32_t (&fc)[8]) {
    char name[256];

    snprintf(name, sizeof(name), "%s_k=%d_v=%d_mask=%d_stat=%d_group=%d_value=%d_softcap=%d_gqa=%d",
            base, fc[0], fc[1], fc[2], fc[3], fc[4], fc[5], fc[6], fc[7]);

    ggml_metal_pipeline_with_params res = ggml_metal_library_get_pipeline(lib, name);
    if (!res.pipeline) {
        ggml_metal_cv_t cv = ggml_metal_cv_init();

        for (int i = 0; i < 8; ++i) {
            ggml_metal_cv_set_int32(cv, fc[i], FC_LAPROX + i);
        }
        res = ggml_metal_library_compile_pipeline(lib, base, name, cv);

        ggml_metal_cv_free(cv);
    }

    return res;
}

// simdgroups that registers allow
static int laprox_max_nsg(ggml_metal_pipeline_with_params pipeline, int nsg) {
    return std::max(1, std::min(nsg, ggml_metal_pipeline_max_theads_per_threadgroup(pipeline) / 32));
}

static void laprox_encode_score(
        ggml_metal_encoder_t          enc,
        ggml_metal_library_t          lib,
        const ggml_tensor *           op,
        const std::function<void()> & sync) {
    const ggml_tensor * q    = op->src[0];
    const ggml_tensor * k    = op->src[1];
    const ggml_tensor * v    = op->src[2] ? op->src[2] : k; // not read
    const ggml_tensor * mask = op->src[3];
    const ggml_tensor * gram = op->src[4] ? op->src[4] : q; // not read

    const ggml_tensor * sinks = op->src[5] ? op->src[5] : q; // not read

    laprox_score_plan p = laprox_score_get_plan(op);

    const int n_head_kv = (int) k->ne[2];
    const int n_tile    = LAPROX_SCORE_TILE(p.args.d_k);

    const int32_t fc[8] = {
        laprox_row_type(k->type),
        laprox_row_type(v->type),
        laprox_row_type(mask->type),
        ggml_get_op_params_i32(op, 2),
        ggml_get_op_params_i32(op, 3) == GGML_LAPROX_SCORE_GQA_ATTENTION,
        op->src[4] != nullptr,
        p.args.softcap != 0.0f,
        p.args.n_gqa,
    };

    const ggml_metal_buffer_id bid_q    = laprox_buffer(op, p.o_q);
    const ggml_metal_buffer_id bid_part = laprox_buffer(op, p.o_part);
    const ggml_metal_buffer_id bid_lse  = laprox_buffer(op, p.o_lse);

    char name[64];

    ggml_metal_pipeline_with_params pipeline = laprox_pipeline(lib, "kernel_laprox_score_prep");

    ggml_metal_encoder_set_pipeline(enc, pipeline);
    ggml_metal_encoder_set_bytes(enc, &p.args, sizeof(p.args), 0);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(q), 1);
    ggml_metal_encoder_set_buffer(enc, bid_q, 2);

    ggml_metal_encoder_dispatch_threadgroups(enc, 8 * p.args.n_blk, p.args.n_head, 1, 32, 1, 1);

    sync();

    snprintf(name, sizeof(name), "kernel_laprox_score_stats_d%d", p.args.d_k);
    pipeline = laprox_pipeline(lib, name, fc);

    const int n_items = p.args.n_blk * p.args.n_gqa;

    p.args.nsg = laprox_max_nsg(pipeline, std::min(LAPROX_SCORE_NSG, n_items));

    ggml_metal_encoder_set_pipeline(enc, pipeline);
    ggml_metal_encoder_set_bytes(enc, &p.args, sizeof(p.args), 0);
    ggml_metal_encoder_set_buffer(enc, bid_q, 1);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(k), 2);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(mask), 3);
    ggml_metal_encoder_set_buffer(enc, bid_part, 4);

    ggml_metal_encoder_set_threadgroup_memory_size(enc, laprox_stats_smem(p.args, p.args.nsg), 0);

    ggml_metal_encoder_dispatch_threadgroups(enc, p.args.n_chunk, laprox_div_up(n_items, p.args.nsg), n_head_kv, 32 * p.args.nsg, 1, 1);

    sync();

    pipeline = laprox_pipeline(lib, "kernel_laprox_score_lse");

    ggml_metal_encoder_set_pipeline(enc, pipeline);
    ggml_metal_encoder_set_bytes(enc, &p.args, sizeof(p.args), 0);
    ggml_metal_encoder_set_buffer(enc, bid_part, 1);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(sinks), 2);
    ggml_metal_encoder_set_buffer(enc, bid_lse, 3);

    ggml_metal_encoder_dispatch_threadgroups(enc, 8 * p.args.n_blk * p.args.n_head, 1, 1, 32, 1, 1);

    sync();

    snprintf(name, sizeof(name), "kernel_laprox_score_d%d", p.args.d_k);
    pipeline = laprox_pipeline(lib, name, fc);

    p.args.nsg = laprox_max_nsg(pipeline, LAPROX_SCORE_NSG);
    while (p.args.nsg > 1 && laprox_score_smem(p.args, p.args.nsg) > LAPROX_MAX_SMEM) {
        p.args.nsg /= 2;
    }

    ggml_metal_encoder_set_pipeline(enc, pipeline);
    ggml_metal_encoder_set_bytes(enc, &p.args, sizeof(p.args), 0);
    ggml_metal_encoder_set_buffer(enc, bid_q, 1);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(k), 2);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(v), 3);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(mask), 4);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(gram), 5);
    ggml_metal_encoder_set_buffer(enc, bid_lse, 6);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(op), 7);

    ggml_metal_encoder_set_threadgroup_memory_size(enc, laprox_score_smem(p.args, p.args.nsg), 0);

    ggml_metal_encoder_dispatch_threadgroups(enc, laprox_div_up(p.args.n_kv, n_tile), n_head_kv, 1, 32 * p.args.nsg, 1, 1);
}

static void laprox_encode_attn(
        ggml_metal_encoder_t          enc,
        ggml_metal_library_t          lib,
        const ggml_tensor *           op,
        const std::function<void()> & sync) {
    const ggml_tensor * q       = op->src[0];
    const ggml_tensor * k       = op->src[1];
    const ggml_tensor * v       = op->src[2];
    const ggml_tensor * mask    = op->src[3];
    const ggml_tensor * regions = op->src[4];
    const ggml_tensor * sinks   = op->src[5] ? op->src[5] : q; // not read

    laprox_attn_plan p = laprox_attn_get_plan(op);

    const int32_t fc[8] = {
        laprox_row_type(k->type),
        laprox_row_type(v->type),
        LAPROX_ROW_F16,
        0,
        0,
        0,
        p.args.softcap != 0.0f,
        p.args.n_gqa,
    };

    const ggml_metal_buffer_id bid_stat = laprox_buffer(op, p.o_stat);
    const ggml_metal_buffer_id bid_part = laprox_buffer(op, p.o_part);

    ggml_metal_pipeline_with_params pipeline = laprox_pipeline(lib, "kernel_laprox_attn", fc);

    // a thread has 4 channels of V
    p.args.nsg = laprox_max_nsg(pipeline, LAPROX_ATTN_NSG);
    GGML_ASSERT(32 * p.args.nsg >= p.args.d_v / 4);

    ggml_metal_encoder_set_pipeline(enc, pipeline);
    ggml_metal_encoder_set_bytes(enc, &p.args, sizeof(p.args), 0);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(q), 1);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(k), 2);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(v), 3);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(mask), 4);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(regions), 5);
    ggml_metal_encoder_set_buffer(enc, bid_stat, 6);
    ggml_metal_encoder_set_buffer(enc, bid_part, 7);

    ggml_metal_encoder_set_threadgroup_memory_size(enc, laprox_attn_smem(p.args), 0);

    ggml_metal_encoder_dispatch_threadgroups(enc, p.args.n_chunk, (int) regions->ne[1], p.args.n_tokens, 32 * p.args.nsg, 1, 1);

    sync();

    pipeline = laprox_pipeline(lib, "kernel_laprox_attn_combine");

    p.args.nsg = laprox_max_nsg(pipeline, LAPROX_ATTN_NSG);

    ggml_metal_encoder_set_pipeline(enc, pipeline);
    ggml_metal_encoder_set_bytes(enc, &p.args, sizeof(p.args), 0);
    ggml_metal_encoder_set_buffer(enc, bid_stat, 1);
    ggml_metal_encoder_set_buffer(enc, bid_part, 2);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(sinks), 3);
    ggml_metal_encoder_set_buffer(enc, laprox_buffer(op), 4);

    ggml_metal_encoder_dispatch_threadgroups(enc, p.args.n_head * p.args.n_tokens, 1, 1, 32 * p.args.nsg, 1, 1);
}

int ggml_metal_op_laprox(
        ggml_metal_encoder_t          enc,
        ggml_metal_library_t          lib,
        const ggml_tensor *           op,
        const std::function<void()> & sync) {
    if (op->op == GGML_OP_LAPROX_SCORE) {
        laprox_encode_score(enc, lib, op, sync);
    } else {
        laprox_encode_attn(enc, lib, op, sync);
    }

    return 1;
}
