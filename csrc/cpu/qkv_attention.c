/* qkv_attention.c - qkv_attention_fwd on the CPU: one after the other, by way of memory for q. */
#include "ops/qkv_attention.h"

#include "cpu/attention.h"
#include "cpu/cpu.h"

#include <stdlib.h>

pk_status pk_cpu_qkv_attention_fwd(pk_device device, const pk_qkv_attention_args *args, pk_stream stream, pk_error *err)
{
    pk_qk_norm_rope_store_args rope = args->rope;
    pk_attention_args attention = args->attention;
    int64_t count = attention.num_tokens * attention.num_q_heads * attention.head_dim;
    void *q = malloc((size_t)(count ? count : 1) * pk_dtype_bytes(attention.dtype));
    if (!q)
        return pk_fail(err, PK_ENOMEM, "qkv_attention_fwd: cannot allocate the queries of %lld tokens",
                       (long long)attention.num_tokens);
    attention.q = rope.q_out = q;
    pk_status status = pk_cpu_attend(device, &rope, &attention, stream, err);
    free(q);
    return status;
}
