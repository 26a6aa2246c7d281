/* thresholds.h - the numbers that measurements chose: which kernel answers, and how its work is divided.
 *
 * All were measured on an H200; where another card would want others, nobody has looked. What follows from registers
 * or from the room in shared memory stands with its kernel instead. Each group names the notes in benchmarks/lab that
 * have the figures.
 */
#ifndef PK_CUDA_THRESHOLDS_H
#define PK_CUDA_THRESHOLDS_H

namespace thresholds
{

/* attention/attention.cu: decode or prefill for a batch (prefill/NOTES.md #23, #24, #35b, decode/NOTES.md #45). */
constexpr int ITEM_TILES = 2;    /* tiles of 16 rows, which the decode kernel goes through while prefill does an item */
constexpr double SOONER = 1.6e8; /* rows * keys * head_dim, before prefill begins; a quarter with 256 dims */

/* Prefill takes sequences with one new token, too: one kernel instead of two (prefill/NOTES.md #35). */
constexpr int ITEMS_AN_SM = 4;     /* at most, counted as if no two sequences shared one, */
constexpr int KEYS_OF_ITEMS = 512; /* and a table for so many keys at most */

/* attention/qkv_attention.cu: up to so many sequences the decode kernel makes its heads (decode/NOTES.md, fused heads). With
 * few heads it does up to SM90_MAX_ROWS: the projection before it is an own kernel, which lets it start early
 * (linear/NOTES-sm90.md #20, #22, #29). */
constexpr int FEW_HEADS = 2048; /* elements in all queries of a token; attention/decode/decode.cu uses it, too */
constexpr int MOST_SEQS_OF_MORE_HEADS = 8;

/* attention/plan/shape.cu: how large CTAs are, and which sequences are not cut (engine/NOTES.md, "A step beyond its keys"). */
constexpr int FEW_PARTS = 8;             /* per tile of 8 rows: not worth CTAs of a whole SM */
constexpr int FEW_STEPS = 16;            /* of the smallest CTAs: a start takes as long as three of them (#101) */
constexpr int FEWEST_STEPS_OF_SHARE = 8; /* of a place: with fewer it takes no second unit (#78) */
constexpr int MANY_SUMS = 16 * 256;      /* of a tile: */
constexpr float LONE_STEP_US = 0.83f, LONE_STEP_US_OF_MANY_SUMS = 1.25f; /* of a CTA that runs on alone */
constexpr float BYTES_AN_SM_US = 34e3f;                                  /* that an SM reads beside all others */
constexpr float UNEVEN = 1.25f;  /* times the share of busy SMs: not spread evenly, they read as if more were busy */
constexpr float START_US = 2.0f; /* of a unit behind another, until its first step, or of prefill's item; */
constexpr float LEAVE_US = 1.8f; /* of a part, until it is left to be merged, in prefill, too; */
constexpr float MERGE_US = 0.9f; /* for up to 17 parts, in a round of threads that merge (#113) */

/* attention/prefill/prefill.h: how fast items are (prefill/NOTES.md #34). */
constexpr float KEY_US = 5.2e-3f, KEY_DIM_US = 5.1e-5f; /* of an item's key, and per head_dim */
constexpr float DIMS_OF_ROUND = 32;                     /* of a part for each SM: they are merged in MERGE_US */

/* attention/prefill/sm90.cu: three warpgroups with head_dim 64 (prefill/NOTES.md #13). */
constexpr int TALL_QUERIES = 512; /* of the longest prompt, at least, */
constexpr int TALL_QUARTERS = 3;  /* of the places in their waves, where items of two could be cut (#39) */

/* linear/sm90.cu, beside linear/few.cu below and cuBLASLt above (linear/NOTES-sm90.md, NOTES-wide.md). */
constexpr int SM90_MIN_ROWS = 9, SM90_MAX_ROWS = 112; /* #20, #29 */
constexpr int SM90_MAX_UNITS = 8; /* of 128 inputs, that one CTA goes through without being slower */
/* Where a CTA goes through more than SM90_MAX_UNITS: */
constexpr int SM90_MAX_ROWS_OF_LONG = 64;
constexpr int SM90_FEW_ROWS = 32; /* up to which two CTAs an SM are faster than one (#21) */

/* comm/collectives.cu: all_reduce in two shots where it saves so many bytes of a link: those that go over it while a word
 * does. A way takes 1.6 us of what two GPUs took, and 390 GB/s were read off them; nobody has measured more than two, of
 * which one shot is always faster (comm/NOTES.md). */
constexpr double HOP_BYTES = 1.6e-6 * 390e9;

}  // namespace thresholds

#endif
