// A device to test against on a machine without one. It says that it is a GPU, and its memory is out of reach except
// while it copies or computes itself: whatever touches a tensor of it from outside ends the process. It computes by handing
// the graph to a CPU backend, so results are those of the CPU to the bit; it counts what crosses between host and device.
//
// GUARD_NO_COPY, not empty: its buffers do not copy from one to another, as those of some devices.
// GUARD_NAME is that of its registry, else GUARD. GUARD_DENY names ops, separated by commas, that it does not run,
// GUARD_FAIL such that it fails to, from the one that GUARD_FAIL_AT numbers on. Flash attention has the rules of ggml-cuda:
// its head widths, one mask for all heads, contiguous, strides that are multiples of 16 bytes, and, stricter than there,
// whole blocks of 256 rows.

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

//
// memory
//

struct guard_memory {
    void * addr;
    size_t size;
    int    n_open = 0;
};

static std::recursive_mutex guard_mutex;

static void guard_protect(guard_memory * mem, int prot) {
    if (mprotect(mem->addr, mem->size, prot) != 0) {
        perror("guard: mprotect");
        abort();
    }
}

static guard_memory * guard_memory_of(const ggml_tensor * tensor);

// within reach while one of these lives: the memory of these tensors
struct guard_open {
    std::vector<guard_memory *> all;

    explicit guard_open(const std::vector<const ggml_tensor *> & tensors) {
        guard_mutex.lock();
        for (const auto * tensor : tensors) {
            add(guard_memory_of(tensor));
        }
    }

    explicit guard_open(guard_memory * mem) {
        guard_mutex.lock();
        add(mem);
    }

    ~guard_open() {
        for (auto * mem : all) {
            if (--mem->n_open == 0) {
                guard_protect(mem, PROT_NONE);
            }
        }
        guard_mutex.unlock();
    }

    void add(guard_memory * mem) {
        if (!mem || std::find(all.begin(), all.end(), mem) != all.end()) {
            return;
        }
        if (mem->n_open++ == 0) {
            guard_protect(mem, PROT_READ | PROT_WRITE);
        }
        all.push_back(mem);
    }
};

//
// counters
//

struct guard_count {
    size_t n       = 0;
    size_t n_bytes = 0;
};

// "set", "get", "copy" with a tensor's name, "op" with an op's
static std::map<std::pair<std::string, std::string>, guard_count> guard_counts;

static void guard_note(const char * what, const char * name, size_t n_bytes) {
    auto & count = guard_counts[{ what, name }];

    count.n++;
    count.n_bytes += n_bytes;
}

extern "C" void guard_reset(void) {
    std::lock_guard<std::recursive_mutex> lock(guard_mutex);

    guard_counts.clear();
}

// lines of: what, calls, bytes, name; returns the size needed, the closing 0 included
extern "C" size_t guard_report(char * text, size_t size) {
    std::lock_guard<std::recursive_mutex> lock(guard_mutex);

    std::string res;
    for (const auto & [key, count] : guard_counts) {
        res += key.first + "\t" + std::to_string(count.n) + "\t" + std::to_string(count.n_bytes) + "\t" + key.second + "\n";
    }
    if (size > res.size()) {
        memcpy(text, res.c_str(), res.size() + 1);
    }
    return res.size() + 1;
}

//
// buffers
//

static void guard_buffer_free(ggml_backend_buffer_t buffer) {
    auto * mem = (guard_memory *) buffer->context;
    munmap(mem->addr, mem->size);
    delete mem;
}

static void * guard_buffer_get_base(ggml_backend_buffer_t buffer) {
    return ((guard_memory *) buffer->context)->addr;
}

static void guard_buffer_set(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    guard_open open({ tensor });
    guard_note("set", tensor->name, size);
    memcpy((char *) tensor->data + offset, data, size);
}

static void guard_buffer_get(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    guard_open open({ tensor });
    guard_note("get", tensor->name, size);
    memcpy(data, (const char *) tensor->data + offset, size);
}

static bool guard_buffer_cpy(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst);

static void guard_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    auto *     mem = (guard_memory *) buffer->context;
    guard_open open(mem);
    memset(mem->addr, value, mem->size);
}

static const ggml_backend_buffer_i guard_buffer_i = {
    /* .free_buffer   = */ guard_buffer_free,
    /* .get_base      = */ guard_buffer_get_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ nullptr, // not every device has it
    /* .set_tensor    = */ guard_buffer_set,
    /* .get_tensor    = */ guard_buffer_get,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ guard_buffer_cpy,
    /* .clear         = */ guard_buffer_clear,
    /* .reset         = */ nullptr,
};

static guard_memory * guard_memory_of(const ggml_tensor * tensor) {
    const auto * buf = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;

    return buf && buf->iface.get_base == guard_buffer_get_base ? (guard_memory *) buf->context : nullptr;
}

static bool guard_buffer_cpy(ggml_backend_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
    if (!guard_memory_of(src)) {
        return false;
    }
    guard_open open({ src, dst });
    guard_note("copy", dst->name, ggml_nbytes(src));
    memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
}

static const char * guard_buft_get_name(ggml_backend_buffer_type_t) {
    return "GUARD";
}

static ggml_backend_buffer_t guard_buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    auto * mem = new guard_memory { nullptr, std::max<size_t>(size, 1) };

    mem->addr = mmap(nullptr, mem->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mem->addr == MAP_FAILED) {
        delete mem;
        return nullptr;
    }
    memset(mem->addr, 0x7f, mem->size); // what a device hands out holds anything: NaN in most types
    guard_protect(mem, PROT_NONE);

    ggml_backend_buffer_i iface = guard_buffer_i;

    const char * no_copy = getenv("GUARD_NO_COPY");
    if (no_copy && *no_copy) {
        iface.cpy_tensor = nullptr;
    }

    return ggml_backend_buffer_init(buft, iface, mem, size);
}

static size_t guard_buft_get_alignment(ggml_backend_buffer_type_t) {
    return 128;
}

//
// device
//

static bool guard_named(const char * name, const ggml_tensor * op) {
    const char * env  = getenv(name);
    const auto   list = "," + std::string(env ? env : "") + ",";

    return list.find("," + std::string(ggml_op_desc(op)) + ",") != std::string::npos;
}

// widths of K and V that ggml-cuda has kernels for, at this many query heads per KV head
static bool guard_flash_attn_widths(int64_t d_k, int64_t d_v, int64_t n_gqa) {
    switch (d_k) {
        case 40:
        case 64:
        case 72:
        case 80:
        case 96:
        case 112:
        case 128:
        case 256:
            return d_v == d_k;
        case 192:
            return d_v == 128 && n_gqa % 8 == 0;
        case 320:
            return d_v == 256 && n_gqa % 32 == 0;
        case 512:
        case 576:
            return d_v == 512 && n_gqa > 1;
        default:
            return false;
    }
}

static bool guard_flash_attn(const ggml_tensor * op) {
    const ggml_tensor * mask = op->src[3];

    if (!guard_flash_attn_widths(op->src[1]->ne[0], op->src[2]->ne[0], op->src[0]->ne[2] / op->src[1]->ne[2])) {
        return false;
    }
    if (mask && (mask->ne[2] != 1 || !ggml_is_contiguous(mask) || mask->ne[0] != op->src[1]->ne[1])) {
        return false;
    }
    for (int j = 0; j < 4; ++j) {
        const auto * t = op->src[j];
        for (int i = 1; t && !ggml_is_quantized(t->type) && i < GGML_MAX_DIMS; ++i) {
            if (t->nb[i] % 16 != 0) {
                return false;
            }
        }
    }
    return op->src[1]->ne[1] % 256 == 0;
}

static bool guard_dev_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_CUSTOM:
        case GGML_OP_MAP_CUSTOM1:
        case GGML_OP_MAP_CUSTOM2:
        case GGML_OP_MAP_CUSTOM3:
            return false;
        case GGML_OP_FLASH_ATTN_EXT:
            if (!guard_flash_attn(op)) {
                return false;
            }
            break;
        default:
            break;
    }
    return !guard_named("GUARD_DENY", op) && ggml_backend_dev_supports_op(ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0), op);
}

static const char * guard_dev_get_name(ggml_backend_dev_t) {
    return "GUARD0";
}

static const char * guard_dev_get_description(ggml_backend_dev_t) {
    return "memory out of reach";
}

static void guard_dev_get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = *total = (size_t) 8 << 30;
}

static enum ggml_backend_dev_type guard_dev_get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void guard_dev_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = guard_dev_get_name(dev);
    props->description = guard_dev_get_description(dev);
    props->type        = guard_dev_get_type(dev);
    guard_dev_get_memory(dev, &props->memory_free, &props->memory_total);
}

static ggml_backend_buffer_type_t guard_dev_get_buffer_type(ggml_backend_dev_t dev) {
    static ggml_backend_buffer_type buft = {
        /* .iface   = */ { guard_buft_get_name, guard_buft_alloc, guard_buft_get_alignment, nullptr, nullptr, nullptr },
        /* .device  = */
        dev,
        /* .context = */ nullptr,
    };

    return &buft;
}

static bool guard_dev_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == guard_dev_get_buffer_type(dev);
}

//
// backend
//

static const char * guard_backend_get_name(ggml_backend_t) {
    return "GUARD0";
}

static void guard_backend_free(ggml_backend_t backend) {
    ggml_backend_free((ggml_backend_t) backend->context);
    delete backend;
}

static ggml_status guard_backend_graph_compute(ggml_backend_t backend, ggml_cgraph * gf) {
    std::vector<const ggml_tensor *> tensors;
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const auto * node = ggml_graph_node(gf, i);
        tensors.push_back(node);
        for (const auto * src : node->src) {
            if (src) {
                tensors.push_back(src);
            }
        }
    }

    guard_open open(tensors);
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        guard_note("op", ggml_op_desc(ggml_graph_node(gf, i)), 0);
        if (guard_named("GUARD_FAIL", ggml_graph_node(gf, i))) {
            static int n = 0;

            const char * at = getenv("GUARD_FAIL_AT");
            if (n++ >= (at ? atoi(at) : 0)) {
                return GGML_STATUS_FAILED;
            }
        }
    }
    return ggml_backend_graph_compute((ggml_backend_t) backend->context, gf);
}

static ggml_backend_t guard_dev_init(ggml_backend_dev_t dev, const char *) {
    static ggml_guid guid = { 'g', 'u', 'a', 'r', 'd' };

    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, 1);

    ggml_backend_i iface = {};
    iface.get_name       = guard_backend_get_name;
    iface.free           = guard_backend_free;
    iface.graph_compute  = guard_backend_graph_compute;

    return new ggml_backend { &guid, iface, dev, cpu };
}

//
// registry
//

static ggml_backend_dev_t guard_reg_get_device(ggml_backend_reg_t reg, size_t) {
    static ggml_backend_device dev = [reg] {
        ggml_backend_device res = {};

        res.iface.get_name        = guard_dev_get_name;
        res.iface.get_description = guard_dev_get_description;
        res.iface.get_memory      = guard_dev_get_memory;
        res.iface.get_type        = guard_dev_get_type;
        res.iface.get_props       = guard_dev_get_props;
        res.iface.init_backend    = guard_dev_init;
        res.iface.get_buffer_type = guard_dev_get_buffer_type;
        res.iface.supports_op     = guard_dev_supports_op;
        res.iface.supports_buft   = guard_dev_supports_buft;
        res.reg                   = reg;

        return res;
    }();

    return &dev;
}

extern "C" ggml_backend_reg_t ggml_backend_init(void) {
    static ggml_backend_reg reg = {
        /* .api_version = */ GGML_BACKEND_API_VERSION,
        /* .iface       = */ {
                              [](ggml_backend_reg_t) {
                    const char * name = getenv("GUARD_NAME");
                    return name && *name ? name : "GUARD";
                },
                              [](ggml_backend_reg_t) { return (size_t) 1; },
                              guard_reg_get_device,
                              [](ggml_backend_reg_t, const char *) { return (void *) nullptr; },
                              },
        /* .context     = */
        nullptr,
    };

    return &reg;
}
