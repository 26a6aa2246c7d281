/* scratch.cu - the scratch memory of streams: made at a stream's first use, larger where a call needs
 * more, kept until the stream is destroyed. */
#include "cuda/cuda.h"

enum { MAX_PIECES = 512 };

struct scratch_piece {
    cudaStream_t stream;
    const void *thread; /* of a per-thread default stream, which all threads call by one name; else NULL */
    bool is_of_graphs;
    pk_scratch_use use;
    pk_cuda_scratch scratch;   /* one allocation, the counters first; there are none before what lies beside */
    size_t bytes;              /* of its data */
    unsigned int num_failures; /* of the device, when its counters were set to zero */

    size_t counter_bytes() const { return use == PK_SCRATCH_BESIDE ? 0 : PK_SCRATCH_COUNTERS * sizeof(unsigned int); }
    bool is_of_stream(const scratch_piece &other) const { return stream == other.stream && thread == other.thread; }
    bool serves(const scratch_piece &wanted) const
    {
        return is_of_stream(wanted) && is_of_graphs == wanted.is_of_graphs && use == wanted.use &&
               bytes >= wanted.bytes;
    }
};

static struct device_pieces {
    scratch_piece pieces[MAX_PIECES];
    int count;
} devices[PK_CUDA_MAX_DEVICES];
/* Of all of them. A call keeps it to its end, so that its launches follow each other on its stream. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const void *thread_of(cudaStream_t stream)
{
    static thread_local char here;
    return stream == cudaStreamPerThread ? &here : nullptr;
}

static pk_status make_piece(scratch_piece *piece, device_pieces *state, const pk_cuda_call &call)
{
    const size_t counter_bytes = piece->counter_bytes();
    if (state->count == MAX_PIECES)
        return pk_fail(call.err, PK_EUNSUPPORTED, "cuda:%d: too many streams need scratch memory (%d pieces)",
                       call.device->index, (int)MAX_PIECES);
    const pk_cuda_pause pause;
    pk_cuda_outside_capture relaxed;
    void *data;
    PK_CUDA(call.err, cudaMalloc(&data, counter_bytes + piece->bytes));
    if (counter_bytes) {
        cudaError_t error = cudaMemsetAsync(data, 0, counter_bytes, call.device->own_stream);
        if (error == cudaSuccess) error = cudaStreamSynchronize(call.device->own_stream);
        if (error != cudaSuccess) {
            cudaFree(data);
            return pk_cuda_fail(call.err, "cudaMemsetAsync", error);
        }
    }
    piece->scratch = {(unsigned int *)data, (char *)data + counter_bytes};
    state->pieces[state->count++] = *piece;
    return PK_OK;
}

/* Of all pieces of a stream, in its order: calls of before may be under way. */
static pk_status zero_counters(device_pieces *state, const scratch_piece &wanted, const pk_cuda_call &call)
{
    for (scratch_piece *piece = state->pieces; piece < state->pieces + state->count; piece++) {
        if (!piece->is_of_stream(wanted) || piece->num_failures == wanted.num_failures) continue;
        if (piece->counter_bytes())
            PK_CUDA(call.err, cudaMemsetAsync(piece->scratch.counters, 0, piece->counter_bytes(), call.stream));
        piece->num_failures = wanted.num_failures;
    }
    return PK_OK;
}

/* The first piece that is large enough, or a new one. */
static pk_status find_piece(const pk_cuda_call &call, pk_scratch_use use, size_t bytes, pk_cuda_scratch *scratch)
{
    device_pieces *state = &devices[call.device->index];
    uint64_t capture;
    PK_TRY(pk_cuda_capture_id({PK_CUDA, call.device->index}, call.stream, &capture, call.err));
    scratch_piece wanted = {call.stream, thread_of(call.stream), capture != 0, use, {}, bytes};
    if (!call.held) pk_cuda_lock::acquire(&lock);
    call.held = &lock;
    wanted.num_failures = __atomic_load_n(&call.device->num_failures, __ATOMIC_ACQUIRE); /* of who had the lock, too */
    if (!wanted.is_of_graphs) PK_TRY(zero_counters(state, wanted, call));
    scratch_piece *piece = state->pieces, *end = piece + state->count;
    while (piece < end && !piece->serves(wanted)) piece++;
    if (piece == end) {
        PK_TRY(make_piece(&wanted, state, call));
        piece = &wanted;
    }
    *scratch = piece->scratch;
    return PK_OK;
}

pk_status pk_cuda_scratch_of(const pk_cuda_call &call, pk_cuda_scratch *scratch, size_t bytes, pk_scratch_use use)
{
    return find_piece(call, use, bytes < PK_SCRATCH_BYTES ? PK_SCRATCH_BYTES : bytes, scratch);
}

pk_status pk_cuda_scratch_words(const pk_cuda_call &call, uint32_t **words)
{
    pk_cuda_scratch scratch = {};
    PK_TRY(find_piece(call, PK_SCRATCH_WORDS, 0, &scratch));
    *words = scratch.counters;
    return PK_OK;
}

pk_status pk_cuda_scratch_beside(const pk_cuda_call &call, size_t bytes, void **data)
{
    pk_cuda_scratch scratch = {};
    size_t room = 1 << 20; /* doubled, so that what is outgrown and kept is less than what is in use */
    while (room < bytes) room *= 2;
    PK_TRY(find_piece(call, PK_SCRATCH_BESIDE, room, &scratch));
    *data = scratch.data;
    return PK_OK;
}

/* Work of a stream that was destroyed at this address may still use the scratch memory that is the new one's now. */
pk_status pk_cuda_stream_is_new(pk_device device, pk_stream stream, pk_error *err)
{
    bool has_scratch = false;
    {
        const pk_cuda_lock held(&lock);
        const device_pieces *state = &devices[device.index];
        for (int i = 0; i < state->count; i++) has_scratch |= state->pieces[i].stream == (cudaStream_t)stream;
    }
    return has_scratch ? pk_cuda_synchronize(device, err) : PK_OK;
}

void pk_cuda_release_scratch(pk_device device, pk_stream stream)
{
    device_pieces *state = &devices[device.index];
    const pk_cuda_pause pause;
    const pk_cuda_lock held(&lock);
    for (int i = state->count - 1; i >= 0; i--) {
        if (state->pieces[i].stream != stream) continue;
        if (cudaFree(state->pieces[i].scratch.counters) != cudaSuccess) cudaGetLastError();
        state->pieces[i] = state->pieces[--state->count];
    }
}
