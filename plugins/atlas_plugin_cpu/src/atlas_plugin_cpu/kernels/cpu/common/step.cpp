// The beginning and the end of a step: slot updates, expansion of rows into tokens, and moving sequences on.

#include "atlas_step.h"

namespace {

constexpr int32_t kPromptBit = 1 << 30;  // in a count of a token: it occurs in the prompt

}  // namespace

// One task only: updates come in order and rows may share nothing.
void step_begin(const int32_t* counts, const int32_t* updates, const int32_t* token_ids, const int32_t* cu_q,
                const int32_t* row_slot, int32_t* state, int32_t* penalty, int32_t* tokens, int32_t* positions,
                int32_t* token_row, int32_t slot_stride, int32_t vocabulary, int task, int ntasks) {
    for (int i = 0; i < counts[ATLAS_UPDATES]; ++i) state[updates[2 * i]] = updates[2 * i + 1];
    for (int row = 0; row < counts[ATLAS_SEQUENCES]; ++row) {
        const int32_t* slot = state + static_cast<int64_t>(row_slot[row]) * slot_stride;
        int32_t* seen = slot[ATLAS_PENALTY_ROW] < 0
                            ? nullptr
                            : penalty + static_cast<int64_t>(slot[ATLAS_PENALTY_ROW]) * vocabulary;
        for (int i = cu_q[row]; i < cu_q[row + 1]; ++i) {
            const int32_t token = token_ids[i] < 0 ? slot[ATLAS_LAST_TOKEN] : token_ids[i];
            const int32_t position = slot[ATLAS_POSITION] + i - cu_q[row];
            tokens[i] = token;
            positions[i] = position;
            token_row[i] = row;
            if (seen == nullptr) continue;
            if (position < slot[ATLAS_PROMPT_LENGTH]) seen[token] |= kPromptBit;
            else seen[token] += 1;
        }
    }
}

void advance(const int32_t* counts, const int32_t* sampled, const int32_t* sample_row, const int32_t* row_slot,
             const int32_t* cu_q, int32_t* state, int32_t slot_stride, int task, int ntasks) {
    for (int i = 0; i < counts[ATLAS_ROWS]; ++i)
        if (sample_row[i] >= 0)
            state[static_cast<int64_t>(row_slot[sample_row[i]]) * slot_stride + ATLAS_LAST_TOKEN] = sampled[i];
    for (int row = 0; row < counts[ATLAS_SEQUENCES]; ++row)
        state[static_cast<int64_t>(row_slot[row]) * slot_stride + ATLAS_POSITION] += cu_q[row + 1] - cu_q[row];
}
