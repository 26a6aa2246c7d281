/* step.h - one kernel for a whole decode step of few rows on Hopper: what it is given, and how its work is divided.
 *
 * All CTAs run at once, one on an SM, and stay to the end. Each has its rows of every weight, which stream through a
 * ring in its shared memory without a break, from the first layer to the head. What a CTA makes of its rows all others
 * need, so it leaves them as words of 8 bytes in global memory: 4 of data and 4 that say in which layer of which step
 * they were written. Who needs a word reads it until it says so. No flag, no counter, no barrier of the grid.
 *
 *     x -> q k v -> partial attention -> attention -> x -> activations -> x: six such exchanges a layer
 *
 * A word may be overwritten as soon as all who read it have answered by words that the writer has waited for. Around the
 * circle above everybody waits for everybody, so one buffer of each kind is enough.
 */
#ifndef PK_CUDA_STEP_H
#define PK_CUDA_STEP_H

#include "cuda/mma.h"
#include "cuda/pack.h"
#include "cuda/sample/sample.h"
#include "cuda/sm90.h"

enum {
    STEP_ROWS = 4, /* at most */
    STEP_HEAD_DIM = 128,
    STEP_CONSUMERS = 8, /* warps that multiply and attend */
    STEP_SENDERS = 3,   /* warps that add up what those have, and leave it for the other CTAs */
    STEP_THREADS = (STEP_CONSUMERS + STEP_SENDERS + 1) * 32,
    STEP_BLOCK = 8,                             /* rows of a weight in a chunk */
    STEP_COLUMNS = 1024,                        /* inputs of a chunk, */
    STEP_OWN = STEP_COLUMNS / STEP_CONSUMERS,   /* a consumer's of them: */
    STEP_SLICES = STEP_OWN / 64,                /* slices, of which a lane has two neighbours' word */
    STEP_UNITS = STEP_OWN / 32,                 /* units of the matrix instruction's operand */
    STEP_CHUNK = STEP_BLOCK * STEP_COLUMNS * 2, /* bytes: a stage of the ring */
    STEP_PANEL = 6,                             /* blocks whose sums meet at once */
    STEP_OUTPUTS = STEP_PANEL * STEP_BLOCK,
    STEP_SUMS = STEP_OUTPUTS + 4,  /* spreads the banks */
    STEP_SPLITS = 16,              /* parts of a sequence's keys, at most */
    STEP_STATE = 2 + STEP_HEAD_DIM /* words of a head's partial attention: maximum, sum, values */
};

struct pk_step_layer {                             /* device memory; norms of x are folded into qkv and gate_up */
    const __nv_bfloat16 *qkv, *o, *gate_up, *down; /* [outputs, inputs] dense; gates, then ups */
    const __nv_bfloat16 *q_norm, *k_norm;          /* [head_dim], both or neither */
    void *k_cache, *v_cache;                       /* bf16 or e4m3 */
};

struct pk_step_args {
    const pk_step_layer *layers; /* [num_layers], device memory */
    const __nv_bfloat16 *embedding, *head, *norm;
    const float *cos_sin; /* [max_positions, head_dim] */
    int num_layers, hidden, ffn, q_heads, kv_heads, vocab, max_positions;
    float eps, softmax_scale;
    int block_size, num_blocks;
    pk_cache_strides k_strides, v_strides;
    pk_scale_arg k_scale, v_scale; /* of e4m3 */
    int num_rows;
    const int32_t *tokens, *positions, *slots, *context_lens, *block_tables;
    int64_t table_stride;
    pk_sample_args sample; /* temperatures, seeds, positions, out, num_rows, vocab_size */
    __nv_bfloat16 *dump;   /* NULL, or [num_layers, 2, num_rows, hidden]: x after each half of a layer */
};

/* Words in global memory, by kind; see pk_step_words_of. */
struct pk_step_words {
    uint64_t *x[2];      /* [rows][hidden / 2]: after attention, after the MLP */
    uint64_t *qkv;       /* [rows][heads][64] */
    uint64_t *states;    /* [rows][q heads][splits][STEP_STATE] */
    uint64_t *attention; /* [rows][q heads * 64] */
    uint64_t *gated;     /* [rows][ffn / 2] */
    uint64_t *best;      /* [rows][ctas][2] */
    uint32_t *head;      /* [0] steps so far, [1] not 0: somebody gave up, [2] who */
};

/* Places in shared memory. */
struct step_smem {
    int ring, sums, squares, table, stash, item, angles, heads, states, best, barriers, bytes;

    step_smem() = default;
    step_smem(const pk_step_args &args, int num_stages)
    {
        const int group = args.q_heads / args.kv_heads;
        int at = 0;
        ring = at, at += num_stages * STEP_CHUNK;
        sums = at, at += 2 * args.num_rows * STEP_CONSUMERS * STEP_SUMS * 4;
        squares = at, at += 2 * args.num_rows * STEP_CONSUMERS * 4;
        table = at, at += args.num_layers * (int)sizeof(pk_step_layer);
        stash = at, at += args.num_rows * ((args.hidden + STEP_COLUMNS - 1) / STEP_COLUMNS) * (STEP_COLUMNS / 2) * 4;
        item = at, at += 32;
        angles = at, at += STEP_HEAD_DIM * 4;
        heads = at, at += (group + 2) * STEP_HEAD_DIM * 2;
        states = at, at += STEP_CONSUMERS * group * (STEP_HEAD_DIM + 4) * 4;
        best = at, at += STEP_ROWS * 8;
        barriers = at, at += 2 * num_stages * 8;
        bytes = at;
    }
};

struct pk_step_params {
    pk_step_args args;
    pk_step_words words;
    step_smem at;
    int num_ctas, num_splits, num_stages;
    int in_flight, prefetch; /* chunks under way at most; how many phases ahead the L2 is asked, */
    uint32_t prefetch_bytes; /* for so much of a phase */
    int flags;
};
enum { STEP_UNFENCED = 1, STEP_SHORT_WAIT = 2, STEP_NEVER_WAIT = 4 }; /* for measurements */

#ifdef STEP_TRACE
__device__ uint32_t *step_trace; /* [layers][32] clocks of CTA 37 */
#define STEP_MARK(cta, i)                                                                                \
    do {                                                                                                 \
        uint32_t clock_;                                                                                 \
        asm volatile("mov.u32 %0, %clock;" : "=r"(clock_)::"memory");                                    \
        if ((cta).cta == 37 && (cta).lane == 0 && ((cta).warp == 0 || (cta).warp == STEP_CONSUMERS + 1)) \
            step_trace[(cta).layer * 32 + (i)] = clock_;                                                 \
    } while (0)
#else
#define STEP_MARK(cta, i)
#endif

// --- how the work is divided

enum pk_step_phase { STEP_QKV, STEP_O, STEP_GATE_UP, STEP_DOWN, STEP_HEAD };

/* This CTA's rows of a weight, in blocks and panels. Of gate_up three blocks of a panel are gates and three are ups. */
struct step_phase {
    const __nv_bfloat16 *weight;
    int first, count, size, offset; /* rows; inputs; from gates to ups, else 0 */

    __host__ __device__ static int start(int cta, int num_ctas, int rows) /* an even one */
    {
        return (int)((uint32_t)cta * ((uint32_t)rows / 2) / (uint32_t)num_ctas) * 2;
    }
    __device__ step_phase() {}
    __device__ step_phase(const pk_step_args &args, const pk_step_layer *layer, int phase, int cta, int num_ctas)
    {
        const int heads = (args.q_heads + 2 * args.kv_heads) * STEP_HEAD_DIM, width = args.q_heads * STEP_HEAD_DIM;
        int rows = args.hidden;
        size = args.hidden, offset = 0;
        if (phase == STEP_QKV) weight = layer->qkv, rows = heads;
        if (phase == STEP_O) weight = layer->o, size = width;
        if (phase == STEP_GATE_UP) weight = layer->gate_up, rows = offset = args.ffn;
        if (phase == STEP_DOWN) weight = layer->down, size = args.ffn;
        if (phase == STEP_HEAD) weight = args.head, rows = args.vocab;
        first = start(cta, num_ctas, rows), count = start(cta + 1, num_ctas, rows) - first;
    }
    __device__ int panel_rows() const { return offset ? STEP_OUTPUTS / 2 : STEP_OUTPUTS; }
    __device__ int num_panels() const { return (count + panel_rows() - 1) / panel_rows(); }
    __device__ int num_lines() const { return (size + STEP_COLUMNS - 1) / STEP_COLUMNS; }
    __device__ int row_of(int panel, int block) const /* of its own */
    {
        const bool is_up = offset && block >= STEP_PANEL / 2;
        return panel * panel_rows() + (is_up ? block - STEP_PANEL / 2 : block) * STEP_BLOCK;
    }
    __device__ int rows_of(int panel, int block) const
    {
        const int left = count - row_of(panel, block);
        return left < 0 ? 0 : left < STEP_BLOCK ? left : STEP_BLOCK;
    }
    __device__ int weight_row(int panel, int block) const /* from `first` on */
    {
        return row_of(panel, block) + (offset && block >= STEP_PANEL / 2 ? offset : 0);
    }
};

#endif
