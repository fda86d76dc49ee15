// What the library knows of our CPU kernels (overlay/ggml-cpu).
#pragma once

#include <string>
#include <vector>

struct ggml_cgraph;

// Names of the weights of a graph that kernels of ours cannot multiply with, sorted.
std::vector<std::string> knapspec_uncovered_weights(const ggml_cgraph * graph);
