// what laprox.metal and its encoder (laprox-metal.cpp) agree on

#ifndef LAPROX_METAL_IMPL
#define LAPROX_METAL_IMPL

// function constants, see FC_* in ggml-metal-impl.h
#define FC_LAPROX 9000

// types of rows
#define LAPROX_ROW_F32  0
#define LAPROX_ROW_F16  1
#define LAPROX_ROW_BF16 2
#define LAPROX_ROW_Q8_0 3
#define LAPROX_ROW_Q4_0 4

// positions whose (max, sum) are kept between the passes of the scoring op
#define LAPROX_SCORE_CHUNK 256

// positions of one tile in threadgroup memory, by the head width
#define LAPROX_SCORE_TILE(d) ((d) <= 128 ? 32 : 16)

// mask columns of one threadgroup of the attention op
#define LAPROX_ATTN_CHUNK 128

// most query heads of a KV head
#define LAPROX_MAX_GQA 16

typedef struct {
    int32_t  n_kv;
    int32_t  n_gqa;
    int32_t  n_head;
    int32_t  n_chunk;
    int32_t  w;
    int32_t  n_blk; // blocks of 8 queries
    int32_t  d_k;
    int32_t  d_v;
    int32_t  nsg;   // simdgroups of a threadgroup
    int32_t  sinks; // 1: there are some
    float    scale;
    float    softcap;
    uint64_t nbq0;
    uint64_t nbq1;
    uint64_t nbq2;
    uint64_t nbk1;
    uint64_t nbk2;
    uint64_t nbv1;
    uint64_t nbv2;
    uint64_t nbm1;
    uint64_t nbg1;
    uint64_t nbg2;
} ggml_metal_kargs_laprox_score;

typedef struct {
    int32_t  n_mask;
    int32_t  n_gqa;
    int32_t  n_head;
    int32_t  n_tokens;
    int32_t  n_chunk;
    int32_t  d_k;
    int32_t  d_v;
    int32_t  nsg;   // simdgroups of a threadgroup
    int32_t  sinks; // 1: there are some
    float    scale;
    float    softcap;
    uint64_t nbq1;
    uint64_t nbq2;
    uint64_t nbk1;
    uint64_t nbv1;
    uint64_t nbm1;
} ggml_metal_kargs_laprox_attn;

#endif // LAPROX_METAL_IMPL
