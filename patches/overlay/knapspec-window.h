// Windowed attention: a sublayer reads the keys of the first tokens of a text and of the most recent ones only.
//
// What a token sees is said by a mask: that of the model, which hides what lies between as well. Flash attention on the CPU
// leaves out what a mask hides, so nothing more is needed there. Everywhere else the keys and values of the cells that some
// token may see are joined by a copy. Their edge follows the padded length of the cache, not the token, and the mask
// does the rest, so a graph lives as long as that of the full model.
#pragma once

#include "knapspec-context.h"

class knapspec_context::windowing {
public:
    // Why the attention of this sublayer cannot be windowed; empty if it can.
    static std::string refusal(const llm_graph_result & res, const knapspec_item & item);

    // Give the attention of every windowed sublayer its mask, and where `join` allows it a copy of what it reads. Returns the
    // inputs that it read before. Every such sublayer has to be one without a refusal.
    static std::vector<const ggml_tensor *> apply(
            llm_graph_result                 & res,
            const std::vector<knapspec_item> & items,
            const knapspec_plan              & plan,
            bool                               join);

private:
    class mask;
};
