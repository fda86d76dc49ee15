// Where the next token of the text goes in a cache.
#pragma once

#include "llama-kv-cells.h"

// The cell to search from for a free one: behind that of the text's last token. Upstream goes on from the lowest cell that a
// cut has freed, or from the first one, so in the ring of a sliding window a token verified after a draft would land in another
// cell than without the draft, and its sums would round differently. Without a cut the result is upstream's.
inline uint32_t knapspec_first_cell(const llama_kv_cells & cells, llama_seq_id seq_id, uint32_t head) {
    if (seq_id != 0) {
        return head;
    }
    const auto & text = cells.seq_pos_get(seq_id);
    return text.empty() ? head : text.rbegin()->second + 1;
}
