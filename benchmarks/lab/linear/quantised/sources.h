/* sources.h - ways for a warp to get its units: through a ring in shared memory that no other warp touches, by the bulk
 * copy engine or by copies of 16 bytes, or straight into registers. All of them ask for DEPTH units ahead, the first ones
 * before the previous kernel has ended.
 */
#ifndef LAB_SOURCES_H
#define LAB_SOURCES_H

#include "formats.h"

enum source_kind { BULK, COPIES, DIRECT, ROWS_OF_FP8 };

/* A warp's walk over its units: of each round of blocks, its lines of inputs; of each line, the blocks. */
struct walk {
    const char *base;
    int line_bytes, rows /* of a block's lines: 1, or 16 that lie apart */, num_lines, warp, step /* lines */,
        round_size, end; /* the same during the kernel */
    int at /* bytes */, unit, line, block, round_end /* a last round may end before it */;

    __device__ __forceinline__ void find() { at = (block * num_lines * rows + line) * line_bytes; }
    __device__ __forceinline__ bool is_valid() const { return block < end; }
    __device__ __forceinline__ const char *from() const { return base + at; }
    template <int UNIT, int LINE_UNITS>
    __device__ __forceinline__ void next()
    {
        at += UNIT;
        if (++unit < LINE_UNITS) return;
        unit = 0;
        if (++block < round_end && block < end) {
            at += (num_lines * rows - 1) * line_bytes;
            return;
        }
        line += step, block = round_end - round_size;
        if (line >= num_lines) line = warp, block = round_end, round_end += round_size;
        find();
    }
};

/* COPY_UNITS neighbours of a line come by one copy. */
template <class F, int LG, int GPC, int DEPTH_, int COPY_UNITS>
struct bulk_source {
    static constexpr int DEPTH = DEPTH_, WORDS = F::template WORDS<GPC>, LINE_UNITS = LG / F::UNIT_GROUPS;
    static constexpr int COPIES = DEPTH / COPY_UNITS,
                         BYTES = DEPTH * F::UNIT + (COPIES + COPIES % 2) * 8; /* of a warp */
    static_assert(DEPTH % COPY_UNITS == 0 && LINE_UNITS % COPY_UNITS == 0, "whole copies");
    walk at;
    const char *ring;
    uint32_t ring_address, full;
    int lane, copy = 0, phase = 0, tail_at, zeros_at;

    __device__ __forceinline__ bulk_source(const walk &at, char *smem, int lane) : at(at), ring(smem), lane(lane)
    {
        ring_address = shared_address(smem), full = ring_address + DEPTH * F::UNIT;
        tail_at = F::TAIL_SCALES + F::template scales_at<GPC>(lane / 4, lane % 4), zeros_at = F::zeros_at(lane / 4);
    }
    __device__ __forceinline__ void ask(int copy)
    {
        constexpr int BYTES = COPY_UNITS * F::UNIT;
        if (at.is_valid() && lane == 0) bulk_copy(ring_address + copy * BYTES, at.from(), BYTES, full + copy * 8);
        if (at.is_valid()) at.template next<BYTES, LINE_UNITS / COPY_UNITS>();
    }
    __device__ __forceinline__ void fill(int lines_to_l2)
    {
        if (lane == 0) {
            for (int i = 0; i < COPIES; i++) barrier_init(full + i * 8);
            barriers_are_ready();
        }
        for (int i = 0; i < COPIES; i++) ask(i);
        __syncwarp();
        walk beyond = at;
        for (int i = 0; i < lines_to_l2 * LINE_UNITS / COPY_UNITS && beyond.is_valid(); i++) {
            if (lane == 0) bulk_to_l2(beyond.from(), COPY_UNITS * F::UNIT);
            beyond.template next<COPY_UNITS * F::UNIT, LINE_UNITS / COPY_UNITS>();
        }
    }
    template <int UNIT_OF_LINE>
    __device__ __forceinline__ void take(uint4 (&w)[4], tail<WORDS> &its)
    {
        const char *from = ring + copy * (COPY_UNITS * F::UNIT) + UNIT_OF_LINE % COPY_UNITS * F::UNIT;
        if (UNIT_OF_LINE % COPY_UNITS == 0)
            barrier_wait(full + copy * 8, phase);
        else
            keep(from); /* nothing is read ahead: registers */
        for (int i = 0; i < 4; i++) w[i] = ((const uint4 *)from)[i * 32 + lane];
        for (int i = 0; i < WORDS; i++) its.scales[i] = *(const uint32_t *)(from + tail_at + i * 4);
        if (F::HAS_ZEROS) its.zeros = *(const uint32_t *)(from + zeros_at);
    }
    template <int UNIT_OF_LINE>
    __device__ __forceinline__ void done(uint4 (&)[4], tail<WORDS> &)
    {
        if (UNIT_OF_LINE % COPY_UNITS < COPY_UNITS - 1) return;
        __syncwarp(); /* all lanes have read */
        ask(copy);
        if (++copy == COPIES) copy = 0, phase ^= 1;
    }
};

/* A lane reads only what it copied: no barrier. Its words of the tail lie behind the values, one after the other. */
template <class F, int LG, int GPC, int DEPTH_>
struct copies_source {
    static constexpr int DEPTH = DEPTH_, WORDS = F::template WORDS<GPC>, LINE_UNITS = LG / F::UNIT_GROUPS;
    static constexpr int SLOT = VALUES + 128 * (WORDS + (F::HAS_ZEROS ? 1 : 0)), BYTES = DEPTH * SLOT;
    walk at;
    const char *ring;
    uint32_t ring_address;
    int lane, slot = 0, tail_at, zeros_at;

    __device__ __forceinline__ copies_source(const walk &at, char *smem, int lane) : at(at), ring(smem), lane(lane)
    {
        ring_address = shared_address(smem) + lane * 16;
        tail_at = F::TAIL_SCALES + F::template scales_at<GPC>(lane / 4, lane % 4), zeros_at = F::zeros_at(lane / 4);
    }
    __device__ __forceinline__ void ask(int slot)
    {
        if (at.is_valid()) {
            const uint32_t to = ring_address + slot * SLOT;
            const char *from = at.from() + lane * 16;
            for (int i = 0; i < 4; i++) copy_async<16>(to + i * 512, from + i * 512);
            const uint32_t to_tail = to + VALUES - lane * 16 + lane * 4 * WORDS;
            copy_async<4 * WORDS>(to_tail, at.from() + tail_at);
            if (F::HAS_ZEROS) copy_async<4>(to + VALUES + 128 * WORDS - lane * 12, at.from() + zeros_at);
            at.template next<F::UNIT, LINE_UNITS>();
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void fill(int)
    {
        for (int i = 0; i < DEPTH; i++) ask(i);
    }
    template <int>
    __device__ __forceinline__ void take(uint4 (&w)[4], tail<WORDS> &its)
    {
        copy_async_wait<DEPTH - 1>();
        const char *from = ring + slot * SLOT;
        for (int i = 0; i < 4; i++) w[i] = ((const uint4 *)from)[i * 32 + lane];
        for (int i = 0; i < WORDS; i++) its.scales[i] = ((const uint32_t *)(from + VALUES))[lane * WORDS + i];
        if (F::HAS_ZEROS) its.zeros = ((const uint32_t *)(from + VALUES + 128 * WORDS))[lane];
    }
    template <int>
    __device__ __forceinline__ void done(uint4 (&)[4], tail<WORDS> &)
    {
        ask(slot); /* what it overwrites has been multiplied */
        if (++slot == DEPTH) slot = 0;
    }
};

/* What float8 would cost without being packed: rows of the weight as they are, a line of 128 bytes of the L2 for 8 lanes, so
 * that others' copies are read behind a barrier of the warp; odd rows lie turned by half a line, for the banks. Timed only: the
 * scale comes from anywhere, and x is as for units. */
template <class F, int LG, int GPC, int DEPTH_>
struct rows_source {
    static constexpr int DEPTH = DEPTH_, WORDS = 1, LINE_UNITS = LG, SLOT = VALUES + 128, BYTES = DEPTH * SLOT;
    static_assert(F::UNIT_GROUPS == 1, "float8");
    walk at;
    const char *ring;
    uint32_t ring_address;
    int lane, row_bytes, slot = 0;

    __device__ __forceinline__ rows_source(const walk &at, char *smem, int lane) : at(at), ring(smem), lane(lane)
    {
        const int row = lane / 8, chunk = lane % 8;
        ring_address = shared_address(smem) + row * 128 + (chunk ^ row % 2 * 4) * 16;
        row_bytes = at.num_lines * at.line_bytes;
    }
    __device__ __forceinline__ void ask(int slot)
    {
        if (at.is_valid()) {
            const uint32_t to = ring_address + slot * SLOT;
            const char *from = at.from() + lane / 8 * row_bytes + lane % 8 * 16;
            for (int i = 0; i < 4; i++) copy_async<16>(to + i * 512, from + i * 4 * row_bytes);
            copy_async<4>(shared_address(ring) + slot * SLOT + VALUES + lane * 4, at.from());
            at.template next<128, LINE_UNITS>();
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void fill(int)
    {
        for (int i = 0; i < DEPTH; i++) ask(i);
    }
    template <int>
    __device__ __forceinline__ void take(uint4 (&w)[4], tail<WORDS> &its)
    {
        copy_async_wait<DEPTH - 1>();
        __syncwarp();
        const int g = lane / 4, q = lane % 4;
        const uint4 *from = (const uint4 *)(ring + slot * SLOT) + g * 8;
        for (int i = 0; i < 4; i++) w[i] = from[i % 2 * 64 + (q + i / 2 * 4 ^ g % 2 * 4)];
        its.scales[0] = ((const uint32_t *)(ring + slot * SLOT + VALUES))[lane];
    }
    template <int>
    __device__ __forceinline__ void done(uint4 (&)[4], tail<WORDS> &)
    {
        __syncwarp(); /* all lanes have read */
        ask(slot);
        if (++slot == DEPTH) slot = 0;
    }
};

/* Registers are the ring. */
template <class F, int LG, int GPC, int DEPTH_>
struct direct_source {
    static constexpr int DEPTH = DEPTH_, WORDS = F::template WORDS<GPC>, LINE_UNITS = LG / F::UNIT_GROUPS, BYTES = 0;
    walk at;
    int lane, tail_at, zeros_at;
    uint4 ring[DEPTH][4];
    tail<WORDS> tails[DEPTH];

    __device__ __forceinline__ direct_source(const walk &at, char *, int lane) : at(at), lane(lane)
    {
        tail_at = F::TAIL_SCALES + F::template scales_at<GPC>(lane / 4, lane % 4), zeros_at = F::zeros_at(lane / 4);
    }
    __device__ __forceinline__ void ask(uint4 (&w)[4], tail<WORDS> &its)
    {
        if (!at.is_valid()) return;
        const char *from = at.from() + lane * 16;
        for (int i = 0; i < 4; i++) w[i] = load_weights_16(from + i * 512);
        for (int i = 0; i < WORDS; i++) its.scales[i] = load_weights_4(at.from() + tail_at + i * 4);
        if (F::HAS_ZEROS) its.zeros = load_weights_4(at.from() + zeros_at);
        at.template next<F::UNIT, LINE_UNITS>();
    }
    __device__ __forceinline__ void fill(int)
    {
        for (int i = 0; i < DEPTH; i++) ask(ring[i], tails[i]);
    }
    template <int SLOT>
    __device__ __forceinline__ void take(uint4 (&w)[4], tail<WORDS> &its)
    {
        for (int i = 0; i < 4; i++) w[i] = ring[SLOT][i];
        its = tails[SLOT];
    }
    template <int SLOT>
    __device__ __forceinline__ void done(uint4 (&)[4], tail<WORDS> &)
    {
        ask(ring[SLOT], tails[SLOT]);
    }
};

#endif
