# Adds native/ to llama.cpp's targets, and collects the libraries to install in LAPROX_LIBRARIES.

function(laprox_collect directory result)
    get_property(targets DIRECTORY "${directory}" PROPERTY BUILDSYSTEM_TARGETS)
    get_property(subdirectories DIRECTORY "${directory}" PROPERTY SUBDIRECTORIES)
    set(libraries "")
    foreach(target IN LISTS targets)
        get_target_property(type ${target} TYPE)
        if(type MATCHES "^(SHARED|MODULE)_LIBRARY$")
            list(APPEND libraries ${target})
        endif()
    endforeach()
    foreach(subdirectory IN LISTS subdirectories)
        laprox_collect("${subdirectory}" below)
        list(APPEND libraries ${below})
    endforeach()
    set(${result} ${libraries} PARENT_SCOPE)
endfunction()

laprox_collect("${LAPROX_TREE}" LAPROX_LIBRARIES)
message(STATUS "laprox: libraries ${LAPROX_LIBRARIES}")

# libllama.so alone: wheels turn the links libllama.so -> .so.0 -> .so.0.5.0 into three copies
set_property(TARGET ${LAPROX_LIBRARIES} PROPERTY VERSION)
set_property(TARGET ${LAPROX_LIBRARIES} PROPERTY SOVERSION)
set_property(TARGET ${LAPROX_LIBRARIES} PROPERTY PUBLIC_HEADER)  # libraries are installed, and nothing else
add_custom_target(laprox ALL DEPENDS ${LAPROX_LIBRARIES})

# Sources in native/<folder> belong to the target that upstream builds from that folder. Added here, so that no stock
# CMakeLists.txt is patched. CUDA sources are picked up by the glob of their backend; Metal kernels are listed by a patch.
function(laprox_add_sources folder)
    file(GLOB sources RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}/native" CONFIGURE_DEPENDS
        "native/${folder}/*.c" "native/${folder}/*.cpp")
    list(TRANSFORM sources PREPEND "${LAPROX_TREE}/")
    foreach(target IN LISTS ARGN)
        target_sources(${target} PRIVATE ${sources})
        # upstream compiles its models in batches; file-local names of ours must not meet theirs
        set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endforeach()
endfunction()

set(laprox_cpu_targets ${LAPROX_LIBRARIES})
list(FILTER laprox_cpu_targets INCLUDE REGEX "^ggml-cpu")

laprox_add_sources(src                llama)
laprox_add_sources(ggml/src           ggml-base)
laprox_add_sources(ggml/src/ggml-cpu  ${laprox_cpu_targets})
if(TARGET ggml-metal)
    laprox_add_sources(ggml/src/ggml-metal ggml-metal)
endif()
