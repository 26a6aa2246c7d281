/* ways.h - the ways of an all_reduce, among which collectives.cu chooses. All give the same bits. */
#ifndef PK_CUDA_COMM_WAYS_H
#define PK_CUDA_COMM_WAYS_H

#include "cuda/comm/mailbox.h"
#include "ops/collectives.h"

#include <algorithm>

/* A part of a call that fits into the slots: some rows, or some columns of one. */
struct pk_mail_piece {
    int64_t row, num_rows, column, num_columns; /* elements */
    int slots_per_row;
};

/* Calls body(piece) for all parts of [num_rows, row_size] elements of so many bytes. */
template <typename Body>
static inline pk_status pk_for_mail_pieces(int64_t num_rows, int64_t row_size, int64_t bytes, Body body)
{
    const int64_t per_slot = MAIL_SLOT * 16 / bytes, columns = std::min<int64_t>(row_size, MAIL_SLOTS * per_slot);
    for (int64_t column = 0; column < row_size; column += columns) {
        const int64_t num_columns = std::min(columns, row_size - column);
        const int64_t slots_per_row = pk_ceil_div(num_columns, per_slot), rows = MAIL_SLOTS / slots_per_row;
        for (int64_t row = 0; row < num_rows; row += rows)
            PK_TRY(body(pk_mail_piece{row, std::min(rows, num_rows - row), column, num_columns, (int)slots_per_row}));
    }
    return PK_OK;
}

/* all_reduce.cu: by mailboxes, one shot (every rank sums all) or two (each sums a part, and sends that) */
pk_status pk_cuda_all_reduce_push(const pk_all_reduce_args *args, bool in_two_shots, const pk_cuda_call &call);
/* simple.cu: gathers, then sums: what the others are compared with */
pk_status pk_cuda_all_reduce_simple(const pk_all_reduce_args *args, const pk_cuda_call &call);

/* collectives.cu */
static inline pk_mailboxes pk_mailboxes_of(const pk_comm *comm, pk_comm_operation operation)
{
    pk_mailboxes its = ((const pk_cuda_comm *)comm->of_device)->mail;
    its.operation = operation;
    return its;
}

/* Calls body(std::integral_constant<int, MOST>()) with the least number of ranks that kernels are compiled for. */
template <typename Body>
static inline pk_status pk_for_most_ranks(int size, Body body)
{
    if (size <= 2) return body(std::integral_constant<int, 2>());
    if (size <= 4) return body(std::integral_constant<int, 4>());
    return body(std::integral_constant<int, PK_COMM_MAX_RANKS>());
}

/* The threads of a CTA that has a row, whole slots of it. */
static inline dim3 pk_mail_cta(const pk_mail_piece &piece)
{
    return dim3((unsigned)std::min(piece.slots_per_row * MAIL_SLOT, (int)MAIL_THREADS));
}

#endif
