/* sample.c - sample for Python: docstrings and tables of parameters. csrc/ops/sampling.h defines what is computed. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/sample.h"

#define CALL pk_sample_call
const char py_sample_doc[] = PyDoc_STR(
    "sample($module, logits, temperatures, seeds, positions, *, top_k=None, top_p=None, min_p=None, "
    "repetition_penalties=None, presence_penalties=None, frequency_penalties=None, counts=None, slots=None, "
    "out=None, stream=None)\n--\n\n"
    "One token per row. Temperature 0 takes the largest logit (the lowest index of equal ones); otherwise one is\n"
    "drawn from softmax(logits / temperature).\n"
    "\n"
    "The optional arrays have one number per row. They lie on the logits' device and no host reads them, so a CUDA\n"
    "graph serves any mix of rows. A row with the neutral value (in parentheses), and every row where the array is\n"
    "left out, does without. The steps are vLLM's, in its order, in float32: the penalties change x = logits, the\n"
    "others drop tokens of rows that draw. Tokens that equal the last one kept are kept, too.\n"
    "\n"
    "Args:\n"
    "    logits: [num_rows, vocab_size] float32, float16 or bfloat16; -inf excludes a token.\n"
    "    temperatures: [num_rows] float32, finite and at least 0. One above 1e28 is taken as 1e28.\n"
    "    seeds: [num_rows] int64.\n"
    "    positions: [num_rows] int32, at least 0: the position of the new token in its sequence.\n"
    "    top_k: int32 (<= 0). Keeps the k largest x.\n"
    "    top_p: float32 (>= 1). Of what is left, keeps the most likely whose probabilities first reach p (Holtzman et\n"
    "        al. 2020); the most likely always. Any number but NaN.\n"
    "    min_p: float32 (<= 0). Drops what is less likely than min_p times the most likely (Nguyen et al. 2024).\n"
    "        Any number but NaN; above 1 it counts as 1.\n"
    "    repetition_penalties: float32 above 0 (1). Of tokens seen: x / r where x > 0, otherwise x * r (Keskar et al.\n"
    "        2019; transformers).\n"
    "    frequency_penalties, presence_penalties: float32 (0). x - frequency * n - presence, of tokens generated n >\n"
    "        0 times (OpenAI's API).\n"
    "    counts: [num_slots, vocab_size] int32, the tokens seen by each sequence, as count_tokens makes them (below 0: as\n"
    "        0). The penalties need it; sample adds each new token to its row.\n"
    "    slots: [num_rows] int32, the row of counts; left out, row i's is i. Negative: none, and no penalties. Two\n"
    "        rows of a call must not share a slot.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows] int32.\n" PY_DOC_RAISES
    "        A NaN logit, a row of nothing but -inf, and a number out of its range are a ValueError that names it; on\n"
    "        CUDA the row's token is -1 and check_errors() raises.\n"
    "\n"
    "The draw takes the largest x + temperature * g, computed in float32, the lowest token of equals; the first where\n"
    "x is inf. The g are independent Gumbel variates of Philox4x32-10 (Salmon et al. 2011) with the low and the high\n"
    "half of the seed as key: g = -log(E(y) / 16 + (v % 16 != (y * 0x9E3779B9 % 2**32) >> 28) * E(z)) of token v with\n"
    "E(w) = -log(1 - min((w + 0.5) * 2**-32, 1 - 2**-24)), y word b % 4 at counter (b // 4, position, 0, 0) for b = v\n"
    "// 16, and z word v % 4 at counter (v // 4, position, 1, 0): the least of 16 exponential variates, and what the\n"
    "others have more. So a row's token depends on its logits, parameters, seed and position only: not on the batch,\n"
    "on chunking, on threads or on the device.\n");
PY_OP(sample, P(TENSOR, logits), P(TENSOR, temperatures), P(TENSOR, seeds), P(TENSOR, positions), P(OPTIONAL, top_k),
      P(OPTIONAL, top_p), P(OPTIONAL, min_p), P(OPTIONAL, repetition_penalties), P(OPTIONAL, presence_penalties),
      P(OPTIONAL, frequency_penalties), P(OPTIONAL_WRITTEN, counts), P(OPTIONAL, slots), P(OUTPUT, out));
