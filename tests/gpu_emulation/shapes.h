// What a short run goes through before anything is drawn: between them, every value that a kernel branches on.

#pragma once

#include "ggml.h"
#include "reference.h"

#include <vector>

namespace shapes {

struct score {
    int             d_k, d_v; // d_v 0: no value factor
    int             n_gqa, w, n_kv;
    ggml_type       type_k, type_v;
    reference::stat what;
    bool            group;
};

static const std::vector<score> SCORE = {
    { 128, 128, 4,  8,   600, GGML_TYPE_F16,  GGML_TYPE_F16,  reference::MAX, false }, // what is scored by default
    { 64,  64,  11, 7,   300, GGML_TYPE_F32,  GGML_TYPE_BF16, reference::L2,  false },
    { 80,  80,  16, 9,   129, GGML_TYPE_BF16, GGML_TYPE_F16,  reference::SUM, true  }, // more rows than a tile of queries holds
    { 96,  96,  5,  5,   270, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, reference::MAX, true  },
    { 112, 112, 1,  33,  65,  GGML_TYPE_F16,  GGML_TYPE_F32,  reference::SUM, false },
    { 192, 64,  6,  1,   290, GGML_TYPE_Q4_0, GGML_TYPE_F16,  reference::MAX, false },
    { 256, 256, 13, 5,   33,  GGML_TYPE_F32,  GGML_TYPE_Q8_0, reference::L2,  true  },
    { 128, 0,   7,  4,   257, GGML_TYPE_F16,  GGML_TYPE_F16,  reference::SUM, false },
    { 64,  128, 2,  17,  1,   GGML_TYPE_Q8_0, GGML_TYPE_F16,  reference::MAX, false },
    { 96,  0,   4,  6,   520, GGML_TYPE_BF16, GGML_TYPE_F16,  reference::MAX, true  },
    { 64,  0,   1,  512, 33,  GGML_TYPE_F16,  GGML_TYPE_F16,  reference::L2,  false }, // the largest window
};

struct attn {
    int       d_k, d_v;
    int       n_gqa, n_tokens, n_mask;
    ggml_type type_k, type_v;
};

static const std::vector<attn> ATTN = {
    { 128, 128, 4,  1, 300,  GGML_TYPE_F16,  GGML_TYPE_F16  },
    { 64,  64,  1,  1, 8300, GGML_TYPE_F16,  GGML_TYPE_F16  }, // chunks of more than 64 columns, more of them than a warp has lanes
    { 80,  80,  11, 2, 100,  GGML_TYPE_BF16, GGML_TYPE_F32  },
    { 96,  96,  8,  1, 65,   GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 },
    { 112, 64,  16, 8, 31,   GGML_TYPE_F32,  GGML_TYPE_BF16 },
    { 192, 192, 6,  1, 257,  GGML_TYPE_Q4_0, GGML_TYPE_F16  },
    { 256, 256, 13, 1, 129,  GGML_TYPE_F16,  GGML_TYPE_Q4_0 },
    { 64,  128, 9,  3, 1,    GGML_TYPE_F16,  GGML_TYPE_F16  },
};

} // namespace shapes
