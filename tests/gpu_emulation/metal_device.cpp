#include "metal_device.h"

#include "metal_kernels.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>

struct ggml_metal_cv {
    std::map<int, int> values;
};

struct ggml_metal_pipeline {
    kernel_function    f;
    std::map<int, int> constants;
    int                max_threads;
};

static std::map<std::string, std::unique_ptr<ggml_metal_pipeline>> pipelines;

ggml_metal_cv_t ggml_metal_cv_init(void) {
    return new ggml_metal_cv;
}

void ggml_metal_cv_free(ggml_metal_cv_t cv) {
    delete cv;
}

void ggml_metal_cv_set_int32(ggml_metal_cv_t cv, int32_t value, int32_t idx) {
    cv->values[idx] = value;
}

static ggml_metal_pipeline_with_params with_params(ggml_metal_pipeline_t pipeline) {
    return { pipeline, 0, 0, 0, 0, false, false };
}

ggml_metal_pipeline_with_params ggml_metal_library_get_pipeline(ggml_metal_library_t lib, const char * name) {
    const auto it = pipelines.find(name);
    if (it == pipelines.end()) {
        return with_params(nullptr);
    }
    it->second->max_threads = lib->max_threads;
    return with_params(it->second.get());
}

ggml_metal_pipeline_with_params ggml_metal_library_compile_pipeline(ggml_metal_library_t lib, const char * base, const char * name, ggml_metal_cv_t cv) {
    const auto it = metal_kernels().find(base);
    if (it == metal_kernels().end()) {
        emulator::fail(base);
    }
    std::unique_ptr<ggml_metal_pipeline> & res = pipelines[name];
    res.reset(new ggml_metal_pipeline { it->second, cv ? cv->values : std::map<int, int>(), lib->max_threads });
    return with_params(res.get());
}

int ggml_metal_pipeline_max_theads_per_threadgroup(ggml_metal_pipeline_with_params pipeline) {
    return pipeline.pipeline->max_threads;
}

void ggml_metal_encoder_set_pipeline(ggml_metal_encoder_t encoder, ggml_metal_pipeline_with_params pipeline) {
    // nothing of an earlier dispatch is left: what a kernel needs is set for it
    encoder->next          = {};
    encoder->next.pipeline = pipeline.pipeline;
}

void ggml_metal_encoder_set_bytes(ggml_metal_encoder_t encoder, void * data, size_t size, int idx) {
    if (idx != 0) {
        emulator::fail("bytes are expected at index 0");
    }
    encoder->next.bytes.assign((char *) data, (char *) data + size);
}

void ggml_metal_encoder_set_buffer(ggml_metal_encoder_t encoder, ggml_metal_buffer_id buffer, int idx) {
    // aligned to what the kernel loads from it: nothing is smaller than an F16
    if (buffer.offs % 2 != 0) {
        emulator::fail("the offset of a buffer is a multiple of 2");
    }
    encoder->next.buffers.resize(std::max(encoder->next.buffers.size(), (size_t) idx + 1));
    encoder->next.buffers[idx] = buffer;
}

void ggml_metal_encoder_set_threadgroup_memory_size(ggml_metal_encoder_t encoder, size_t size, int /*idx*/) {
    if (size % 16 != 0 || size > 32768) {
        emulator::fail("threadgroup memory: a multiple of 16 bytes, up to 32 KiB");
    }
    encoder->next.n_shmem = size;
}

void ggml_metal_encoder_dispatch_threadgroups(ggml_metal_encoder_t encoder, int tg0, int tg1, int tg2, int tptg0, int tptg1, int tptg2) {
    ggml_metal_encoder::dispatch & d = encoder->next;

    d.n_groups[0] = tg0;
    d.n_groups[1] = tg1;
    d.n_groups[2] = tg2;
    d.n_threads   = tptg0 * tptg1 * tptg2;
    if (d.n_threads > d.pipeline->max_threads) {
        emulator::fail("more threads than the pipeline allows");
    }
    encoder->queue.push_back(d);
}

void ggml_metal_encoder::flush() {
    std::mt19937 rng(seed);
    if (schedule == emulator::schedule::backward) {
        std::reverse(queue.begin(), queue.end());
    } else if (schedule == emulator::schedule::shuffled) {
        std::shuffle(queue.begin(), queue.end(), rng);
    }
    for (const dispatch & d : queue) {
        kernel_arguments a = { d.bytes.data(), {} };
        for (size_t i = 1; i < d.buffers.size(); ++i) {
            a.buffers[i] = (char *) d.buffers[i].metal + d.buffers[i].offs;
        }
        for (int i = 0; i < 8; ++i) {
            metal_set_constant(9000 + i, -12345); // not set
        }
        for (const auto & [index, value] : d.pipeline->constants) {
            metal_set_constant(index, value);
        }
        const kernel_function & f = d.pipeline->f;
        emulator::run([&](volatile char * shmem, const emulator::threads & t) { f(a, shmem, t); }, d.n_groups, d.n_threads, d.n_shmem, schedule, seed);
    }
    queue.clear();
}

ggml_metal_buffer_id ggml_metal_buffer_get_id(ggml_metal_buffer_t buf, const ggml_tensor * t) {
    return { buf->base, (size_t) ((char *) t->data - buf->base) };
}
