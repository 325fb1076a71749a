// Live counts and slot words of a step: the device's view of atlas_core.ops.step (a test compares the two).
#pragma once

enum AtlasCount { ATLAS_TOKENS = 0, ATLAS_SEQUENCES = 1, ATLAS_ROWS = 2, ATLAS_UPDATES = 3 };

enum AtlasWord {
    ATLAS_LAST_TOKEN = 0,
    ATLAS_POSITION = 1,
    ATLAS_PROMPT_LENGTH = 2,
    ATLAS_PENALTY_ROW = 3,
    ATLAS_TEMPERATURE = 4,
    ATLAS_TOP_P = 5,
    ATLAS_TOP_K = 6,
    ATLAS_MIN_P = 7,
    ATLAS_PRESENCE = 8,
    ATLAS_FREQUENCY = 9,
    ATLAS_REPETITION = 10,
    ATLAS_SEED_LOW = 11,
    ATLAS_SEED_HIGH = 12,
    ATLAS_BIAS_START = 13,
    ATLAS_BIAS_COUNT = 14,
    ATLAS_LOGPROBS = 15,
    ATLAS_MASK = 16,
    ATLAS_STATE_IN = 17,
    ATLAS_STATE_OUT = 18,
    ATLAS_TABLE_START = 24,
};
