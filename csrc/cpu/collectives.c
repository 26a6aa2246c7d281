/* collectives.c - all_reduce, all_gather and sample_candidates on the CPU: by boxes of shared memory (csrc/comm.h).
 *
 * A call goes piece by piece, each of as many rows, or of as much of one row, as a box holds: a turn each.
 */
#include "cpu/rows.h"
#include "ops/collectives.h"
#include "ops/sampling.h"

#include <string.h>

enum { CHUNK = 256 }; /* elements of a row that are summed at a time */

typedef struct {
    int64_t row, num_rows, column, num_columns;
} piece;

/* The first piece of a call is {0}; false after the last one. Ranks agree on them, since they agree on the shape. */
static bool next_piece(const pk_comm_what *what, piece *piece)
{
    const int64_t room = PK_COMM_BOX_BYTES / (int64_t)pk_dtype_bytes((pk_dtype)what->dtype);
    if (what->rows == 0 || what->width == 0) return false;
    piece->column += piece->num_columns;
    if (piece->column == what->width) piece->column = 0;
    if (piece->column == 0) piece->row += piece->num_rows;
    if (piece->row == what->rows) return false;
    const int64_t columns_left = what->width - piece->column, rows_left = what->rows - piece->row;
    const int64_t rows = what->width > room ? 1 : room / what->width;
    piece->num_columns = pk_min(columns_left, room);
    piece->num_rows = pk_min(rows_left, rows);
    return true;
}

/* Puts this rank's piece in its box and waits for those of the others. */
static pk_status exchange(pk_comm *comm, const pk_comm_what *what, const void *x, int64_t stride, const piece *piece,
                          pk_error *err)
{
    const int64_t bytes = (int64_t)pk_dtype_bytes((pk_dtype)what->dtype), row_bytes = piece->num_columns * bytes;
    char *box = pk_comm_next_box(comm);
    for (int64_t row = 0; row < piece->num_rows; row++)
        memcpy(box + row * row_bytes, (const char *)x + ((piece->row + row) * stride + piece->column) * bytes,
               (size_t)row_bytes);
    return pk_comm_turn(comm, what, err);
}

/* A row of a piece. Sums begin with 0, so that a sum of -0 alone is 0 however it is carried. */
static float sum_row(const pk_all_reduce_args *args, const piece *piece, int64_t row)
{
    const int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype), at = piece->row + row;
    float squares = 0;
    for (int64_t first = 0; first < piece->num_columns; first += CHUNK) {
        const int64_t count = pk_min(piece->num_columns - first, CHUNK);
        const int64_t in_box = (row * piece->num_columns + first) * bytes, column = piece->column + first;
        float sum[CHUNK] = {0}, x[CHUNK];
        for (int rank = 0; rank < args->comm->size; rank++) {
            pk_cpu_row_to_f32(x, pk_comm_box_of(args->comm, rank) + in_box, args->dtype, count);
            for (int64_t i = 0; i < count; i++) sum[i] += x[i];
        }
        if (args->residual) {
            pk_cpu_row_to_f32(x, (const char *)args->residual + (at * args->residual_stride + column) * bytes,
                              args->dtype, count);
            for (int64_t i = 0; i < count; i++) sum[i] += x[i];
        }
        void *out = (char *)args->out + (at * args->out_stride + column) * bytes;
        pk_cpu_row_from_f32(out, args->dtype, sum, count);
        if (!args->squares) continue;
        pk_cpu_row_to_f32(x, out, args->dtype, count);
        float of_chunk = 0;
#pragma omp simd reduction(+ : of_chunk)
        for (int64_t i = 0; i < count; i++) of_chunk += x[i] * x[i];
        squares += of_chunk;
    }
    return squares;
}

pk_status pk_cpu_all_reduce(pk_device device, const pk_all_reduce_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    for (int64_t row = 0; row < args->num_rows && args->squares; row++) args->squares[row] = 0;
    for (piece piece = {0}; next_piece(&args->what, &piece);) {
        PK_TRY(exchange(args->comm, &args->what, args->x, args->x_stride, &piece, err));
#pragma omp parallel for schedule(static) if (piece.num_rows > 1 && \
                                              piece.num_rows * piece.num_columns > PK_CPU_PARALLEL)
        for (int64_t row = 0; row < piece.num_rows; row++) {
            float squares = sum_row(args, &piece, row);
            if (args->squares) args->squares[piece.row + row] += squares;
        }
    }
    return PK_OK;
}

pk_status pk_cpu_all_gather(pk_device device, const pk_all_gather_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    const int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype);
    for (piece piece = {0}; next_piece(&args->what, &piece);) {
        PK_TRY(exchange(args->comm, &args->what, args->x, args->x_stride, &piece, err));
        const int64_t row_bytes = piece.num_columns * bytes;
        for (int rank = 0; rank < args->comm->size; rank++)
            for (int64_t row = 0; row < piece.num_rows; row++) {
                int64_t at = (piece.row + row) * args->out_stride + rank * args->row_size + piece.column;
                memcpy((char *)args->out + at * bytes, pk_comm_box_of(args->comm, rank) + row * row_bytes,
                       (size_t)row_bytes);
            }
    }
    return PK_OK;
}

static pk_candidate best_of(const pk_comm *comm, int64_t row)
{
    pk_candidate best = 0, theirs;
    for (int rank = 0; rank < comm->size; rank++) {
        memcpy(&theirs, pk_comm_box_of(comm, rank) + row * (int64_t)sizeof theirs, sizeof theirs);
        best = theirs > best ? theirs : best;
    }
    return best;
}

pk_status pk_cpu_sample_candidates(pk_device device, const pk_sample_candidates_args *args, pk_stream stream,
                                   pk_error *err)
{
    (void)device, (void)stream;
    for (piece piece = {0}; next_piece(&args->what, &piece);) {
        PK_TRY(exchange(args->comm, &args->what, args->candidates, 1, &piece, err));
        for (int64_t row = 0; row < piece.num_rows; row++)
            if (!pk_is_drawn(best_of(args->comm, row)))
                return pk_fail(err, PK_EVALUE, "candidates[%lld]: the logits have a NaN or are -inf everywhere",
                               (long long)(piece.row + row));
        for (int64_t row = 0; row < piece.num_rows; row++)
            args->out[piece.row + row] = pk_token_of(best_of(args->comm, row));
    }
    return PK_OK;
}
