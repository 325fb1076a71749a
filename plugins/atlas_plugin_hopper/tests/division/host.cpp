// How attention is divided, by the header that the kernel has. Reads "blocks kv_heads heads window sequences" and for
// each sequence "queries before"; prints for each block "share N", its part of the line, and for each of its items
// "item sequence first_query kv_head newest_key count first_block part parts", the blocks taking turns; at the end
// "drawn N", the counter that is left.
#include <cstdio>
#include <vector>

#include "attention_items.cuh"

using namespace atlas;

int main() {
    constexpr int ROWS = 128, KEYS = 128;
    int blocks, kv_heads, heads, window, sequences, drawn = 0;
    while (scanf("%d %d %d %d %d", &blocks, &kv_heads, &heads, &window, &sequences) == 5) {
        std::vector<int> cu_q{0}, row_slot, slots(sequences * 8);
        for (int row = 0; row < sequences; ++row) {
            int queries, before;
            if (scanf("%d %d", &queries, &before) != 2) return 1;
            cu_q.push_back(cu_q.back() + queries);
            row_slot.push_back(sequences - 1 - row);
            slots[row_slot[row] * 8 + ATLAS_POSITION] = before;
        }
        using Step = Division<ROWS, KEYS>;
        const int queries = ROWS / heads;
        const uint32_t per_tile = 0xFFFFFFFFu / queries + 1;
        Step step{kv_heads, heads, queries, window, blocks, per_tile, sequences};
        std::vector<StepRow> table(sequences);
        for (int row = 0; row < sequences; ++row) look_up(table[row], &cu_q[row], &slots[row_slot[row] * 8], 4);
        step.measure(table.data());
        printf("share %d %d %d\n", step.share, step.on_line, step.drawn);
        std::vector<Cursor> cursors(blocks);
        std::vector<int> numbers(blocks);
        std::vector<bool> ended(blocks);
        for (int block = 0; block < blocks; ++block) {
            Dealer<ROWS, KEYS>{step, table.data(), cursors[block], numbers[block], &drawn, block}.begin();
        }
        for (int left = blocks; left > 0;) {
            for (int block = 0; block < blocks; ++block) {
                if (ended[block]) continue;
                const Dealer<ROWS, KEYS> dealer{step, table.data(), cursors[block], numbers[block], &drawn, block};
                Step::Item item;
                dealer.deal(item);
                if (item.last) {
                    ended[block] = true;
                    --left;
                    continue;
                }
                const Step::Range& r = item.range;
                const int sequence = sequences - 1 - static_cast<int>((item.pages - slots.data()) / 8);
                printf("item %d %d %d %d %d %d %d %d %d\n", block, sequence, r.first_query, item.kv_head, r.newest_key,
                       r.count, item.first_block, item.part, item.parts);
            }
        }
        printf("drawn %d\n", drawn);
    }
    return 0;
}
