// a Metal device for the encoder: ggml-metal-device.h on the emulator

#pragma once

#include "ggml-metal-device.h"
#include "metal_emulator.h"

#include <string>
#include <utility>
#include <vector>

struct ggml_metal_buffer {
    char * base;
};

struct ggml_metal_library {
    int max_threads; // of every pipeline
};

struct ggml_metal_encoder {
    emulator::schedule schedule;
    uint32_t           seed;

    struct dispatch {
        ggml_metal_pipeline_t             pipeline;
        std::vector<char>                 bytes;
        std::vector<ggml_metal_buffer_id> buffers;
        size_t                            n_shmem;
        unsigned                          n_groups[3];
        int                               n_threads;
    };

    dispatch              next;  // as set so far
    std::vector<dispatch> queue; // since the last barrier: in any order

    void flush();
};
