# The generator of tiny models, one per architecture, from upstream's own tests. It needs a little of
# upstream's `common`, which we do not build; tests/native/generator stands in for that.
set(generator "${CMAKE_CURRENT_SOURCE_DIR}/tests/native/generator")
add_executable(knapspec_edge_tiny_models "${KNAPSPEC_EDGE_SOURCE_DIR}/tests/test-llama-archs.cpp")
set_target_properties(knapspec_edge_tiny_models PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
target_compile_features(knapspec_edge_tiny_models PRIVATE cxx_std_17)
target_include_directories(knapspec_edge_tiny_models PRIVATE
    "${generator}" "${KNAPSPEC_EDGE_SOURCE_DIR}/src" "${KNAPSPEC_EDGE_SOURCE_DIR}/include")
target_link_libraries(knapspec_edge_tiny_models PRIVATE llama ggml)

# Upstream's own comparison of a backend's operations with its reference code; takes minutes to build
# and much longer to run, so only where it is asked for.
add_executable(knapspec_edge_backend_ops EXCLUDE_FROM_ALL
    "${KNAPSPEC_EDGE_SOURCE_DIR}/tests/test-backend-ops.cpp")
set_target_properties(knapspec_edge_backend_ops PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
target_compile_features(knapspec_edge_backend_ops PRIVATE cxx_std_17)
target_link_libraries(knapspec_edge_backend_ops PRIVATE ggml)
