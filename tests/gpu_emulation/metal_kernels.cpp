#include "metal_kernels.h"

#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

// from here on words of Metal are macros
#include "laprox.metal"

#undef kernel
#undef device
#undef constant
#undef thread
#undef threadgroup

template<typename T>
constexpr bool is_shmem = std::is_same_v<T, volatile char *>;
template<typename T>
constexpr bool is_buffer = std::is_pointer_v<T> && !is_shmem<T>;
template<typename T>
constexpr bool is_index = std::is_same_v<T, ushort>;

// which of its kind parameter I is: buffers are bound, and thread indices follow each other, in the order of declaration
template<template<typename> class KIND, typename... P>
constexpr int count_before(size_t i) {
    const bool is[] = { KIND<P>::value... };
    int        n    = 0;
    for (size_t j = 0; j < i; ++j) {
        n += is[j];
    }
    return n;
}

template<typename T>
struct buffer_kind : std::bool_constant<is_buffer<T>> {};
template<typename T>
struct index_kind : std::bool_constant<is_index<T>> {};

template<typename T>
static T argument(const kernel_arguments & a, volatile char * shmem, const emulator::threads & t, int i_buffer, int i_index) {
    if constexpr (std::is_reference_v<T>) {
        return *(std::remove_reference_t<T> *) a.bytes;
    } else if constexpr (is_shmem<T>) {
        return shmem;
    } else if constexpr (is_buffer<T>) {
        return (T) a.buffers[1 + i_buffer];
    } else if constexpr (is_index<T>) {
        const ushort index[] = { t.tiitg, t.tiisg, t.sgitg };
        return index[i_index];
    } else {
        return T { t.group[0], t.group[1], t.group[2] };
    }
}

template<typename... P, size_t... I>
static kernel_function bind_kernel(void (*f)(P...), std::index_sequence<I...>) {
    return [f](const kernel_arguments & a, volatile char * shmem, const emulator::threads & t) {
        f(argument<P>(a, shmem, t, count_before<buffer_kind, P...>(I), count_before<index_kind, P...>(I))...);
    };
}

template<typename... P>
static kernel_function bind_kernel(void (*f)(P...)) {
    return bind_kernel(f, std::index_sequence_for<P...>());
}

// clang-format off
#define WIDTH(d) \
    { "kernel_laprox_score_stats_d" #d, bind_kernel(kernel_laprox_score_stats<d>) }, \
    { "kernel_laprox_score_d" #d, bind_kernel(kernel_laprox_score<d>) }
// clang-format on

const std::map<std::string, kernel_function> & metal_kernels() {
    static const std::map<std::string, kernel_function> res = {
        { "kernel_laprox_score_prep",   bind_kernel(kernel_laprox_score_prep)   },
        { "kernel_laprox_score_lse",    bind_kernel(kernel_laprox_score_lse)    },
        { "kernel_laprox_attn",         bind_kernel(kernel_laprox_attn)         },
        { "kernel_laprox_attn_combine", bind_kernel(kernel_laprox_attn_combine) },
        WIDTH(64),
        WIDTH(80),
        WIDTH(96),
        WIDTH(112),
        WIDTH(128),
        WIDTH(192),
        WIDTH(256),
    };
    return res;
}

void metal_set_constant(int index, int value) {
    int * const constants[] = {
        &FC_laprox_type_k,
        &FC_laprox_type_v,
        &FC_laprox_mask,
        &FC_laprox_stat,
        &FC_laprox_group,
        &FC_laprox_value,
        &FC_laprox_softcap,
        &FC_laprox_n_gqa,
    };
    const int i = index - FC_LAPROX;
    if (i < 0 || i >= (int) (sizeof(constants) / sizeof(constants[0]))) {
        emulator::fail("no such function constant");
    }
    *constants[i] = value;
}
