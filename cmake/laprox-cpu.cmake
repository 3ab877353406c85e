# Which CPU features the build may use. Sets GGML_NATIVE and the GGML_* feature options, and for the build info:
#   LAPROX_CPU_TUNING   - native, probed, portable or user
#   LAPROX_CPU_FEATURES - probed features that run here
#   LAPROX_CPU_REFUSED  - probed features that do not
#
# Plain variables, not cache entries: the choice is made anew at every configure, and what the user set (-DGGML_...) wins.

set(LAPROX_CPU_FEATURES "")
set(LAPROX_CPU_REFUSED  "")

# feature and its compiler flags, as ggml-cpu uses them
set(laprox_features
    "SSE42|-msse4.2"
    "AVX|-mavx"
    "F16C|-mf16c"
    "FMA|-mfma"
    "BMI2|-mbmi2"
    "AVX2|-mavx2"
    "AVX_VNNI|-mavx2 -mavxvnni"
    "AVX512|-mavx512f -mavx512cd -mavx512vl -mavx512dq -mavx512bw"
    "AVX512_VBMI|-mavx512f -mavx512bw -mavx512vbmi"
    "AVX512_VNNI|-mavx512f -mavx512vnni"
    "AVX512_BF16|-mavx512f -mavx512bf16"
    "AMX_INT8|-mamx-tile -mamx-int8"
)
set(laprox_features_v3 SSE42 AVX F16C FMA BMI2 AVX2)

function(laprox_default name value)
    if(NOT DEFINED CACHE{${name}})
        set(${name} ${value} PARENT_SCOPE)
    endif()
endfunction()

# Whether the feature really runs, compiled as hard as the library is. A CPU or its hypervisor may list a feature and
# trap on it, and a compiler may break it (seen: AMX, cmake/probe-cpu.cpp): -march=native believes both.
function(laprox_probe name flags)
    if(DEFINED CACHE{LAPROX_RUNS_${name}})
        return()
    endif()
    string(REPLACE " " ";" flags "${flags}")
    try_run(run compiled
        "${CMAKE_CURRENT_BINARY_DIR}/probe-${name}"
        "${CMAKE_CURRENT_SOURCE_DIR}/cmake/probe-cpu.cpp"
        COMPILE_DEFINITIONS -O3 ${flags} "-DPROBE_${name}"
    )
    if(compiled AND "${run}" STREQUAL "0")
        set(runs ON)
    else()
        set(runs OFF)
    endif()
    unset(run CACHE)
    unset(compiled CACHE)
    set(LAPROX_RUNS_${name} ${runs} CACHE INTERNAL "laprox: ${name} was tried here")
    message(STATUS "laprox: CPU feature ${name}: ${runs}")
endfunction()

set(laprox_is_x86 OFF)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$" AND NOT CMAKE_OSX_ARCHITECTURES MATCHES "arm64")
    set(laprox_is_x86 ON)
endif()

if(DEFINED CACHE{GGML_NATIVE} OR GGML_CPU_ALL_VARIANTS OR CMAKE_CROSSCOMPILING)
    set(LAPROX_CPU_TUNING user)
elseif(LAPROX_PORTABLE)
    set(LAPROX_CPU_TUNING portable)
    set(GGML_NATIVE OFF)
    if(laprox_is_x86)
        foreach(item IN LISTS laprox_features)
            string(REGEX REPLACE "\\|.*$" "" name "${item}")
            if(name IN_LIST laprox_features_v3)
                laprox_default(GGML_${name} ON)
            else()
                laprox_default(GGML_${name} OFF)
            endif()
        endforeach()
    else()
        laprox_default(GGML_CPU_ARM_ARCH armv8-a)
    endif()
elseif(laprox_is_x86 AND NOT MSVC)
    set(LAPROX_CPU_TUNING probed)
    set(GGML_NATIVE OFF)
    foreach(item IN LISTS laprox_features)
        string(REGEX REPLACE "\\|.*$" "" name "${item}")
        string(REGEX REPLACE "^.*\\|" "" flags "${item}")
        laprox_probe(${name} "${flags}")
        laprox_default(GGML_${name} ${LAPROX_RUNS_${name}})
        if(LAPROX_RUNS_${name})
            list(APPEND LAPROX_CPU_FEATURES ${name})
        else()
            list(APPEND LAPROX_CPU_REFUSED ${name})
        endif()
    endforeach()
    # the int8 kernels need both; ggml has no use for the tiles alone
    laprox_default(GGML_AMX_TILE ${LAPROX_RUNS_AMX_INT8})
else()
    # ARM: ggml runs probes of its own; MSVC: likewise
    set(LAPROX_CPU_TUNING native)
    set(GGML_NATIVE ON)
endif()

# without GGML_NATIVE, ggml-cuda compiles for every architecture it knows
if(GGML_CUDA AND LAPROX_CPU_TUNING STREQUAL "probed" AND CMAKE_VERSION VERSION_GREATER_EQUAL 3.24
        AND NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES native)
endif()

message(STATUS "laprox: CPU tuning ${LAPROX_CPU_TUNING}")
