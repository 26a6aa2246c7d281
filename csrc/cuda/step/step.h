/* step.h - one kernel for a whole decode step of few rows on Hopper: what it is given, and how its work is divided.
 *
 * A team of 16 CTAs has a KV head: its rows of q, k and v, the columns of o that its heads are multiplied by, and a share
 * of the MLP. Inside a team all is exchanged: q k v, parts of attention, attention, activations, x. Between teams only
 * sums are: each leaves what it adds to x, and the CTA of the same rank of every team adds them up.
 *
 *     x -> q k v -> parts of attention -> attention -> sums -> x -> activations -> sums -> x
 *
 * A team is a cluster, whose CTAs write into each other's shared memory; or 16 CTAs that leave words in global memory.
 * Either way a CTA's mail lies in its own shared memory when a barrier says so (cta.h). Words in global memory say
 * themselves whether they are new: 4 bytes of data, 4 of epoch; sums between teams say so in their last bits.
 *
 * A place may be written over once its writer has waited for something that each reader sends only after reading. In each
 * round every CTA waits for its whole team, so a team needs one buffer of each kind; between teams it takes two.
 */
#ifndef PK_CUDA_STEP_H
#define PK_CUDA_STEP_H

#include "cuda/pack.h"
#include "cuda/sample/sample.h"
#include "cuda/sm90.h"

#define STEP_FN __device__ __forceinline__
#ifndef STEP_RANKS
#define STEP_RANKS 16 /* CTAs of a team; a test has fewer */
#endif
enum {
    STEP_ROWS = 2, /* at most */
    STEP_LAYERS = 64,
    STEP_KEYS = 768, /* of a row that a rank has, at most: with two rows the ring of a cluster still has 5 stages */
    STEP_TEAMS = 8,
    STEP_HEAD_DIM = 128,
    STEP_DIMS = STEP_HEAD_DIM / STEP_RANKS, /* of a head: a rank's */
    STEP_VECTOR = 8, /* elements of a cache, so that 16 bytes of bf16 and 8 of e4m3 are aligned */
    STEP_OCTETS = STEP_DIMS / 8,
    STEP_CONSUMERS = 8, /* warps that multiply and attend */
    STEP_COPIER = STEP_CONSUMERS,
    STEP_SENDER,
    STEP_FETCHER,                   /* the others' first warps: one each, */
    STEP_FETCHERS = 2,              /* and two of these, where teams are not clusters */
    STEP_STAGE = 16 << 10,          /* bytes of the ring: a chunk, */
    STEP_IN_FLIGHT = 3,             /* chunks under way at most; more were slower in all models */
    STEP_WIDE = 512,                /* of 16 rows and so many inputs, which the warps share, or */
    STEP_NARROW = 128,              /* of 64 rows and so many inputs, with 16 rows and half of the inputs a warp */
    STEP_COLUMNS = 64,              /* inputs of a warp in a chunk, */
    STEP_STEPS = STEP_COLUMNS / 16, /* steps of the matrix instruction */
    STEP_PANEL = 3,                 /* wide blocks whose sums meet at once */
    STEP_WIDE_SUMS = STEP_PANEL * 16 + 4,
    STEP_NARROW_ROWS = 64,
    STEP_NARROW_SUMS = STEP_NARROW_ROWS + 4,
    STEP_ENDS = 2 * STEP_CONSUMERS, /* of a head: maxima of the warps, their sums */
    STEP_PARTS = STEP_RANKS + 4     /* words between lines of parts */
};
constexpr int step_threads(bool is_cluster) { return (STEP_FETCHER + (is_cluster ? 0 : (int)STEP_FETCHERS)) * 32; }

enum pk_step_phase { STEP_QKV, STEP_O, STEP_GATE_UP, STEP_DOWN, STEP_HEAD };
enum pk_step_mail { MAIL_X, MAIL_SQUARES, MAIL_QKV, MAIL_PARTS, MAIL_ATTENTION, MAIL_GATED, STEP_MAILS };

struct pk_step_layer {
    const __nv_bfloat16 *q_norm, *k_norm; /* [head_dim], both or neither */
    void *k_cache, *v_cache;              /* bf16 or e4m3 */
    uint32_t row[4], column[4];           /* where the weight of a phase begins in its map: pk_step_place */
};

struct pk_step_args {
    const __nv_bfloat16 *embedding, *norm;
    const float *cos_sin; /* [max_positions, head_dim] */
    int num_layers, hidden, ffn, q_heads, kv_heads, vocab, max_positions;
    uint32_t head_row, head_column; /* of the head's weight in its map */
    float eps, softmax_scale;
    int block_size, num_blocks;
    pk_cache_strides strides;      /* of K and of V */
    pk_scale_arg k_scale, v_scale; /* of e4m3 */
    int num_rows;
    const int32_t *tokens; /* -1 - r: what is in row r of sample.out */
    const int32_t *positions, *slots, *context_lens, *block_tables;
    int64_t table_stride;
    pk_sample_args sample; /* temperatures, seeds, positions, out, num_rows, vocab_size */
    __nv_bfloat16 *dump;   /* NULL, or [num_layers, 2, num_rows, hidden]: x after each half of a layer */
};

/* Words in global memory; see pk_step_plan. */
struct pk_step_words {
    uint32_t *sums;  /* [2][rows][ranks][teams][hidden / ranks], tagged */
    uint64_t *best;  /* [rows][ctas][2] */
    uint64_t *mails; /* [teams][mail_words] */
    /* [0] the last epoch, [1] not 0: somebody gave up (2: on what should always come), [2] who, [3] steps */
    uint32_t *head;
};

// --- how the work is divided

/* A CTA's blocks of a weight: of 16 rows and all inputs, or (narrow) of 64 rows and its team's inputs. A panel's sums meet
 * at once. */
struct step_phase {
    int blocks, columns, per_panel, panels; /* columns: chunks of a block */

    step_phase() = default;
    step_phase(const pk_step_args &args, int phase)
    {
        const int teams = args.kv_heads, group = args.q_heads / teams;
        per_panel = STEP_PANEL, columns = args.hidden / STEP_WIDE, blocks = 0;
        if (phase == STEP_QKV) blocks = (group + 2) * STEP_OCTETS / 2;
        if (phase == STEP_GATE_UP) blocks = args.ffn / (teams * STEP_RANKS * 8);
        if (phase == STEP_O || phase == STEP_DOWN) {
            per_panel = 1, blocks = args.hidden / STEP_RANKS / STEP_NARROW_ROWS;
            columns = (phase == STEP_O ? group * STEP_HEAD_DIM : args.ffn / teams) / STEP_NARROW;
        }
        panels = (blocks + per_panel - 1) / per_panel; /* the head's differ: step_cta::part */
    }
    __device__ int blocks_of(int panel) const { return min(per_panel, blocks - panel * per_panel); }
    __device__ static int first_of_head(const pk_step_args &args, int cta)
    {
        return (int)((uint32_t)cta * (uint32_t)(args.vocab / 16) / (uint32_t)(args.kv_heads * STEP_RANKS));
    }
};

inline int step_num_chunks(const pk_step_args &args) /* of a layer */
{
    int count = 0;
    for (int phase = STEP_QKV; phase < STEP_HEAD; phase++)
        count += step_phase(args, phase).blocks * step_phase(args, phase).columns;
    return count;
}

/* Of one kind, in shared memory at `smem`: lines of words of 4 bytes. In a team's words it begins at `area`. */
struct step_mail {
    int smem, lines, words, stride, area;
    __host__ __device__ int count() const { return lines * words; }
};

/* Places in shared memory. */
struct step_smem {
    step_mail mails[STEP_MAILS];
    int ring, sums, table, chunks, items, places, angles, heads, residual, asked, barriers, bytes;
    int mail_words; /* of a team */

    step_smem() = default;
    step_smem(const pk_step_args &args, int num_stages)
    {
        const int group = args.q_heads / args.kv_heads, rows = args.num_rows, dims = group * STEP_DIMS;
        int at = 0;
        auto take = [&](int size) {
            const int old = at;
            at += (size + 31) / 32 * 32;
            return old;
        };
        ring = take(num_stages * STEP_STAGE);
        mail_words = 0;
        auto box = [&](int kind, int lines, int words, int stride) {
            mails[kind] = {take(lines * stride * 4), lines, words, stride, mail_words};
            mail_words += lines * words * (kind == MAIL_PARTS ? STEP_RANKS : 1);
        };
        box(MAIL_X, rows, args.hidden / 2, args.hidden / 2 + 4);
        box(MAIL_SQUARES, rows, STEP_RANKS, STEP_RANKS);
        box(MAIL_QKV, rows, (group + 2) * STEP_HEAD_DIM / 2, (group + 2) * STEP_HEAD_DIM / 2);
        box(MAIL_PARTS, rows * (dims + 2 * group), STEP_RANKS, STEP_PARTS);
        box(MAIL_ATTENTION, rows, group * STEP_HEAD_DIM / 2, group * STEP_HEAD_DIM / 2 + 4);
        box(MAIL_GATED, rows, args.ffn / args.kv_heads / 2, args.ffn / args.kv_heads / 2 + 4);
        const int sum_bytes = 2 * sums_words(rows) * 4,
                  state_bytes = STEP_CONSUMERS * group * (STEP_HEAD_DIM + STEP_ENDS) * 4;
        sums = take(sum_bytes > state_bytes ? sum_bytes : state_bytes); /* states lie there, too: attend.h */
        table = take(args.num_layers * (int)sizeof(pk_step_layer));
        chunks = take(step_num_chunks(args) * 16);
        items = take(rows * 16);
        places = take(rows * STEP_KEYS * 4);
        angles = take(rows * STEP_HEAD_DIM * 4);
        heads = take(rows * (group + 2) * STEP_HEAD_DIM * 2);
        residual = take(rows * args.hidden / STEP_RANKS * 2);
        asked = take(rows * (int)sizeof(pk_sample_row));
        barriers = take((2 * num_stages + STEP_MAILS) * 8);
        bytes = at;
    }
    /* Of a turn. */
    __host__ __device__ static int sums_words(int rows) { return rows * STEP_CONSUMERS * STEP_WIDE_SUMS; }
};

struct pk_step_params {
    CUtensorMap maps[3]; /* of weights by their number of inputs: hidden, q_heads * head_dim, ffn */
    pk_step_args args;
    pk_step_words words;
    step_smem at;
    step_phase phases[5];
    int num_chunks, num_stages;        /* of a layer, of the ring */
    uint32_t patience_ns;              /* for words of other CTAs in global memory */
    pk_step_layer layers[STEP_LAYERS]; /* norms of x are folded into qkv and gate_up */
};

/* A sum between teams says in its last bits when it was written. They are masked before it is added to anything. */
enum { STEP_TAG = 15 };
__device__ static inline uint32_t step_tagged(float x, uint32_t epoch)
{
    return (__float_as_uint(x) & ~STEP_TAG) | (epoch & STEP_TAG);
}

#endif
