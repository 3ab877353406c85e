#include "laprox-kv.h"
#include "laprox-plan.h"

#include "llama-context.h"
#include "llama-impl.h"

#include "laprox-build-info.h"

#include <algorithm>
#include <cstring>
#include <new>

//
// errors
//

static thread_local std::string laprox_error_text;

void laprox_set_error(const std::string & text) {
    laprox_error_text = text;
}

const char * laprox_last_error(void) {
    return laprox_error_text.c_str();
}

// no exception leaves the C interface
template<typename F>
static int32_t laprox_guard(F && f) {
    try {
        f();

        return LAPROX_OK;
    } catch (const laprox_error & err) {
        laprox_set_error(err.text);

        return err.status;
    } catch (const std::bad_alloc &) {
        laprox_set_error("out of memory");

        return LAPROX_E_ALLOC;
    } catch (const std::exception & err) {
        laprox_set_error(err.what());

        return LAPROX_E_COMPUTE;
    }
}

// a struct of the caller, which may be older (shorter) than ours: what it lacks keeps its default
template<typename T>
static T laprox_read(const T * src, const T & defaults) {
    if (!src) {
        laprox_throw(LAPROX_E_ARG, "a parameter struct is NULL; fill it with its *_default_params()");
    }
    if (src->struct_size < sizeof(size_t) || src->struct_size > sizeof(T)) {
        laprox_throw(LAPROX_E_ARG, format("struct_size is %zu, at most %zu is known; fill the struct with its *_default_params()", src->struct_size, sizeof(T)));
    }

    T res = defaults;
    memcpy(&res, src, src->struct_size);
    res.struct_size = sizeof(T);

    return res;
}

template<typename T>
static void laprox_write(T * dst, T src) {
    if (!dst || dst->struct_size < sizeof(size_t) || dst->struct_size > sizeof(T)) {
        laprox_throw(LAPROX_E_ARG, format("set struct_size of the result to its size (at most %zu)", sizeof(T)));
    }

    src.struct_size = dst->struct_size;
    memcpy(dst, &src, dst->struct_size);
}

static laprox_kv & laprox_get(llama_context * ctx) {
    auto * lx = ctx ? laprox_kv::from(ctx->get_memory()) : nullptr;
    if (!lx) {
        laprox_throw(LAPROX_E_STATE, "eviction is off in this context; call laprox_set_next() before it is made");
    }

    lx->lctx = ctx;

    return *lx;
}

//
// about
//

uint32_t laprox_abi_version(void) {
    return LAPROX_ABI_VERSION;
}

const char * laprox_build_info(void) {
    return LAPROX_BUILD_INFO;
}

size_t laprox_sizeof(const char * llama_struct) {
    const struct {
        const char * name;
        size_t       size;
    } known[] = {
        { "llama_model_params",         sizeof(llama_model_params)         },
        { "llama_context_params",       sizeof(llama_context_params)       },
        { "llama_batch",                sizeof(llama_batch)                },
        { "llama_token_data",           sizeof(llama_token_data)           },
        { "llama_token_data_array",     sizeof(llama_token_data_array)     },
        { "llama_sampler_chain_params", sizeof(llama_sampler_chain_params) },
    };

    for (const auto & k : known) {
        if (llama_struct && strcmp(k.name, llama_struct) == 0) {
            return k.size;
        }
    }

    return 0;
}

//
// defaults
//

static laprox_context_params laprox_context_defaults() {
    return {
        /*.struct_size    =*/sizeof(laprox_context_params),
        /*.n_reserve      =*/256,
        /*.attention_path =*/LAPROX_PATH_AUTO,
    };
}

static laprox_score_params laprox_score_defaults() {
    return {
        /*.struct_size =*/sizeof(laprox_score_params),
        /*.attention   =*/LAPROX_ATTENTION_MAX,
        /*.value       =*/LAPROX_VALUE_L2,
        /*.gqa         =*/LAPROX_GQA_MEAN,
        /*.composed    =*/false,
    };
}

static laprox_plan_params laprox_plan_defaults() {
    return {
        /*.struct_size =*/sizeof(laprox_plan_params),
        /*.pool        =*/LAPROX_POOL_REACH,
        /*.pool_size   =*/12,
        /*.pool_decay  =*/0.3f,
        /*.normalize   =*/LAPROX_NORMALIZE_RESIDUAL,
        /*.alloc       =*/LAPROX_ALLOC_MODEL,
        /*.n_sink      =*/4,
        /*.n_keep      =*/0,
    };
}

static laprox_pages_params laprox_pages_defaults() {
    return {
        /*.struct_size   =*/sizeof(laprox_pages_params),
        /*.page_size     =*/16,
        /*.n_pages_min   =*/3,
        /*.n_layer_dense =*/2,
        /*.n_rows        =*/0,
    };
}

int32_t laprox_context_default_params(laprox_context_params * params) {
    return laprox_guard([&] { laprox_write(params, laprox_context_defaults()); });
}

int32_t laprox_score_default_params(laprox_score_params * params) {
    return laprox_guard([&] { laprox_write(params, laprox_score_defaults()); });
}

int32_t laprox_plan_default_params(laprox_plan_params * params) {
    return laprox_guard([&] { laprox_write(params, laprox_plan_defaults()); });
}

int32_t laprox_pages_default_params(laprox_pages_params * params) {
    return laprox_guard([&] { laprox_write(params, laprox_pages_defaults()); });
}

//
// context
//

int32_t laprox_set_next(const laprox_context_params * params) {
    laprox_set_error(""); // a context that then fails for another reason has no text of ours

    return laprox_guard([&] {
        if (!params) {
            laprox_set_next_params(nullptr);
            return;
        }

        const auto cur = laprox_read(params, laprox_context_defaults());
        if (cur.n_reserve < 1 || cur.n_reserve > (1u << 20)) {
            laprox_throw(LAPROX_E_ARG, format("n_reserve is %u, expected 1 to %u rows", cur.n_reserve, 1u << 20));
        }

        if (cur.attention_path < LAPROX_PATH_AUTO || cur.attention_path > LAPROX_PATH_RAGGED_OP) {
            laprox_throw(LAPROX_E_ARG, format("unknown attention_path %d", cur.attention_path));
        }

        laprox_set_next_params(&cur);
    });
}

bool laprox_enabled(const llama_context * ctx) {
    return ctx && laprox_kv::from(ctx->get_memory());
}

//
// one prompt
//

int32_t laprox_reserve(llama_context * ctx, uint32_t n_tokens) {
    return laprox_guard([&] {
        laprox_get(ctx).reserve(n_tokens);
    });
}

int32_t laprox_observe(llama_context * ctx, uint32_t n_window) {
    return laprox_guard([&] {
        auto & lx = laprox_get(ctx);

        if (n_window > ctx->n_ubatch()) {
            laprox_throw(LAPROX_E_ARG, format("a window of %u tokens does not fit into one ubatch of %u; raise n_ubatch and n_batch", n_window, ctx->n_ubatch()));
        }

        lx.observe(n_window);
    });
}

int32_t laprox_score(llama_context * ctx, const laprox_score_params * params) {
    return laprox_guard([&] {
        laprox_get(ctx).score(laprox_read(params, laprox_score_defaults()));
    });
}

int32_t laprox_accumulate(llama_context * ctx) {
    return laprox_guard([&] {
        laprox_get(ctx).accumulate();
    });
}

int32_t laprox_get_accumulated(llama_context * ctx, uint32_t * n_tokens) {
    return laprox_guard([&] {
        const auto & lx = laprox_get(ctx);

        if (!n_tokens) {
            laprox_throw(LAPROX_E_ARG, "n_tokens must not be NULL");
        }

        *n_tokens = lx.n_total;
    });
}

int32_t laprox_get_shape(llama_context * ctx, laprox_shape * shape) {
    return laprox_guard([&] {
        const auto & lx = laprox_get(ctx);

        laprox_write(shape, laprox_shape {
                                    /*.struct_size =*/sizeof(laprox_shape),
                                    /*.n_layer     =*/(uint32_t) lx.layers.size(),
                                    /*.n_head_kv   =*/(uint32_t) lx.n_head_kv_total(),
                                    /*.n_window    =*/lx.scored ? lx.n_window : 0,
                                    /*.n_cand      =*/lx.scored ? lx.n_prompt - lx.n_window : 0,
                                    /*.n_head      =*/(uint32_t) lx.n_head_total(),
                                    /*.n_score     =*/lx.scored ? (uint32_t) lx.n_score() : 0,
                            });
    });
}

static void laprox_expect(const void * dst, size_t n, size_t n_want, const char * what) {
    if (!dst || n != n_want) {
        laprox_throw(LAPROX_E_ARG, format("room for %zu %s is needed, got %zu", n_want, what, dst ? n : 0));
    }
}

int32_t laprox_get_layers(llama_context * ctx, int32_t * il, uint32_t * n_head_kv, size_t n_layer) {
    return laprox_guard([&] {
        const auto & lx = laprox_get(ctx);

        laprox_expect(il && n_head_kv ? il : nullptr, n_layer, lx.layers.size(), "layers");

        for (const auto & layer : lx.layers) {
            *il++        = layer.il;
            *n_head_kv++ = layer.n_head_kv;
        }
    });
}

int32_t laprox_get_device(llama_context * ctx, uint32_t ikv, char * name, size_t n) {
    return laprox_guard([&] {
        const auto & lx = laprox_get(ctx);

        if (ikv >= lx.layers.size()) {
            laprox_throw(LAPROX_E_ARG, format("evictable layer %u of %zu", ikv, lx.layers.size()));
        }

        const std::string text = ggml_backend_dev_name(lx.layers[ikv].dev);

        if (!name || n <= text.size()) {
            laprox_throw(LAPROX_E_ARG, format("room for %zu characters is needed, got %zu", text.size() + 1, name ? n : 0));
        }

        memcpy(name, text.c_str(), text.size() + 1);
    });
}

static void laprox_need_scores(const laprox_kv & lx) {
    if (!lx.scored) {
        laprox_throw(LAPROX_E_NO_SCORES, "there are no scores; observe a window and call laprox_score() first");
    }
}

int32_t laprox_get_scores(llama_context * ctx, float * scores, size_t n) {
    return laprox_guard([&] {
        const auto & lx = laprox_get(ctx);

        laprox_need_scores(lx);
        laprox_expect(scores, n, lx.scores.size(), "scores");

        std::copy(lx.scores.begin(), lx.scores.end(), scores);
    });
}

int32_t laprox_get_residual(llama_context * ctx, float * residual, size_t n_layer) {
    return laprox_guard([&] {
        const auto & lx = laprox_get(ctx);

        if (lx.n_prompt == 0 || lx.ragged()) {
            laprox_throw(LAPROX_E_NO_SCORES, "no observation window was decoded, or its prompt is evicted already");
        }
        laprox_expect(residual, n_layer, lx.layers.size(), "layers");

        ctx->synchronize();

        const auto res = lx.mean_residual();

        std::copy(res.begin(), res.end(), residual);
    });
}

int32_t laprox_get_rows(llama_context * ctx, int32_t kind, uint32_t ikv, uint32_t * dims, float * dst, size_t n) {
    return laprox_guard([&] {
        const auto & lx = laprox_get(ctx);

        if (!dims) {
            laprox_throw(LAPROX_E_ARG, "dims must not be NULL");
        }

        const auto size = lx.rows_shape(kind, ikv);

        if (dst) {
            laprox_expect(dst, n, (size_t) size[0] * size[1] * size[2], "values");

            lx.get_rows(kind, ikv, dst);
        }

        std::copy(size.begin(), size.end(), dims);
    });
}

int32_t laprox_evict(llama_context * ctx, const laprox_plan_params * params, int32_t store) {
    return laprox_guard([&] {
        auto & lx = laprox_get(ctx);

        if (lx.ragged()) {
            laprox_throw(LAPROX_E_STATE, "the cache is already evicted; clear it first");
        }
        laprox_need_scores(lx);
        if (lx.n_score() != lx.n_head_kv_total()) {
            laprox_throw(LAPROX_E_STATE, "the scores are per query head (LAPROX_GQA_NONE); score per KV head, then evict");
        }

        const auto plan = laprox_read(params, laprox_plan_defaults());

        const uint32_t n_cand = lx.n_prompt - lx.n_window;

        if (plan.n_keep > lx.n_head_kv_total() * n_cand) {
            laprox_throw(LAPROX_E_ARG, format("n_keep is %llu, there are %llu candidates", (unsigned long long) plan.n_keep, (unsigned long long) lx.n_head_kv_total() * n_cand));
        }

        const int64_t t_start_us = ggml_time_us();

        std::vector<uint32_t> n_head_kv;
        for (const auto & layer : lx.layers) {
            n_head_kv.push_back(layer.n_head_kv);
        }

        std::vector<uint32_t>  n_kept(lx.n_head_kv_total());
        std::vector<llama_pos> pos(std::max<uint64_t>(1, plan.n_keep));

        std::string error;

        const auto status = laprox_plan_impl(plan, n_head_kv.size(), n_head_kv.data(), n_cand,
                lx.scores.data(), lx.residual.data(), n_kept.data(), pos.data(), error);
        if (status != LAPROX_OK) {
            laprox_throw(status, error);
        }

        lx.stats.t_plan_ms = (ggml_time_us() - t_start_us) / 1000.0;

        lx.commit(n_kept.data(), pos.data(), store);
    });
}

int32_t laprox_set_kept(llama_context * ctx, const uint32_t * n_kept, const llama_pos * pos, int32_t store) {
    return laprox_guard([&] {
        auto & lx = laprox_get(ctx);

        if (!n_kept || !pos) {
            laprox_throw(LAPROX_E_ARG, "n_kept and pos must not be NULL");
        }

        lx.commit(n_kept, pos, store);
    });
}

int32_t laprox_restore(llama_context * ctx) {
    return laprox_guard([&] {
        laprox_get(ctx).restore();
    });
}

int32_t laprox_get_kept(llama_context * ctx, uint32_t * n_kept, llama_pos * pos, size_t n) {
    return laprox_guard([&] {
        const auto & lx = laprox_get(ctx);

        if (!lx.evicted()) {
            laprox_throw(LAPROX_E_STATE, "the cache is not evicted");
        }
        if (!n_kept) {
            laprox_throw(LAPROX_E_ARG, "n_kept must not be NULL");
        }

        size_t n_total = 0;
        for (const auto & layer : lx.layers) {
            for (const auto & kept : layer.kept) {
                *n_kept++ = kept.size();
                n_total += kept.size();
            }
        }

        if (!pos) {
            return;
        }

        laprox_expect(pos, n, n_total, "positions");

        for (const auto & layer : lx.layers) {
            for (const auto & kept : layer.kept) {
                pos = std::copy(kept.begin(), kept.end(), pos);
            }
        }
    });
}

int32_t laprox_get_stats(llama_context * ctx, laprox_stats * stats) {
    return laprox_guard([&] {
        const auto & lx = laprox_get(ctx);

        laprox_stats res = lx.stats;

        res.n_appended  = lx.n_tail() > res.n_window && lx.evicted() ? lx.n_tail() - res.n_window : 0;
        res.bytes_now   = lx.n_bytes_now();
        res.bytes_other = lx.n_bytes_other();
        res.bytes_aside = lx.n_bytes_aside();

        res.n_layer_device    = lx.n_layer_device();
        res.n_layer_ragged_op = lx.n_layer_ragged_op();

        if (lx.pages) {
            res.rows_read   = lx.pages->n_rows_read();
            res.rows_dense  = lx.pages->n_rows_dense();
            res.bytes_pages = lx.pages->n_bytes();
        }

        laprox_write(stats, res);
    });
}

int32_t laprox_set_pages(llama_context * ctx, const laprox_pages_params * params) {
    return laprox_guard([&] {
        auto & lx = laprox_get(ctx);

        if (!params) {
            lx.set_pages(nullptr);
            return;
        }

        const auto cur = laprox_read(params, laprox_pages_defaults());
        if (cur.page_size < 1 || cur.page_size > 1024) {
            laprox_throw(LAPROX_E_ARG, format("page_size is %u, expected 1 to 1024 rows", cur.page_size));
        }
        if (cur.n_pages_min < 1) {
            laprox_throw(LAPROX_E_ARG, "n_pages_min is 0, expected 1 page or more: the newest one is always read");
        }
        if (cur.n_rows < 1) {
            laprox_throw(LAPROX_E_ARG, "n_rows is 0, expected the number of rows that a query head attends to");
        }

        lx.set_pages(&cur);
    });
}

int32_t laprox_set_reference_kernels(llama_context * ctx, bool enable) {
    return laprox_guard([&] {
        laprox_get(ctx);

        auto * sched = ctx->get_sched();

        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
            auto * backend = ggml_backend_sched_get_backend(sched, i);
            auto * dev     = ggml_backend_get_device(backend);

            if (ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
                continue;
            }

            auto * set_use_ref = (void (*)(ggml_backend_t, bool)) ggml_backend_reg_get_proc_address(
                    ggml_backend_dev_backend_reg(dev), "ggml_backend_cpu_set_use_ref");
            if (!set_use_ref) {
                laprox_throw(LAPROX_E_UNSUPPORTED, "this build's CPU backend has no reference kernels");
            }

            set_use_ref(backend, enable);
        }
    });
}

//
// the plan alone
//

int32_t laprox_plan(
        const laprox_plan_params * params,
        uint32_t                   n_layer,
        const uint32_t *           n_head_kv,
        uint32_t                   n_cand,
        const float *              scores,
        const float *              residual,
        uint32_t *                 n_kept,
        llama_pos *                pos) {
    return laprox_guard([&] {
        const auto plan = laprox_read(params, laprox_plan_defaults());

        std::string error;

        const auto status = laprox_plan_impl(plan, n_layer, n_head_kv, n_cand, scores, residual, n_kept, pos, error);
        if (status != LAPROX_OK) {
            laprox_throw(status, error);
        }
    });
}

int32_t laprox_rank(
        const laprox_plan_params * params,
        uint32_t                   n_layer,
        const uint32_t *           n_head_kv,
        uint32_t                   n_cand,
        const float *              scores,
        const float *              residual,
        float *                    out) {
    return laprox_guard([&] {
        const auto plan = laprox_read(params, laprox_plan_defaults());

        std::string error;

        const auto status = laprox_rank_impl(plan, n_layer, n_head_kv, n_cand, scores, residual, out, error);
        if (status != LAPROX_OK) {
            laprox_throw(status, error);
        }
    });
}
