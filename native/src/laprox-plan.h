// laprox-plan.h - which rows of the KV cache stay: scores in, kept positions out
//
// A pure function of its arguments: no context, no model, no threads. docs/method.md has the definitions.

#pragma once

#include "laprox.h"

#include <string>

// Same arguments as laprox_plan() of laprox.h, checked here, except params.struct_size, which is the caller's business.
// On failure n_kept and pos are untouched and error holds one line.
laprox_status laprox_plan_impl(
        const laprox_plan_params & params,
        uint32_t                   n_layer,
        const uint32_t *           n_head_kv, // [n_layer]
        uint32_t                   n_cand,
        const float *              scores,    // [n_head][n_cand], n_head = sum of n_head_kv
        const float *              residual,  // [n_layer], only for LAPROX_NORMALIZE_RESIDUAL
        uint32_t *                 n_kept,    // [n_head]
        llama_pos *                pos,       // [params.n_keep], ascending in each head, head after head
        std::string &              error);

// Same for laprox_rank(): out [n_head][n_cand], which may be scores.
laprox_status laprox_rank_impl(
        const laprox_plan_params & params,
        uint32_t                   n_layer,
        const uint32_t *           n_head_kv,
        uint32_t                   n_cand,
        const float *              scores,
        const float *              residual,
        float *                    out,
        std::string &              error);
