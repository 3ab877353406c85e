#pragma once

// The own ops' cases of test-backend-ops, which includes this after its base class and its ways to fill a tensor.

// F32: as after a prompt, the last queries see each other causally
static void laprox_init_mask(ggml_tensor * t) {
    if (t->type == GGML_TYPE_F16) {
        init_tensor_kq_mask(t);
        return;
    }

    std::vector<float> data(ggml_nelements(t), 0.0f);
    for (int64_t i = 0; i < ggml_nelements(t); ++i) {
        if (i % t->ne[0] > t->ne[0] - t->ne[1] + i / t->ne[0]) {
            data[i] = -INFINITY;
        }
    }
    ggml_backend_tensor_set(t, data.data(), 0, ggml_nbytes(t));
}

// GGML_OP_LAPROX_SCORE
struct test_laprox_score : public test_case {
    const int64_t d;
    const int64_t n_head_kv;
    const int64_t n_gqa;
    const int64_t n_kv;
    const int64_t w;

    const ggml_type type_k;
    const ggml_type type_v;
    const bool      value;
    const float     softcap;
    const int       stat;
    const int       gqa;
    const int64_t   d_v;
    const ggml_type type_m;
    const bool      sinks;

    std::string vars() override {
        return VARS_TO_STR14(d, n_head_kv, n_gqa, n_kv, w, type_k, type_v, value, softcap, stat, gqa, d_v, type_m, sinks);
    }

    double max_nmse_err() override {
        return 1e-6;
    }

    uint64_t op_flops(ggml_tensor * t) override {
        GGML_UNUSED(t);
        return (2 * d * w + (value ? 2 * d_v * d_v : 0)) * n_kv * n_head_kv * n_gqa;
    }

    test_laprox_score(int64_t d, int64_t n_head_kv, int64_t n_gqa, int64_t n_kv, int64_t w, ggml_type type_k, ggml_type type_v,
            bool value = true, float softcap = 0.0f, int stat = GGML_LAPROX_SCORE_MAX, int gqa = GGML_LAPROX_SCORE_GQA_MEAN,
            int64_t d_v = 0, ggml_type type_m = GGML_TYPE_F16, bool sinks = false) :
        d(d), n_head_kv(n_head_kv), n_gqa(n_gqa), n_kv(n_kv), w(w), type_k(type_k), type_v(type_v), value(value), softcap(softcap), stat(stat), gqa(gqa),
        d_v(d_v ? d_v : d), type_m(type_m), sinks(sinks) {}

    ggml_tensor * build_graph(ggml_context * ctx) override {
        ggml_tensor * q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, n_head_kv * n_gqa, w);
        ggml_set_name(q, "q");

        ggml_tensor * k = ggml_new_tensor_3d(ctx, type_k, d, n_head_kv, n_kv);
        ggml_set_name(k, "k");

        ggml_tensor * m = ggml_new_tensor_2d(ctx, type_m, n_kv, w);
        ggml_set_name(m, "m");

        ggml_tensor * v = nullptr;
        ggml_tensor * g = nullptr;
        if (value) {
            v = ggml_new_tensor_3d(ctx, type_v, d_v, n_head_kv, n_kv);
            ggml_set_name(v, "v");

            // a Gram matrix is positive semi-definite, random numbers are not
            ggml_tensor * w_o = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d_v, d_v, n_head_kv * n_gqa);
            ggml_set_name(w_o, "w_o");

            g = ggml_mul_mat(ctx, w_o, w_o);
            v = ggml_permute(ctx, v, 0, 2, 1, 3);
        }

        ggml_tensor * out = ggml_laprox_score(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), ggml_permute(ctx, k, 0, 2, 1, 3), v, m, g,
                1.0f / sqrtf(d), softcap, (ggml_laprox_score_stat) stat, (ggml_laprox_score_gqa) gqa);
        if (sinks) {
            ggml_laprox_add_sinks(out, ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_head_kv * n_gqa));
        }
        ggml_set_name(out, "out");

        return out;
    }

    void initialize_tensors(ggml_context * ctx) override {
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != NULL; t = ggml_get_next_tensor(ctx, t)) {
            if (strcmp(t->name, "m") == 0) {
                laprox_init_mask(t);
            } else {
                init_tensor_uniform(t);
            }
        }
    }
};

// GGML_OP_LAPROX_ATTN
struct test_laprox_attn : public test_case {
    const int64_t d;
    const int64_t n_head_kv;
    const int64_t n_gqa;
    const int64_t n_mask;
    const int64_t n_tokens;

    const ggml_type type_k;
    const ggml_type type_v;
    const float     softcap;
    const int64_t   d_v;
    const bool      sinks;

    std::string vars() override {
        return VARS_TO_STR10(d, n_head_kv, n_gqa, n_mask, n_tokens, type_k, type_v, softcap, d_v, sinks);
    }

    double max_nmse_err() override {
        return 1e-6;
    }

    uint64_t op_flops(ggml_tensor * t) override {
        GGML_UNUSED(t);
        return 2 * (d + d_v) * n_mask * n_head_kv * n_gqa * n_tokens;
    }

    test_laprox_attn(int64_t d, int64_t n_head_kv, int64_t n_gqa, int64_t n_mask, int64_t n_tokens, ggml_type type_k, ggml_type type_v, float softcap = 0.0f,
            int64_t d_v = 0, bool sinks = false) :
        d(d), n_head_kv(n_head_kv), n_gqa(n_gqa), n_mask(n_mask), n_tokens(n_tokens), type_k(type_k), type_v(type_v), softcap(softcap), d_v(d_v ? d_v : d), sinks(sinks) {}

    // every head leaves out some more columns than the one before
    int64_t col(int64_t g) const { return g * n_mask / (n_head_kv + 1); }

    ggml_tensor * build_graph(ggml_context * ctx) override {
        int64_t n_rows = 0;
        for (int64_t g = 0; g < n_head_kv; ++g) {
            n_rows += n_mask - col(g) + 3;
        }

        ggml_tensor * q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, n_head_kv * n_gqa, n_tokens);
        ggml_set_name(q, "q");

        ggml_tensor * k = ggml_new_tensor_2d(ctx, type_k, d, n_rows);
        ggml_set_name(k, "k");

        ggml_tensor * v = ggml_new_tensor_2d(ctx, type_v, d_v, n_rows);
        ggml_set_name(v, "v");

        ggml_tensor * m = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_mask, n_tokens);
        ggml_set_name(m, "m");

        ggml_tensor * regions = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2, n_head_kv);
        ggml_set_name(regions, "regions");

        ggml_tensor * out = ggml_laprox_attn(ctx, q, k, v, m, regions, 1.0f / sqrtf(d), softcap);
        if (sinks) {
            ggml_laprox_add_sinks(out, ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_head_kv * n_gqa));
        }
        ggml_set_name(out, "out");

        return out;
    }

    void initialize_tensors(ggml_context * ctx) override {
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != NULL; t = ggml_get_next_tensor(ctx, t)) {
            if (strcmp(t->name, "regions") == 0) {
                std::vector<int32_t> data;
                int32_t              row = 1;
                for (int64_t g = 0; g < n_head_kv; ++g) {
                    data.push_back(row);
                    data.push_back(col(g));
                    row += n_mask - col(g) + 2;
                }
                ggml_backend_tensor_set(t, data.data(), 0, ggml_nbytes(t));
            } else if (strcmp(t->name, "m") == 0) {
                init_tensor_kq_mask(t);
            } else {
                init_tensor_uniform(t);
            }
        }
    }
};

using laprox_test_cases = std::vector<std::unique_ptr<test_case>>;

static void laprox_test_cases_eval(laprox_test_cases & test_cases) {
    for (int stat : { GGML_LAPROX_SCORE_MAX, GGML_LAPROX_SCORE_L2, GGML_LAPROX_SCORE_SUM }) {
        for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
            test_cases.emplace_back(new test_laprox_score(64, 3, 3, 512, 32, type, type, true, 0.0f, stat));
            test_cases.emplace_back(new test_laprox_score(64, 3, 3, 512, 32, type, type, false, 5.0f, stat));
        }
        for (int n_kv : { 1, 33, 257 }) {
            test_cases.emplace_back(new test_laprox_score(128, 2, 4, n_kv, 7, GGML_TYPE_Q8_0, GGML_TYPE_F16, true, 0.0f, stat));
        }
        for (bool value : { true, false }) {
            test_cases.emplace_back(new test_laprox_score(64, 2, 7, 300, 32, GGML_TYPE_F16, GGML_TYPE_F16, value, 0.0f, stat, GGML_LAPROX_SCORE_GQA_ATTENTION));
        }
        test_cases.emplace_back(new test_laprox_score(80, 4, 1, 512, 1, GGML_TYPE_F16, GGML_TYPE_F16, true, 0.0f, stat));
        test_cases.emplace_back(new test_laprox_score(256, 1, 4, 768, 512, GGML_TYPE_F16, GGML_TYPE_F16, true, 50.0f, stat));
        test_cases.emplace_back(new test_laprox_score(64, 3, 3, 300, 32, GGML_TYPE_F16, GGML_TYPE_F16, true, 0.0f, stat, GGML_LAPROX_SCORE_GQA_MEAN, 0, GGML_TYPE_F32, true));
    }
    for (int64_t d : { 96, 112, 192 }) {
        for (auto gqa : { GGML_LAPROX_SCORE_GQA_MEAN, GGML_LAPROX_SCORE_GQA_ATTENTION }) {
            test_cases.emplace_back(new test_laprox_score(d, 2, 3, 300, 32, GGML_TYPE_F16, GGML_TYPE_F16, true, 0.0f, GGML_LAPROX_SCORE_MAX, gqa, 0, GGML_TYPE_F32));
        }
    }
    for (int n_gqa : { 1, 2, 5, 8, 16 }) {
        test_cases.emplace_back(new test_laprox_score(128, 2, n_gqa, 400, 32, GGML_TYPE_F16, GGML_TYPE_F16, true, 0.0f, GGML_LAPROX_SCORE_MAX, GGML_LAPROX_SCORE_GQA_MEAN, 0, GGML_TYPE_F32));
    }
    for (int64_t d : { 96, 128, 192, 256 }) {
        for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
            test_cases.emplace_back(new test_laprox_score(d, 2, 4, 290, 32, type, GGML_TYPE_F16, true, 0.0f, GGML_LAPROX_SCORE_MAX, GGML_LAPROX_SCORE_GQA_MEAN, 0, GGML_TYPE_F32));
            test_cases.emplace_back(new test_laprox_score(d, 2, 4, 290, 32, GGML_TYPE_Q8_0, type, true, 0.0f, GGML_LAPROX_SCORE_MAX, GGML_LAPROX_SCORE_GQA_MEAN, 0, GGML_TYPE_F32));
            test_cases.emplace_back(new test_laprox_attn(d, 2, 4, 290, 1, GGML_TYPE_Q8_0, type));
        }
    }
    // K wider than V
    test_cases.emplace_back(new test_laprox_score(192, 2, 4, 300, 32, GGML_TYPE_F16, GGML_TYPE_F16, true, 0.0f, GGML_LAPROX_SCORE_MAX, GGML_LAPROX_SCORE_GQA_MEAN, 128));
    test_cases.emplace_back(new test_laprox_attn(192, 2, 4, 300, 1, GGML_TYPE_F16, GGML_TYPE_F16, 0.0f, 128));
    test_cases.emplace_back(new test_laprox_attn(64, 3, 3, 9000, 1, GGML_TYPE_F16, GGML_TYPE_F16, 0.0f, 0, true));
    test_cases.emplace_back(new test_laprox_attn(128, 2, 4, 300, 8, GGML_TYPE_F16, GGML_TYPE_Q8_0, 5.0f, 0, true));
    for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
        for (int64_t d : { 64, 96, 128, 192, 256 }) {
            test_cases.emplace_back(new test_laprox_attn(d, 3, 3, 700, 1, type, type));
        }
        test_cases.emplace_back(new test_laprox_attn(64, 2, 7, 1500, 4, type, GGML_TYPE_F16, 5.0f));
    }
    for (int n_gqa : { 1, 2, 4, 5, 8, 16 }) {
        test_cases.emplace_back(new test_laprox_attn(80, 2, n_gqa, 257, 1, GGML_TYPE_F16, GGML_TYPE_F16));
    }
    test_cases.emplace_back(new test_laprox_attn(112, 8, 4, 1, 1, GGML_TYPE_F16, GGML_TYPE_F16));
}

// SmolLM2-135M, an 8B model, and as many heads as it takes to leave the L2 of any card; scripts/gpu_check.py knows these
static void laprox_test_cases_perf(laprox_test_cases & test_cases) {
    test_cases.emplace_back(new test_laprox_score(64, 3, 3, 4096, 32, GGML_TYPE_F16, GGML_TYPE_F16));
    for (int64_t n_kv : { 4096, 8192, 32768 }) {
        test_cases.emplace_back(new test_laprox_score(128, 8, 4, n_kv, 32, GGML_TYPE_F16, GGML_TYPE_F16));
    }
    test_cases.emplace_back(new test_laprox_score(128, 128, 4, 8192, 32, GGML_TYPE_F16, GGML_TYPE_F16));
    test_cases.emplace_back(new test_laprox_score(128, 32, 4, 32768, 32, GGML_TYPE_F16, GGML_TYPE_F16));
    test_cases.emplace_back(new test_laprox_attn(64, 3, 3, 1024, 1, GGML_TYPE_F16, GGML_TYPE_F16));
    test_cases.emplace_back(new test_laprox_attn(128, 8, 4, 4096, 1, GGML_TYPE_F16, GGML_TYPE_F16));
}
