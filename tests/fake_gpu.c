/* fake_gpu.c - backends that compute nothing, for tests of csrc/py without a GPU: a stream is a handle that is given
 * again after its end, as CUDA's are, and what orders work is printed. test_fake_gpu.py builds it in the place of
 * csrc/cpu and csrc/cuda.
 *
 * FAKE_SLOW_END=1   ends of streams and captures let other threads run for 0.2 s, once their work is done
 * FAKE_FAILURES=n   the first n captures cannot begin
 */
#include "ops/backend.h"
#include "ops/dense.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct fake_stream {
    uint64_t id, capture;
    struct fake_stream *next;
} fake_stream;
static fake_stream *free_streams;
static uint64_t counter = 10;
static int num_failures = -1;
static pid_t first_process;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void say(const char *what, uint64_t number)
{
    printf("%s %llu\n", what, (unsigned long long)number);
    fflush(stdout);
}

/* The work, then time without the lock of the host program, as a wait for it takes. */
static void slow_end(void)
{
    if (getenv("FAKE_SLOW_END")) usleep(200000);
}

static pk_status count_devices(int *count, pk_error *err)
{
    if (!first_process) first_process = getpid();
    *count = first_process == getpid();
    return *count ? PK_OK : pk_fail(err, PK_EDEVICE, "no CUDA device: forked");
}

static pk_status allocate(pk_device device, size_t bytes, void **data, pk_error *err)
{
    (void)device, (void)err;
    return (*data = aligned_alloc(64, (bytes + 64) / 64 * 64)) ? PK_OK : PK_ENOMEM;
}

static void release(pk_device device, void *data) { (void)device, free(data); }
static pk_status nothing(pk_device device, pk_error *err) { return (void)device, (void)err, PK_OK; }

static pk_status stream_create(pk_device device, pk_stream *stream, pk_error *err)
{
    (void)device, (void)err;
    pthread_mutex_lock(&lock);
    fake_stream *fake = free_streams ? free_streams : calloc(1, sizeof *fake);
    if (free_streams) free_streams = fake->next;
    *fake = (fake_stream){.id = ++counter};
    *stream = fake;
    pthread_mutex_unlock(&lock);
    return PK_OK;
}

static void stream_destroy(pk_device device, pk_stream stream)
{
    (void)device;
    bool has_begun = pk_pause.begin();
    fake_stream *fake = stream;
    pthread_mutex_lock(&lock);
    fake->next = free_streams;
    free_streams = fake;
    pthread_mutex_unlock(&lock);
    say("destroyed", 0);
    slow_end();
    if (has_begun) pk_pause.end();
}

static pk_status stream_synchronize(pk_device device, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream, (void)err;
    bool has_begun = pk_pause.begin();
    if (has_begun) pk_pause.end();
    return PK_OK;
}

static pk_status stream_wait(pk_device device, pk_stream stream, pk_event event, pk_error *err)
{
    (void)device, (void)event, (void)err;
    say("wait", stream ? ((fake_stream *)stream)->id : 0);
    return PK_OK;
}

static pk_status stream_id(pk_device device, pk_stream stream, uint64_t *id, pk_error *err)
{
    (void)device, (void)err;
    *id = stream ? ((fake_stream *)stream)->id : 1;
    return PK_OK;
}

static pk_status stream_is_new(pk_device device, pk_stream stream, pk_error *err)
{
    return (void)device, (void)stream, (void)err, PK_OK;
}

static pk_status capture_id(pk_device device, pk_stream stream, uint64_t *id, pk_error *err)
{
    (void)device, (void)err;
    *id = stream ? ((fake_stream *)stream)->capture : 0;
    return PK_OK;
}

static pk_status event_create(pk_device device, bool has_timing, pk_event *event, pk_error *err)
{
    (void)device, (void)has_timing, (void)err;
    return (*event = malloc(8)) ? PK_OK : PK_ENOMEM;
}

static void event_destroy(pk_device device, pk_event event)
{
    (void)device, free(event);
    say("destroyed", 1);
}

static pk_status event_record(pk_device device, pk_event event, pk_stream stream, pk_error *err)
{
    return (void)device, (void)event, (void)stream, (void)err, PK_OK;
}

static pk_status event_query(pk_device device, pk_event event, bool *is_done, pk_error *err)
{
    (void)device, (void)event, (void)err;
    *is_done = true;
    return PK_OK;
}

static pk_status event_synchronize(pk_device device, pk_event event, pk_error *err)
{
    return (void)device, (void)event, (void)err, PK_OK;
}

static pk_status capture_begin(pk_device device, pk_stream stream, pk_error *err)
{
    (void)device;
    if (num_failures < 0) num_failures = getenv("FAKE_FAILURES") ? atoi(getenv("FAKE_FAILURES")) : 0;
    if (num_failures-- > 0) return pk_fail(err, PK_ECUDA, "the capture cannot begin");
    num_failures = 0;
    ((fake_stream *)stream)->capture = ++counter;
    return PK_OK;
}

static pk_status capture_end(pk_device device, pk_stream stream, pk_graph *graph, int64_t *num_nodes, pk_error *err)
{
    (void)device, (void)err;
    bool has_begun = pk_pause.begin();
    slow_end();
    ((fake_stream *)stream)->capture = 0;
    if (graph) *graph = malloc(8), *num_nodes = 1;
    if (has_begun) pk_pause.end();
    return PK_OK;
}

static pk_status graph_launch(pk_device device, pk_graph graph, pk_stream stream, pk_error *err)
{
    (void)device, (void)graph, (void)err;
    say("launch", stream ? ((fake_stream *)stream)->id : 0);
    return PK_OK;
}

static void graph_destroy(pk_device device, pk_graph graph)
{
    (void)device, free(graph);
    say("destroyed", 2);
}

static pk_status rms_norm(pk_device device, const pk_rms_norm_args *args, pk_stream stream, pk_error *err)
{
    return (void)device, (void)args, (void)stream, (void)err, PK_OK;
}

static int one_thread(void) { return 1; }
static void adopt_num_threads(void) {}
static bool no_instance(int index, pk_kernel_instance *instance) { return (void)index, (void)instance, false; }

/* What every backend has. */
#define BOTH                                                                                          \
    .count_devices = count_devices, .allocate = allocate, .release = release, .synchronize = nothing, \
    .check_errors = nothing, .rms_norm = rms_norm

const pk_backend pk_cpu_backend = {
    .name = "cpu",
    BOTH,
    .num_threads = one_thread,
    .adopt_num_threads = adopt_num_threads,
};

const pk_backend pk_cuda_backend = {
    .name = "cuda",
    BOTH,
    .kernel_instance = no_instance,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_synchronize = stream_synchronize,
    .stream_wait = stream_wait,
    .stream_id = stream_id,
    .stream_is_new = stream_is_new,
    .capture_id = capture_id,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_query = event_query,
    .event_synchronize = event_synchronize,
    .capture_begin = capture_begin,
    .capture_end = capture_end,
    .graph_launch = graph_launch,
    .graph_destroy = graph_destroy,
};
