/* emulated_mma.h - beside emulated_gpu.h, for kernels that multiply by mma_16816 what they have copied into dynamic shared
 * memory, smem_of_cta: copies come at once or late, and matrix instructions lose what a GPU's lose.
 */
#ifndef EMULATED_MMA_H
#define EMULATED_MMA_H

#include "emulated_gpu.h"

static struct {
    unsigned x;
} block_now, grid_now;
#define blockIdx block_now
#define gridDim grid_now

#include "emulated_product.h"

#include "cuda/pack.h"
static uint4 smem_of_cta[16 << 10]; /* dynamic shared memory, in the header that the test has copied */
#define smem_address(pointer) ((uint32_t)((const char *)(pointer) - (const char *)smem_of_cta))
#define copy_async_16 copy_sometime
#define copy_async_commit commit_copies
#define copy_async_wait wait_for_copies
/* What a thread has asked for and not waited for yet, by groups: every other copy is done at once, the others as late as
 * they may. */
struct copy_of_16 {
    uint32_t to;
    const void *from;
    int bytes;

    void run() const
    {
        std::memset((char *)smem_of_cta + to, 0, 16);
        std::memcpy((char *)smem_of_cta + to, from, bytes);
    }
};
static std::vector<std::vector<copy_of_16>> copies_of[emulated::THREADS];
static std::vector<copy_of_16> open_copies_of[emulated::THREADS];
static void copy_sometime(uint32_t to, const void *from, int bytes)
{
    static unsigned count;
    const copy_of_16 copy = {to, from, bytes};
    if (count++ * 2654435761u >> 31)
        copy.run();
    else
        open_copies_of[emulated::current].push_back(copy);
}
static void commit_copies()
{
    copies_of[emulated::current].push_back(std::move(open_copies_of[emulated::current]));
    open_copies_of[emulated::current].clear();
}
static void wait_for_copies(int pending)
{
    auto &groups = copies_of[emulated::current];
    for (; (int)groups.size() > pending; groups.erase(groups.begin()))
        for (const copy_of_16 &each : groups.front()) each.run();
}
template <int PENDING>
static void wait_for_copies()
{
    wait_for_copies(PENDING);
}

#endif
