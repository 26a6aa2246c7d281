/* many_check.cpp - many_plan.h on a CPU: g++ -std=c++17 -O2 -Wall -Wextra many_check.cpp -o check && ./check
 *
 * Groups and tiles cover everything once. The outputs of all threads land where the rows of the weight say. And the ring is
 * emulated: copiers and warpgroups as they wait and arrive, in a random order, with copies that come late. So a stage that is
 * written too early, or read as another step, or two that wait for each other would show.
 */
#include "many_plan.h"

#include <stdio.h>
#include <stdlib.h>

#include <deque>
#include <map>
#include <random>
#include <set>
#include <vector>

#define CHECK(...)                                                   \
    do {                                                             \
        if (!(__VA_ARGS__)) {                                        \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
            exit(1);                                                 \
        }                                                            \
    } while (0)

static std::mt19937 numbers(20261129);

static void check_groups()
{
    for (int most : {128, 192, 256})
        for (int together : {1, 2}) {
            int64_t wasted = 0, all = 0;
            for (int count = 0; count <= 5000; count++) {
                const int rows = many_rows_of_group(count, most, together), groups = many_groups(count, most, together);
                int sum = 0, multiplied = 0;
                CHECK(rows >= MANY_STEP && rows <= most && rows % MANY_STEP == 0 && groups % together == 0);
                for (int i = 0; i < groups; i++) {
                    const int its = many_rows_of(count, rows, i);
                    CHECK(its <= rows && (together > 1 || its > 0) && (i % together > 0 || its > 0));
                    CHECK(its == 0 || sum == i * rows);
                    sum += its, multiplied += many_size(its);
                }
                CHECK(sum == count && groups <= count / most + together);
                if (count >= 900 && count < 1150) wasted += multiplied - count, all += count;
            }
            printf("groups of up to %d, %d together: an expert of about 1,024 rows wastes %.1f %%\n", most, together,
                   100.0 * (double)wasted / (double)all);
        }
}

template <typename shape>
static void check_tiles()
{
    for (int blocks : {1, 5, 6, 8, 12, 16})
        for (int groups : {0, 2, 8, 600}) {
            std::set<std::pair<int, int>> seen;
            const int walkers = 132 / shape::CLUSTER, tiles = many_tiles<shape>(groups, blocks);
            for (int walker = 0; walker < walkers; walker++)
                for (int tile = walker; tile < tiles; tile += walkers)
                    for (int rank = 0; rank < shape::CLUSTER; rank++) {
                        const many_place place = many_place_of<shape>(tile, blocks, rank);
                        const many_place first = many_place_of<shape>(tile, blocks, 0);
                        CHECK(shape::GATHERS ? place.block == first.block
                                             : place.group == first.group); /* what they share */
                        CHECK(place.group / shape::GROUPS_TOGETHER == first.group / shape::GROUPS_TOGETHER);
                        CHECK(place.group < groups && seen.insert({place.group, place.block}).second);
                    }
            for (int group = 0; group < groups; group++)
                for (int block = 0; block < blocks; block++) CHECK(seen.count({group, block}));
        }
}

/* Which row of the weight lies in row `at` of a tile, as the tensor map brings them. */
static int row_of_weight(bool is_gated, int rows, int block, int tile, int at)
{
    const int sixteen = block * (tile / 16) + at / 16;
    return sixteen * (is_gated ? 8 : 16) + at % 16 / 8 * (is_gated ? rows / 2 : 8) + at % 8;
}

template <typename shape>
static void check_outputs(bool is_gated, int rows_of_weight)
{
    const int blocks = (rows_of_weight + shape::TILE - 1) / shape::TILE, chunks = many_chunks(is_gated, shape::BLOCKS);
    const int num_outputs = rows_of_weight / (is_gated ? 2 : 1);
    std::map<std::pair<int, int>, int> seen; /* row of x, output */
    for (int block = 0; block < blocks; block++)
        for (int group = 0; group < (shape::PINGPONG ? 1 : 2); group++)
            for (int first = 0; first < shape::ROWS; first += MANY_STAGED)
                for (int written = 0; written < (is_gated ? 1 : shape::BLOCKS); written++) {
                    std::map<int, std::pair<int, int>> staged; /* by byte: row of x, first row of the weight */
                    for (int b = is_gated ? 0 : written; b < (is_gated ? shape::BLOCKS : written + 1); b++)
                        for (int warp = 0; warp < 4; warp++)
                            for (int row = first; row < first + MANY_STAGED && row < shape::ROWS; row += 32)
                                for (int r = 0; r < (is_gated ? 1 : 2); r++)
                                    for (int lane = 0; lane < 32; lane++) {
                                        const int at_row =
                                            row - first + lane; /* of matrix lane / 8: its row lane % 8 */
                                        const int at = many_staged_at(at_row, many_chunk(is_gated, b, warp, r), chunks);
                                        const int smem = (group * shape::BLOCKS + b) * 64 + warp * 16 + r * 8;
                                        CHECK(at >= 0 && at + 16 <= shape::STAGED_BYTES);
                                        CHECK(staged.insert({at, {first + at_row, smem}}).second);
                                    }
                    const int base = block * shape::TILE + (shape::PINGPONG ? 0 : group * shape::OF_WARPGROUP);
                    for (int row = 0; row < MANY_STAGED && first + row < shape::ROWS; row++)
                        for (int chunk = 0; chunk < chunks; chunk++) {
                            const auto from = staged.at(many_staged_at(row, chunk, chunks));
                            const int output = many_first_output(is_gated, base, written) + chunk * 8;
                            CHECK(from.first == first + row);
                            if (output >= num_outputs) continue;
                            for (int i = 0; i < 8; i++) {
                                const int its =
                                    row_of_weight(is_gated, rows_of_weight, block, shape::TILE, from.second + i);
                                CHECK(its == output + i);
                                if (is_gated)
                                    CHECK(row_of_weight(true, rows_of_weight, block, shape::TILE,
                                                        from.second + i + 8) == output + i + rows_of_weight / 2);
                                CHECK(++seen[{first + row, output + i}] == 1);
                            }
                        }
                }
    CHECK((int)seen.size() == shape::ROWS * num_outputs);
    auto banks = [&](int row, int chunk) { return many_staged_at(row, chunk, chunks) / 16 % 8; };
    for (int i = 0; i < MANY_STAGED; i += 8) {
        std::set<int> of_rows, of_chunks;
        for (int j = 0; j < 8; j++) of_rows.insert(banks(i + j, i / 8 % chunks));
        for (int j = 0; j < 8; j++) of_chunks.insert(banks(i + j / chunks, j % chunks));
        CHECK(of_rows.size() == 8 && of_chunks.size() == 8);
    }
}

// --- the ring

struct barrier {
    int expected, pending;
    int64_t bytes = 0;
    int phase = 0; /* parity of the one that is not complete */

    void settle()
    {
        if (pending == 0 && bytes == 0) phase ^= 1, pending = expected;
    }
    void arrive()
    {
        CHECK(pending > 0);
        pending--, settle();
    }
    void expect(int64_t count) { bytes += count, arrive(); }
    void complete(int64_t count) { bytes -= count, settle(); }
    bool is_done(int parity) const { return phase != parity; }
};
struct copy { /* on its way */
    int cta, stage, tile, step, part;
    int64_t bytes;
};
/* Copiers and warpgroups of a cluster, over so many tiles of random sizes. */
template <typename shape>
static void check_ring(int tiles, int num_steps, int lag)
{
    constexpr int C = shape::CLUSTER, S = shape::STAGES, READERS = shape::READERS / 4;
    struct stage_of {
        barrier full, empty;
        int tile[C + 1], step[C + 1]; /* what lies there: parts of x, and the weight */
    };
    std::vector<std::vector<stage_of>> ctas(C, std::vector<stage_of>(S));
    for (auto &cta : ctas)
        for (auto &stage : cta) {
            stage.full = {1, 1}, stage.empty = {READERS * C, READERS * C};
            for (int i = 0; i <= C; i++) stage.tile[i] = stage.step[i] = -1;
        }
    std::vector<int> sizes((size_t)tiles);
    for (int &size : sizes) size = many_size(1 + (int)(numbers() % shape::ROWS));
    std::deque<copy> copies;
    std::vector<int> copied(C, 0);                                 /* steps that a copier has started */
    std::vector<std::vector<int>> step(C, std::vector<int>(2, 0)); /* that a warpgroup multiplies next, of its own */
    std::vector<std::vector<int>> looked(
        C, std::vector<int>(2, 0)); /* how far it has looked ahead: -1 where it must not */
    const int all = tiles * num_steps;
    auto own_steps = [&](int group) { return shape::PINGPONG ? (tiles + 1 - group) / 2 * num_steps : all; };
    auto in_ring = [&](int group, int own) {
        return shape::PINGPONG ? (own / num_steps * 2 + group) * num_steps + own % num_steps : own;
    };
    int idle = 0;
    for (;;) {
        bool is_done = copies.empty(), moved = false;
        const int cta = (int)(numbers() % C), who = (int)(numbers() % 4);
        for (int c = 0; c < C; c++) {
            is_done = is_done && copied[c] == all;
            for (int g = 0; g < 2; g++) is_done = is_done && step[c][g] == own_steps(g);
        }
        if (is_done) break;
        if (who == 0 && copied[cta] < all) {
            const many_ring at = many_ring_at(copied[cta], S);
            stage_of &to = ctas[cta][at.stage];
            if (to.empty.is_done(at.parity ^ 1)) {
                const int tile = copied[cta] / num_steps, its = copied[cta] % num_steps, x = sizes[tile] * 128;
                /* What is shared comes in parts from all; the other one whole, from each CTA for itself. */
                const int shared_bytes = shape::GATHERS ? shape::WEIGHT_BYTES : x,
                          own_bytes = shape::WEIGHT_BYTES + x - shared_bytes;
                to.full.expect(shape::WEIGHT_BYTES + x);
                copies.push_back({cta, at.stage, tile, its, C, own_bytes});
                for (int c = 0; c < C; c++) copies.push_back({c, at.stage, tile, its, cta, shared_bytes / C});
                copied[cta]++, moved = true;
            }
        } else if (who == 1 && !copies.empty()) { /* any of them ends */
            const size_t i = numbers() % copies.size();
            const copy its = copies[i];
            copies.erase(copies.begin() + (long)i);
            stage_of &to = ctas[its.cta][its.stage];
            to.tile[its.part] = its.tile, to.step[its.part] = its.step;
            to.full.complete(its.bytes), moved = true;
        } else if (who >= 2) {
            const int group = who - 2, own = step[cta][group];
            if (own < own_steps(group)) {
                const int at_step = in_ring(group, own), tile = at_step / num_steps;
                /* A tile begins when the last step of the one before is being multiplied: a parity tells no more. */
                if (shape::PINGPONG && tile > 0 && step[cta][1 - group] < ((tile - 1) / 2 + 1) * num_steps) continue;
                const int behind = shape::PINGPONG ? 0 : group * lag;
                const many_ring at = many_ring_at(at_step, S), ahead = many_ring_at(at_step + behind, S);
                stage_of &from = ctas[cta][at.stage];
                const bool looks = behind > 0 && at_step + behind < all && looked[cta][group] <= own;
                if (!looks || ctas[cta][ahead.stage].full.is_done(ahead.parity)) {
                    if (looks) looked[cta][group] = own + 1, moved = true;
                    if (from.full.is_done(at.parity)) {
                        for (int part = 0; part <= C; part++)
                            CHECK(from.tile[part] == at_step / num_steps && from.step[part] == at_step % num_steps);
                        /* A stage is released when the next one of the tile is being multiplied. */
                        auto release = [&](int stage) {
                            for (int c = 0; c < C; c++) ctas[c][stage].empty.arrive();
                        };
                        if (own % num_steps > 0) release(many_ring_at(at_step - 1, S).stage);
                        if (own % num_steps == num_steps - 1) release(at.stage);
                        step[cta][group]++, moved = true;
                    }
                }
            }
        }
        idle = moved ? 0 : idle + 1;
        CHECK(idle < 100000); /* nobody moves any more */
    }
}
template <typename shape>
static void check_shape(const char *name, int most_lag)
{
    for (int tiles : {1, 2, 3, 7})
        for (int num_steps : {1, 2, 4, 12, 32})
            for (int lag = 0; lag <= most_lag; lag++)
                for (int i = 0; i < 20; i++) check_ring<shape>(tiles, num_steps, lag);
    check_tiles<shape>();
    for (bool is_gated : {false, true})
        for (int rows : {80, 208, 1536, 2048}) check_outputs<shape>(is_gated, rows);
    printf("%-26s tile %3d, %d stages of %2d KB, %3d KB, registers %d and %d: right\n", name, shape::TILE,
           shape::STAGES, shape::STAGE_BYTES >> 10, shape::SMEM_BYTES >> 10, shape::WORKER_REGISTERS,
           shape::COPIER_REGISTERS);
}

int main()
{
    check_groups();
    check_shape<many_shape<1, 256, 4, false, false>>("128x256", 2);
    check_shape<many_shape<1, 256, 4, false, false, 2>>("128x256 cluster", 2);
    check_shape<many_shape<1, 256, 4, false, true, 2>>("128x256 gather cluster", 2);
    check_shape<many_shape<2, 192, 3, false, false>>("256x192", 1);
    check_shape<many_shape<2, 192, 3, false, false, 2>>("256x192 cluster", 1);
    check_shape<many_shape<2, 192, 3, false, true, 2>>("256x192 gather cluster", 1);
    check_shape<many_shape<2, 192, 5, true, false>>("2 x 128x192", 0);
    check_shape<many_shape<2, 192, 5, true, false, 2>>("2 x 128x192 cluster", 0);
    check_shape<many_shape<2, 192, 5, true, true, 2>>("2 x 128x192 gather cluster", 0);
    check_shape<many_shape<2, 128, 6, true, false, 2>>("2 x 128x128 cluster", 0);
    check_shape<many_shape<2, 128, 4, false, true>>("256x128 gather", 0);
    return 0;
}
