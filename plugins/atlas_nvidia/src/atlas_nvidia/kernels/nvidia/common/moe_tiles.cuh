// What moe_sort leaves for the products of many tokens.
#pragma once
#include "device.cuh"

namespace atlas {

// Choices order[first .. first + size) are of this expert; a size of 0 is no tile. implementations/moe.py knows its size.
struct MoeTile {
    int32_t expert, first, size, unused;
};

}  // namespace atlas
