# Writes laprox-build-info.h, on the include path of llama: how these libraries were made, as "key=value" lines.

# what vendor.py laid out
file(READ "${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp.stamp" laprox_stamp)
string(JSON laprox_n_patches LENGTH "${laprox_stamp}" patches)
set(laprox_patches "")
if(laprox_n_patches GREATER 0)
    math(EXPR laprox_last "${laprox_n_patches} - 1")
    foreach(i RANGE ${laprox_last})
        string(JSON name MEMBER "${laprox_stamp}" patches ${i})
        string(JSON sha256 GET "${laprox_stamp}" patches "${name}")
        string(SUBSTRING "${sha256}" 0 12 sha256)
        list(APPEND laprox_patches "${name}:${sha256}")
    endforeach()
endif()
string(JSON laprox_native GET "${laprox_stamp}" native)
string(JSON laprox_sdist  GET "${laprox_stamp}" sdist)
string(SHA256 laprox_source "${laprox_sdist} ${laprox_patches} ${laprox_native}")
string(SUBSTRING "${laprox_source}" 0 12 laprox_source)

get_directory_property(laprox_llama_version DIRECTORY "${LAPROX_TREE}"      DEFINITION LLAMA_VERSION)
get_directory_property(laprox_ggml_version  DIRECTORY "${LAPROX_TREE}/ggml" DEFINITION GGML_VERSION)

file(STRINGS scripts/vendor.py laprox_bindings REGEX "^VERSION = " LIMIT_COUNT 1)
string(REGEX REPLACE "^VERSION = \"(.*)\"$" "\\1" laprox_bindings "${laprox_bindings}")

# ggml-cpu carries the instruction set flags; its generator expressions are upstream's warnings
set(laprox_cpu_flags "")
if(TARGET ggml-cpu)
    get_target_property(laprox_cpu_flags ggml-cpu COMPILE_OPTIONS)
    list(FILTER laprox_cpu_flags INCLUDE REGEX "^(-m|/arch)")
endif()

set(laprox_backends ${LAPROX_LIBRARIES})
list(FILTER laprox_backends INCLUDE REGEX "^ggml-")
list(FILTER laprox_backends EXCLUDE REGEX "^ggml-base$")
list(TRANSFORM laprox_backends REPLACE "^ggml-" "")

string(TOUPPER "${CMAKE_BUILD_TYPE}" laprox_build_type)
set(laprox_flags "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${laprox_build_type}}")
string(STRIP "${laprox_flags}" laprox_flags)

set(laprox_lines
    "package=${PROJECT_VERSION}"
    "llama_cpp=${laprox_llama_version}"
    "ggml=${laprox_ggml_version}"
    "llama_cpp_python=${laprox_bindings}"
    "source=${laprox_source}"
    "compiler=${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
    "system=${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}"
    "build_type=${CMAKE_BUILD_TYPE}"
    "flags=${laprox_flags}"
    "cpu_tuning=${LAPROX_CPU_TUNING}"
    "cpu_flags=@laprox_cpu_flags@"
    "cpu_features=@LAPROX_CPU_FEATURES@"
    "cpu_refused=@LAPROX_CPU_REFUSED@"
    "backends=@laprox_backends@"
    "patches=@laprox_patches@"
)

set(laprox_text "")
foreach(line IN LISTS laprox_lines)
    string(CONFIGURE "${line}" line @ONLY)     # lists come in only now: a list of lists would fall apart
    string(REPLACE ";" " " line "${line}")
    string(REPLACE "\\" "\\\\" line "${line}")
    string(REPLACE "\"" "\\\"" line "${line}")
    string(APPEND laprox_text " \\\n    \"${line}\\n\"")
endforeach()

configure_file(cmake/laprox-build-info.h.in generated/laprox-build-info.h @ONLY)
target_include_directories(llama PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/generated")
