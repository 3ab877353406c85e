// the kernels of laprox.metal by their names, for metal_device.cpp

#pragma once

#include "metal_emulator.h"

#include <functional>
#include <map>
#include <string>

struct kernel_arguments {
    const void * bytes;       // [[buffer(0)]]
    char *       buffers[16]; // from [[buffer(1)]] on
};

typedef std::function<void(const kernel_arguments & a, volatile char * shmem, const emulator::threads & t)> kernel_function;

const std::map<std::string, kernel_function> & metal_kernels();

// the value of a function constant
void metal_set_constant(int index, int value);
