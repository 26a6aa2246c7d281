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

/* Of a group, lane q has 8 inputs from 8 q on of each 32: a piece, 16 bytes of x. */

/* Where a value of a unit lies: byte of the unit, bit of the byte's word. */
struct place {
    int word; /* of 32 bits, in the unit */
    int bit;
};
/* int4: of 64 inputs a lane has two pieces of 8 in each row; a word is half of both pieces of a row: lower nibbles are of the
 * first piece, upper ones of the second, worth 16 times as much where they lie. Bytes 0 and 2 are neighbours, and so are 1
 * and 3, so a mask makes pairs for numbers of 16 bits, or four numbers of 8 bits. 16 bytes: rows g and g + 8 of the first
 * halves, then of the second ones. */
struct int4_layout {
    static constexpr int BITS = 4, UNIT_GROUPS = 2, TAIL_SCALES = VALUES, TAIL_ZEROS = VALUES + 64;
    static constexpr int unit_bytes(bool has_zeros) { return VALUES + 64 + (has_zeros ? 32 : 0); }
    HD static constexpr place place_of(int row, int input)
    {
        const int in_group = input % GROUP, piece = in_group / 32, q = in_group % 32 / 8, i = in_group % 8;
        const int lane = row % 8 * 4 + q, brick = input / GROUP * 2 + piece / 2;
        return {(brick * 32 + lane) * 4 + i / 4 * 2 + row / 8, (i % 2 * 2 + i / 2 % 2) * 8 + piece % 2 * 4};
    }
    /* Which of a lane's 16 pairs of inputs of a group are multiplied in a step: its columns 2q, 2q + 1, and 8 more. */
    HD static constexpr int pair_at(int step, bool is_second) { return step / 4 * 8 + (is_second ? 4 : 0) + step % 4; }
    /* Of 16 bits; of zeros 8. */
    HD static constexpr int scale_at(int row, int group) { return (row % 8 * 2 + group) * 2 + row / 8; }
};

/* float8: a word is one step of a row of a lane, its bytes inputs 0 to 3. */
struct fp8_layout {
    static constexpr int BITS = 8, UNIT_GROUPS = 1, TAIL_SCALES = VALUES;
    static constexpr int unit_bytes(bool) { return VALUES + 32; } /* a scale in float32; whole sectors */
    HD static constexpr place place_of(int row, int input)
    {
        const int piece = input / 32, q = input % 32 / 8, i = input % 8, step = piece * 2 + i / 4,
                  lane = row % 8 * 4 + q;
        return {(step / 2 * 32 + lane) * 4 + step % 2 * 2 + row / 8, i % 4 * 8};
    }
    HD static constexpr int pair_at(int step, bool is_second) { return step * 2 + (is_second ? 1 : 0); }
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
