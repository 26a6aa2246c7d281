/* layout.h - how a quantised weight lies for the kernels of this lab, and which lane of a warp has what of a fragment.
 *
 * A weight is [blocks of 16 outputs][units]: a unit is 16 outputs by UNIT_GROUPS groups of 128 inputs, 2,048 bytes of
 * values and behind them a tail with what their scales need. So a unit, and any number of neighbours, is one bulk copy, and
 * 16 bytes of a lane are fragments of mma.m16n8k16 for several steps of 16 inputs. Nothing here needs a GPU: emulate.cpp
 * compiles it for the CPU. Terms: lane = 4 g + q, g a row of the fragment (and g + 8), q its four columns.
 */
#ifndef LAB_LAYOUT_H
#define LAB_LAYOUT_H

#include <stdint.h>

#ifdef __CUDACC__
#define HD __host__ __device__ __forceinline__
#else
#define HD inline
#endif

enum { BLOCK = 16 /* outputs */, GROUP = 128 /* inputs */, STEPS = 8 /* of 16 inputs, of a group */, VALUES = 2048 };

/* Input `i` (0 to 3) of lane q in step `step`, in its group: 8 neighbours are 16 bytes of x, and serve two steps. i = 0, 1
 * are columns 2q, 2q + 1 of the instruction, i = 2, 3 are 8 more. */
HD constexpr int input_of(int q, int step, int i) { return step / 2 * 32 + q * 8 + step % 2 * 4 + i; }

/* Where a value of a unit lies: byte of the unit, bit of the byte's word. */
struct place {
    int word; /* of 32 bits, in the unit */
    int bit;
};
struct position {
    int row, q, group, step, i;
};
HD constexpr position position_of(int row, int input)
{
    const int in_group = input % GROUP, in_32 = in_group % 32;
    return {row, in_32 / 8, input / GROUP, in_group / 32 * 2 + in_32 % 8 / 4, in_32 % 4};
}

/* int4: a word is one step of a lane: bits 0 to 7 of both halves are row g, 8 to 15 row g + 8; in each of those the lower
 * nibbles are inputs 0 and 1, the upper ones, worth 16 times as much where they lie, inputs 2 and 3. */
struct int4_layout {
    static constexpr int BITS = 4, UNIT_GROUPS = 2, TAIL_SCALES = VALUES, TAIL_ZEROS = VALUES + 64;
    static constexpr int unit_bytes(bool has_zeros) { return VALUES + 64 + (has_zeros ? 32 : 0); }
    HD static constexpr place place_of(int row, int input)
    {
        const position at = position_of(row, input);
        const int t = at.group * STEPS + at.step, lane = row % 8 * 4 + at.q;
        return {(t / 4 * 32 + lane) * 4 + t % 4, row / 8 * 8 + at.i / 2 * 4 + at.i % 2 * 16};
    }
    /* Of 16 bits; of zeros 8. */
    HD static constexpr int scale_at(int row, int group) { return (row % 8 * 2 + group) * 2 + row / 8; }
};

/* float8: a word is one step of a row of a lane, its bytes inputs 0 to 3. */
struct fp8_layout {
    static constexpr int BITS = 8, UNIT_GROUPS = 1, TAIL_SCALES = VALUES;
    static constexpr int unit_bytes(bool) { return VALUES + 32; } /* a scale in float32; whole sectors */
    HD static constexpr place place_of(int row, int input)
    {
        const position at = position_of(row, input);
        const int lane = row % 8 * 4 + at.q;
        return {(at.step / 2 * 32 + lane) * 4 + at.step % 2 * 2 + row / 8, at.i * 8};
    }
};

/* Columns of the other operand: of 8, GPC groups of inputs have 8 / GPC each, one for a row of x. All groups multiply all
 * columns, and a lane takes its sums from the one instruction chain of its own group: so one or two rows of x need a
 * quarter of the registers, and all lanes have some of x to make ready. */
template <int GPC>
struct columns {
    static constexpr int ROWS = 8 / GPC;
    HD static constexpr int group_of_x(int g) { return g / ROWS; }
    HD static constexpr int row_of_x(int g) { return g % ROWS; }
    HD static constexpr int group_of_sums(int q) { return q * 2 / ROWS; }
    HD static constexpr int row_of_sums(int q) { return q * 2 % ROWS; } /* and the next one */
};

#endif
