/* linear.c - linear and its algorithms for Python: docstrings and tables of parameters. The rules are in
 * csrc/ops/linear.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/linear.h"

#define CALL pk_linear_call
const char py_linear_doc[] = PyDoc_STR(
    "linear($module, x, weight, bias=None, *, weight_scales=None, weight_zeros=None, weight_block=None, "
    "gate_up=None, rms_eps=None, x_squares=None, out_squares=None, add_to_out=False, weight_is_constant=False, "
    "quantize_x=False, batch_invariant=False, out=None, stream=None)\n--\n\n"
    "out = x @ weight.T + bias, accumulated in float32.\n"
    "\n"
    "Of a quantised weight the values are used as they are, for few rows on the CPU, or each is rounded to x's dtype first.\n"
    "With 16 bits a product is then off by half a last place at most, as it is where an element of x was rounded.\n"
    "\n"
    "Args:\n"
    "    x: [num_rows, in_features] float32, float16 or bfloat16.\n"
    "    weight: [out_features, in_features] of x's dtype, or quantised.\n"
    "    bias: [out_features] of x's dtype.\n"
    "    weight_scales: of a quantised weight, [out_features, in_features] in blocks. A value is that of weight * the scale\n"
    "        of its block. With a float8_e4m3fn weight float32, of blocks of any size. With a uint8 weight\n"
    "        [out_features, in_features / 2], which holds int4, any float, [out_features, in_features / group]; a value\n"
    "        is (int4 - zero) * scale. Each 8 neighbours of a row are a little-endian word of 32 bits, the i-th of them\n"
    "        from bit (0, 16, 4, 20, 8, 24, 12, 28)[i] on.\n"
    "    weight_zeros: [out_features, in_features / group] uint8, of int4; None: 8 everywhere.\n"
    "    weight_block: (rows, columns) of the blocks; the last ones are cut where the weight ends. None, or -1 for one of\n"
    "        them: as many as divide the weight evenly into as many blocks as weight_scales has.\n"
    "    gate_up: [num_rows, out_features] of x's dtype, memory for the product, without a bias: the result is then\n"
    "        silu_and_mul(product). What gate_up holds afterwards is undefined: few rows on a GPU do not need it,\n"
    "        because one kernel does all of it.\n"
    "    rms_eps: with gate_up, the rows of the product are divided by sqrt(mean(x^2) + rms_eps) of their row of x\n"
    "        first: the norm of a model whose weight is part of this one (see scale_columns). The product itself must\n"
    "        fit x's dtype.\n"
    "    x_squares: with rms_eps, the out_squares [num_rows, any] of the call that made x, which is read instead of x. More\n"
    "        than 8 rows need them for one kernel to do all of it.\n"
    "    out_squares: [num_rows, count] float32, contiguous, takes sums of the squares of out_features / count neighbouring\n"
    "        outputs each, as they are stored; not with gate_up. See linear_squares.\n"
    "    add_to_out: True adds to a given out, before it is rounded.\n"
    "    weight_is_constant: True promises that nothing which is queued on the stream and not done yet writes the\n"
    "        weights. Few rows on a Hopper GPU then fetch them while the kernel before still runs. The bits are the\n"
    "        same; a broken promise may read old weights.\n"
    "    quantize_x: True allows many rows to be rounded to float8 where the weight is float8, with a scale for each row,\n"
    "        or for each 128 neighbours of a row, as the weight has them: a Hopper GPU multiplies them twice as fast. The\n"
    "        error is then that of 4 bits, 2 to 3 % of a product's standard deviation. Checkpoints with dynamic activations\n"
    "        want it. With batch_invariant it has no effect.\n"
    "    batch_invariant: True makes the bits of a row of out depend on its row of x alone: not on how many rows there are,\n"
    "        nor on the others. One kernel then answers for any number of rows: on a Hopper GPU that of 9 to 112 rows,\n"
    "        elsewhere that of few rows, again and again. Give x_squares to all calls of a product or to none.\n" PY_DOC_OUT
        PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows, out_features] of x's dtype (a given one may be float32); with gate_up [num_rows,\n"
    "        out_features / 2].\n" PY_DOC_RAISES);
PY_OP(linear, P(FACTOR, x), P_WEIGHT, P(OPTIONAL, bias), P_WEIGHT_SCALES, P(OPTIONAL_WRITTEN, gate_up),
      P(OPTIONAL_DOUBLE, rms_eps), P(OPTIONAL, x_squares), P(OPTIONAL_WRITTEN, out_squares),
      P_AS(BOOL, add_to_out, adds_to_out), P(BOOL, weight_is_constant), P_AS(BOOL, quantize_x, quantizes_x),
      P_AS(BOOL, batch_invariant, is_batch_invariant), P(OUTPUT, out));

#undef CALL
#define CALL pk_linear_squares_call
const char py_linear_squares_doc[] = PyDoc_STR(
    "linear_squares($module, x, weight, *, weight_scales=None, weight_zeros=None, weight_block=None, "
    "batch_invariant=False, out)\n--\n\n"
    "How many neighbouring outputs a sum of squares has that linear(x, weight, out=out) leaves in passing.\n"
    "\n"
    "Args:\n"
    "    x, weight, weight_scales, weight_zeros, weight_block, batch_invariant, out: those of linear.\n"
    "\n"
    "Returns:\n"
    "    With out_squares [num_rows, out_features / this] the product takes as long as without: 64 for 9 to 112 rows on a\n"
    "        Hopper GPU, for any number with batch_invariant. Or 0: out_squares takes a kernel of its own.\n" PY_DOC_RAISES);
static PyObject *width_of_squares(const void *call)
{
    return PyLong_FromLongLong(((const pk_linear_squares_call *)call)->width);
}
PY_OP_RETURNING(linear_squares, width_of_squares, P(TENSOR, x), P_WEIGHT, P_WEIGHT_SCALES,
                P_AS(BOOL, batch_invariant, is_batch_invariant), P(TENSOR, out));

#undef CALL
#define CALL pk_linear_algorithm_call
const char py_linear_algorithms_doc[] = PyDoc_STR(
    "linear_algorithms($module, x, weight, *, weight_scales=None, weight_zeros=None, weight_block=None, "
    "near=None, out)\n--\n\n"
    "Lists algorithms by which cuBLASLt could compute linear(x, weight, out=out). Nothing is computed. See\n"
    "tune_linear.\n"
    "\n"
    "Args:\n"
    "    x, weight, weight_scales, weight_zeros, weight_block, out: those of linear.\n"
    "    near: None: cuBLASLt's favourites are listed, the first one first. An algorithm: its variants are listed,\n"
    "        which compute the same tiles in another order, or in other clusters; most are no favourites.\n"
    "\n"
    "Returns:\n"
    "    (library, algorithms). `library` names the GPU and the version of cuBLASLt; the algorithms are good for\n"
    "        these alone. Each is bytes for use_linear_algorithm. The list is empty where a kernel of pagedkv computes\n"
    "        the product.\n" PY_DOC_RAISES
    "        A `near` that cuBLASLt does not accept for these arguments is a ValueError. The CPU has no algorithms:\n"
    "        NotImplementedError.\n");
static PyObject *list_algorithms(const void *call)
{
    const pk_linear_choices *choices = &((const pk_linear_algorithm_call *)call)->choices;
    PyObject *list = PyList_New(choices->count);
    for (int i = 0; list && i < choices->count; i++) {
        const char *bytes = (const char *)choices->algorithms[i].bytes;
        PyObject *item = PyBytes_FromStringAndSize(bytes, sizeof(pk_linear_algorithm));
        if (!item || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
    }
    return list ? Py_BuildValue("(sN)", choices->library, list) : NULL;
}
PY_OP_RETURNING(linear_algorithms, list_algorithms, P(TENSOR, x), P_WEIGHT, P_WEIGHT_SCALES,
                P_AS(ALGORITHM, near, algorithm), P(TENSOR, out));

const char py_use_linear_algorithm_doc[] = PyDoc_STR(
    "use_linear_algorithm($module, x, weight, algorithm, *, weight_scales=None, weight_zeros=None, "
    "weight_block=None, out)\n--\n\n"
    "Makes later calls like linear(x, weight, out=out) use this algorithm.\n"
    "\n"
    "Calls of the same shapes, strides, dtypes and alignment are like it, with any bias; where add_to_out is there, too,\n"
    "those that come later for the first time. So are calls of fewer rows, but more than half as many, that have no\n"
    "algorithm of their own and come later for the first time.\n"
    "\n"
    "Args:\n"
    "    x, weight, weight_scales, weight_zeros, weight_block, out: those of linear.\n"
    "    algorithm: bytes, from linear_algorithms.\n" PY_DOC_RAISES
    "        An algorithm that cuBLASLt does not accept for these arguments is a ValueError.\n");
PY_OP(use_linear_algorithm, P(TENSOR, x), P_WEIGHT, P(ALGORITHM, algorithm), P_WEIGHT_SCALES, P(TENSOR, out));
