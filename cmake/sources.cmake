# The sources to build: pinned, verified, patched by scripts/patches.py, kept in the build folder.

option(KNAPSPEC_EDGE_PRISTINE "Build llama.cpp without our patches, for comparisons" OFF)
set(KNAPSPEC_EDGE_UPSTREAM_DIR "" CACHE PATH "Build this llama.cpp tree as it is, patches and all")

set(KNAPSPEC_EDGE_PATCHES "${CMAKE_CURRENT_SOURCE_DIR}/patches")
set(KNAPSPEC_EDGE_OVERLAY "${KNAPSPEC_EDGE_PATCHES}/overlay")

# A change of the pin, the order or a patch makes the next build configure again.
file(GLOB KNAPSPEC_EDGE_PATCH_FILES CONFIGURE_DEPENDS "${KNAPSPEC_EDGE_PATCHES}/*.patch")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    "${KNAPSPEC_EDGE_PATCHES}/UPSTREAM.toml"
    "${KNAPSPEC_EDGE_PATCHES}/series"
    "${CMAKE_CURRENT_SOURCE_DIR}/scripts/patches.py"
    ${KNAPSPEC_EDGE_PATCH_FILES})

set(arguments "${CMAKE_BINARY_DIR}/llama.cpp-src")
if(KNAPSPEC_EDGE_PRISTINE)
    list(APPEND arguments --pristine)
endif()
if(KNAPSPEC_EDGE_UPSTREAM_DIR)
    list(APPEND arguments --describe-only)
    set(KNAPSPEC_EDGE_SOURCE_DIR "${KNAPSPEC_EDGE_UPSTREAM_DIR}")
else()
    set(KNAPSPEC_EDGE_SOURCE_DIR "${CMAKE_BINARY_DIR}/llama.cpp-src")
endif()

set(variables "${CMAKE_BINARY_DIR}/knapspec_edge_sources.cmake")
execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/scripts/patches.py"
        prepare ${arguments} --cmake-variables "${variables}"
    RESULT_VARIABLE result
    ERROR_VARIABLE error)
if(NOT result EQUAL 0)
    string(REGEX REPLACE "^patches.py: " "" error "${error}")
    knapspec_edge_fail("${error}")
endif()
include("${variables}")
