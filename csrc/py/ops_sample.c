/* ops_sample.c - sampling, for Python: bind, make views, call. No rule about shapes is here: those are in
 * csrc/ops_sample.c and ops_linear.c; what is computed is defined in csrc/sampling.h. */
#include "py/call.h"
#include "py/docs.h"

PyDoc_STRVAR(
    sample_doc,
    "sample($module, logits, temperatures, seeds, positions, *, top_k=None, top_p=None, min_p=None, "
    "repetition_penalties=None, presence_penalties=None, frequency_penalties=None, counts=None, slots=None, "
    "out=None, stream=None)\n--\n\n"
    "One token a row. Temperature 0 takes the largest logit (the lowest index of equal ones); otherwise one is drawn\n"
    "from softmax(logits / temperature).\n\n"
    "logits: [num_rows, vocab_size] float32, float16 or bfloat16; -inf excludes a token. temperatures: [num_rows]\n"
    "float32, finite and at least 0. seeds: [num_rows] int64. positions: [num_rows] int32, at least 0: the position\n"
    "of the new token in its sequence. Returns out, [num_rows] int32.\n\n"
    "What follows is one number a row on the logits' device, read by no host, so a CUDA graph serves any mix of rows;\n"
    "a row with the neutral value, and every row where the array is left out, does without. The steps are vLLM's, in\n"
    "its order, in float32; the first three change x = logits, the others drop tokens of rows that draw:\n\n"
    "repetition_penalties: float32 above 0 (neutral 1). Of tokens seen: x / r where x > 0, otherwise x * r (Keskar et\n"
    "al. 2019; transformers).\n"
    "frequency_penalties, presence_penalties: float32 (0). x - frequency * n - presence, of tokens generated n > 0\n"
    "times (OpenAI's API).\n"
    "min_p: float32 (<= 0). Drops what is less likely than min_p times the most likely (Nguyen et al. 2024).\n"
    "top_k: int32 (<= 0). Keeps the k largest x.\n"
    "top_p: float32 (>= 1). Of what is left, keeps the most likely whose probabilities first reach p (Holtzman et al.\n"
    "2020); the most likely always.\n"
    "Tokens that equal the last one kept are kept, too.\n\n"
    "counts: [num_slots, vocab_size] int32, the tokens seen by each sequence, as count_tokens makes them; needed by\n"
    "the penalties. sample adds each new token to its row. slots: [num_rows] int32, the row of counts (left out: row\n"
    "i's is i); negative: none, and no penalties. Two rows of a call must not share a slot.\n\n" PY_DOC_OUT
        PY_DOC_STREAM PY_DOC_ERRORS
    "A NaN logit, a row of nothing but -inf, and a number out of its range are a ValueError that names it; on CUDA the\n"
    "row's token is -1 and check_errors() raises.\n\n"
    "The draw takes the largest x + temperature * g, computed in float32, the lowest token of equals; the first where x\n"
    "is inf. The g are independent Gumbel variates of Philox4x32-10 (Salmon et al. 2011) with the low and the high half\n"
    "of the seed as key: g = -log(E(y) / 16 + (v % 16 != (y * 0x9E3779B9 % 2**32) >> 28) * E(z)) of token v with\n"
    "E(w) = -log(1 - min((w + 0.5) * 2**-32, 1 - 2**-24)), y word b % 4 at counter (b // 4, position, 0, 0) for\n"
    "b = v // 16, and z word v % 4 at counter (v // 4, position, 1, 0): the least of 16 exponential variates, and what\n"
    "the others have more. So a row's token depends on its logits, parameters, seed and position only: not on the batch,\n"
    "on chunking, on threads or on the device. A temperature above 1e28 is taken as 1e28.");
static PyObject *py_sample(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum {
        LOGITS,
        TEMPERATURES,
        SEEDS,
        POSITIONS,
        TOP_K,
        TOP_P,
        MIN_P,
        REPETITION_PENALTIES,
        PRESENCE_PENALTIES,
        FREQUENCY_PENALTIES,
        COUNTS,
        SLOTS,
        OUT,
        STREAM
    };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_sample, STREAM, args, nargs, kwnames) < 0) return NULL;
    pk_sample_call request = {
        .logits = py_call_tensor(&call, LOGITS),
        .temperatures = py_call_tensor(&call, TEMPERATURES),
        .seeds = py_call_tensor(&call, SEEDS),
        .positions = py_call_tensor(&call, POSITIONS),
        .top_k = py_call_optional(&call, TOP_K),
        .top_p = py_call_optional(&call, TOP_P),
        .min_p = py_call_optional(&call, MIN_P),
        .repetition_penalties = py_call_optional(&call, REPETITION_PENALTIES),
        .presence_penalties = py_call_optional(&call, PRESENCE_PENALTIES),
        .frequency_penalties = py_call_optional(&call, FREQUENCY_PENALTIES),
        .counts = py_call_optional_writable(&call, COUNTS),
        .slots = py_call_optional(&call, SLOTS),
        .out = &out.base,
    };
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_sample(&request, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}

PyDoc_STRVAR(
    sample_linear_doc,
    "sample_linear($module, x, weight, temperatures, seeds, positions, *, logits, weight_is_constant=False, out=None, "
    "stream=None)\n--\n\n"
    "The tokens that sample takes of the logits x @ weight.T, accumulated in float32: the head of a model and the draw.\n\n"
    "x: [num_rows, in_features] float32, float16 or bfloat16. weight: [vocab_size, in_features] of x's dtype.\n"
    "temperatures, seeds, positions: one number a row, see sample. Returns out, [num_rows] int32.\n"
    "logits: [num_rows, vocab_size] float32, memory for the product. What it holds afterwards is undefined: where a\n"
    "kernel of a GPU does all of it, no logits are ever in memory. It adds in an order of its own, so a near tie may\n"
    "fall the other way than with linear and sample.\n"
    "weight_is_constant: see linear.\n" PY_DOC_OUT PY_DOC_STREAM PY_DOC_ERRORS
    "What sample refuses is refused as there: by name on the CPU, with -1 and check_errors() on CUDA.");
static PyObject *py_sample_linear(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, WEIGHT, TEMPERATURES, SEEDS, POSITIONS, LOGITS, WEIGHT_IS_CONSTANT, OUT, STREAM };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_sample_linear, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *x = py_call_tensor(&call, X), *weight = py_call_tensor(&call, WEIGHT);
    const pk_sample_call request = {
        .temperatures = py_call_tensor(&call, TEMPERATURES),
        .seeds = py_call_tensor(&call, SEEDS),
        .positions = py_call_tensor(&call, POSITIONS),
        .logits = py_call_writable(&call, LOGITS),
        .out = &out.base,
    };
    const bool weight_is_constant = py_call_bool(&call, WEIGHT_IS_CONSTANT, false);
    py_call_ensure_blas(&call, x);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_sample_linear(x, weight, weight_is_constant, &request, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}

PyDoc_STRVAR(
    count_tokens_doc,
    "count_tokens($module, prompt_ids, output_ids, counts, *, stream=None)\n--\n\n"
    "Fills counts with what the penalties of sample need to know of a sequence: counts[v] = 2 * (times that output_ids\n"
    "holds v) + (whether prompt_ids holds v). Once for a sequence, on its row of a table; sample goes on counting.\n\n"
    "prompt_ids, output_ids: [any] int32 or int64, what was given and what was generated, on counts' device.\n"
    "counts: [vocab_size] int32, overwritten.\n" PY_DOC_STREAM PY_DOC_ERRORS
    "An id outside of counts raises ValueError on the CPU; CUDA leaves it out and records it for check_errors().");
static PyObject *py_count_tokens(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { PROMPT_IDS, OUTPUT_IDS, COUNTS, STREAM };
    py_call call;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_count_tokens, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *prompt_ids = py_call_tensor(&call, PROMPT_IDS), *output_ids = py_call_tensor(&call, OUTPUT_IDS);
    const pk_view *counts = py_call_writable(&call, COUNTS);
    PY_CALL_RUN(&call, pk_count_tokens(prompt_ids, output_ids, counts, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}

PyDoc_STRVAR(
    token_logprobs_doc,
    "token_logprobs($module, logits, token_ids, num_best=0, *, out_ids=None, out=None, stream=None)\n--\n\n"
    "log softmax(logits) of one token of each row (the sampled one, or the prompt's next) and of the num_best most\n"
    "likely ones. Before temperature, penalties and filters, as vLLM's default (raw_logprobs).\n\n"
    "logits: [num_rows, vocab_size] float32, float16 or bfloat16. token_ids: [num_rows] int32. num_best: 0 to 20.\n"
    "Returns out_ids, [num_rows, 1 + num_best] int32, and out, of the same shape, float32: first the token itself,\n"
    "then the best in order, the lowest id first of equal ones. A row whose token is negative, or whose logits have\n"
    "no softmax (NaN, inf, nothing but -inf), gets ids -1 and NaN.\n" PY_DOC_OUT PY_DOC_STREAM PY_DOC_ERRORS
    "A token outside of the vocabulary raises ValueError on the CPU; CUDA skips its row and records it for\n"
    "check_errors().");
static PyObject *py_token_logprobs(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { LOGITS, TOKEN_IDS, NUM_BEST, OUT_IDS, OUT, STREAM };
    py_call call;
    py_output ids, out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_token_logprobs, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *logits = py_call_tensor(&call, LOGITS), *token_ids = py_call_tensor(&call, TOKEN_IDS);
    int64_t num_best = py_call_int(&call, NUM_BEST, 0);
    py_call_output(&call, OUT_IDS, &ids);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_token_logprobs(logits, token_ids, num_best, &ids.base, &out.base, call.stream, &call.err));
    return py_call_end(&call, py_output_results(&ids, &out));
}

PyMethodDef py_sample_functions[] = {
    PY_METHOD("sample", py_sample, sample_doc),
    PY_METHOD("sample_linear", py_sample_linear, sample_linear_doc),
    PY_METHOD("count_tokens", py_count_tokens, count_tokens_doc),
    PY_METHOD("token_logprobs", py_token_logprobs, token_logprobs_doc),
    {NULL, NULL, 0, NULL},
};
