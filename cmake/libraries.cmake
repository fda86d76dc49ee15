# libllama and ggml as shared libraries in one folder, found by each other through that folder.

set(BUILD_SHARED_LIBS ON CACHE BOOL "" FORCE)
# Upstream's other parts are off by themselves when it is not the top project; say so all the same.
foreach(part IN ITEMS COMMON TESTS TOOLS EXAMPLES SERVER APP)
    set(LLAMA_BUILD_${part} OFF CACHE BOOL "" FORCE)
endforeach()
# Version text from the pin. Upstream would ask git, and find the repository around us.
set(LLAMA_BUILD_COMMIT "${KNAPSPEC_EDGE_COMMIT}")
set(LLAMA_BUILD_NUMBER 0)
set(ENV{GIT_DIR} "${CMAKE_BINARY_DIR}/no-git")

set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
if(APPLE)
    set(CMAKE_INSTALL_RPATH "@loader_path")
else()
    set(CMAKE_INSTALL_RPATH "$ORIGIN")
endif()
# toolkit libraries outside the loader's search path
if(GGML_CUDA OR GGML_HIP OR GGML_VULKAN OR GGML_SYCL)
    set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)
endif()

add_subdirectory("${KNAPSPEC_EDGE_SOURCE_DIR}" llama.cpp EXCLUDE_FROM_ALL)

# also in the unpatched build: what GCC makes of this file crashes on every CPU with AMX
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND TARGET ggml-base)
    set_source_files_properties("${KNAPSPEC_EDGE_SOURCE_DIR}/ggml/src/ggml-cpu/amx/mmq.cpp"
        TARGET_DIRECTORY ggml-base PROPERTIES
        COMPILE_OPTIONS "-include;${CMAKE_CURRENT_SOURCE_DIR}/cmake/amx_tile_config.h"
        OBJECT_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cmake/amx_tile_config.h")
endif()

if(NOT KNAPSPEC_EDGE_PRISTINE)
    file(GLOB overlay CONFIGURE_DEPENDS "${KNAPSPEC_EDGE_OVERLAY}/*.cpp" "${KNAPSPEC_EDGE_OVERLAY}/*.h")
    target_sources(llama PRIVATE ${overlay})
    target_include_directories(llama PRIVATE "${KNAPSPEC_EDGE_OVERLAY}")
    # upstream joins the model files into few units; ours stay apart, so that an edit is quick
    set_source_files_properties(${overlay} TARGET_DIRECTORY llama PROPERTIES
        SKIP_UNITY_BUILD_INCLUSION ON
        # the layout of a graph stands in a private header of ggml
        INCLUDE_DIRECTORIES "${KNAPSPEC_EDGE_SOURCE_DIR}/ggml/src")
    # sources that extend the CPU backend itself
    file(GLOB overlay_cpu CONFIGURE_DEPENDS "${KNAPSPEC_EDGE_OVERLAY}/ggml-cpu/*.c*" "${KNAPSPEC_EDGE_OVERLAY}/ggml-cpu/*.h")
    if(overlay_cpu)
        foreach(target IN LISTS GGML_AVAILABLE_BACKENDS)
            if(TARGET ${target} AND target MATCHES "^ggml-cpu")
                target_sources(${target} PRIVATE ${overlay_cpu})
                target_include_directories(${target} PRIVATE "${KNAPSPEC_EDGE_OVERLAY}/ggml-cpu")
            endif()
        endforeach()
    endif()
endif()

# The cached list may name backends of an earlier configuration.
set(KNAPSPEC_EDGE_TARGETS llama ggml ggml-base)
foreach(target IN LISTS GGML_AVAILABLE_BACKENDS)
    if(TARGET ${target})
        list(APPEND KNAPSPEC_EDGE_TARGETS ${target})
    endif()
endforeach()
list(REMOVE_DUPLICATES KNAPSPEC_EDGE_TARGETS)

add_custom_target(knapspec_edge_libraries ALL)
add_dependencies(knapspec_edge_libraries ${KNAPSPEC_EDGE_TARGETS})

set(KNAPSPEC_EDGE_LIBRARY_DIR "knapspec_edge/native/lib")
foreach(target IN LISTS KNAPSPEC_EDGE_TARGETS)
    # One name per library. Wheels drop symbolic links, and two file names of one library would be
    # two libraries in the process, each with its own registry of backends.
    set_property(TARGET ${target} PROPERTY VERSION)
    set_property(TARGET ${target} PROPERTY SOVERSION)
    if(MSVC)
        set_property(TARGET ${target} PROPERTY WINDOWS_EXPORT_ALL_SYMBOLS ON)
    endif()
    # built with the final run path, so that a copy is all an installation needs
    install(PROGRAMS "$<TARGET_FILE:${target}>"
        DESTINATION "${KNAPSPEC_EDGE_LIBRARY_DIR}" COMPONENT knapspec_edge)
endforeach()

install(FILES "${KNAPSPEC_EDGE_SOURCE_DIR}/LICENSE"
    DESTINATION "knapspec_edge/native" RENAME "LICENSE.llama.cpp" COMPONENT knapspec_edge)
install(FILES "${CMAKE_CURRENT_SOURCE_DIR}/models/manifest.toml"
    DESTINATION "knapspec_edge/data" COMPONENT knapspec_edge OPTIONAL)

# What this build is, for `knapspec-edge doctor` and for the key of everything measured with it.
set(options "")
foreach(name IN ITEMS NATIVE OPENMP LLAMAFILE LTO BACKEND_DL CPU_ALL_VARIANTS METAL METAL_EMBED_LIBRARY
        CUDA HIP VULKAN SYCL OPENCL RPC BLAS)
    if(GGML_${name})
        list(APPEND options "\"GGML_${name}\"")
    endif()
endforeach()
list(JOIN options ", " options)
list(JOIN KNAPSPEC_EDGE_TARGETS "\", \"" targets)
string(REPLACE "\\" "\\\\" cmake_args "$ENV{CMAKE_ARGS}")
string(REPLACE "\"" "\\\"" cmake_args "${cmake_args}")
if(KNAPSPEC_EDGE_MULTI_CONFIG)
    set(build_type "Release")
else()
    set(build_type "${CMAKE_BUILD_TYPE}")
endif()
set(backend_modules false)
if(GGML_BACKEND_DL)
    set(backend_modules true)
endif()
file(GENERATE OUTPUT "${CMAKE_BINARY_DIR}/_build_info.json" CONTENT
"{
  \"upstream_commit\": \"${KNAPSPEC_EDGE_COMMIT}\",
  \"upstream_tag\": \"${KNAPSPEC_EDGE_TAG}\",
  \"bindings_version\": \"${KNAPSPEC_EDGE_BINDINGS}\",
  \"patch_digest\": \"${KNAPSPEC_EDGE_PATCH_DIGEST}\",
  \"tree_digest\": \"${KNAPSPEC_EDGE_TREE_DIGEST}\",
  \"abi\": ${KNAPSPEC_EDGE_ABI},
  \"compiler\": \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\",
  \"system\": \"${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}\",
  \"build_type\": \"${build_type}\",
  \"backend_modules\": ${backend_modules},
  \"options\": [${options}],
  \"cmake_args\": \"${cmake_args}\",
  \"libraries\": [\"${targets}\"]
}
")
# beside the libraries, so that a folder of libraries says what it is
install(FILES "${CMAKE_BINARY_DIR}/_build_info.json"
    DESTINATION "${KNAPSPEC_EDGE_LIBRARY_DIR}" COMPONENT knapspec_edge)
