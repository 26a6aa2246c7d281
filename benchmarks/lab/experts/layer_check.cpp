/* layer_check.cpp - layer_plan.h on a CPU: g++ -std=c++17 -O2 -Wall -Wextra layer_check.cpp -o check && ./check
 *
 * All CTAs' warps together multiply each input of each row once. Operands agree on which input is which, with mma.m16n8k16's
 * layout as PTX has it, and no two lanes of a load share a bank.
 */
#include "layer_plan.h"

#include <stdio.h>
#include <stdlib.h>

#include <set>
#include <tuple>

#define CHECK(...)                                                   \
    do {                                                             \
        if (!(__VA_ARGS__)) {                                        \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
            exit(1);                                                 \
        }                                                            \
    } while (0)

static void check_shares(int ctas, int num_distinct, int hidden, int width)
{
    std::set<std::tuple<int, int, int>> up, down; /* rank, sixteen, column */
    int fewest = 1 << 30, most = 0;
    for (int cta = 0; cta < ctas; cta++) {
        const layer_share share = layer_share_of(cta, ctas, num_distinct, hidden, width);
        int bytes = 0;
        for (int warp = 0; warp < LAYER_WARPS; warp++) {
            const int items = layer_items(share, warp);
            for (int item = 0; item < items; item++) {
                const layer_item its = layer_item_of(share, item, warp, cta);
                CHECK(its.is_down == (item >= share.end - share.first));
                CHECK(its.rank >= 0 && its.rank < num_distinct &&
                      its.column + LAYER_PIECE <= (its.is_down ? width : hidden));
                CHECK((its.is_down ? down : up).insert({its.rank, its.sixteen, its.column}).second);
                bytes += LAYER_PIECE_BYTES;
            }
        }
        fewest = bytes < fewest ? bytes : fewest, most = bytes > most ? bytes : most;
    }
    CHECK((int)up.size() == num_distinct * (width / 8) * (hidden / LAYER_PIECE));
    CHECK((int)down.size() == num_distinct * (hidden / 16) * (width / LAYER_PIECE));
    const double mean = (double)num_distinct * 3 * hidden * width * 2 / ctas;
    if (num_distinct == 8 || num_distinct == 53)
        printf("%2d experts: a CTA reads %d to %d KB, the last %.1f %% later than the mean\n", num_distinct,
               fewest >> 10, most >> 10, (most / mean - 1) * 100);
}

static void check_operands()
{
    for (int p = 0; p < 2; p++)
        for (int half = 0; half < 2; half++)
            for (int lane = 0; lane < 32; lane++) {
                const int group = lane / 4, quad = lane % 4, at = layer_place(group, half, quad, p);
                const int row = at / 128, chunk = at % 128 / 16 ^ row % 8; /* as the engine's swizzle leaves them */
                CHECK(row == group + half * 8 && chunk * 8 == layer_input(quad, p));
                std::set<int> banks; /* of the 8 lanes that are served together */
                for (int i = lane / 8 * 8; i < lane / 8 * 8 + 8; i++)
                    banks.insert(layer_place(i / 4, half, i % 4, p) / 16 % 8);
                CHECK(banks.size() == 8);
            }
    std::set<int> inputs;
    for (int quad = 0; quad < 4; quad++)
        for (int p = 0; p < 2; p++) inputs.insert(layer_input(quad, p));
    CHECK(inputs.size() == LAYER_LINE / 8 && *inputs.rbegin() == LAYER_LINE - 8);
    for (int lane = 0; lane < 32; lane++) /* c[i] is of row lane / 4 + i / 2 * 8 and column lane % 4 * 2 + i % 2 */
        for (int i = 0; i < 4; i++) CHECK(layer_sum_at(lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2) == i * 32 + lane);
}

int main()
{
    for (int num_distinct = 1; num_distinct <= LAYER_DISTINCT; num_distinct++)
        check_shares(132, num_distinct, 2048, 768);
    check_operands();
    printf("right\n");
    return 0;
}
