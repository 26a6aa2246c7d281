/* isa.c - which instruction set the kernels of this process use. */
#define _GNU_SOURCE /* syscall */
#include "cpu/cpu.h"
#include "environment.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static const char *const names[] = {[PK_ISA_GENERIC] = "generic", [PK_ISA_AVX2] = "avx2", [PK_ISA_AVX512] = "avx512"};

static pk_isa best_isa(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return PK_ISA_AVX512;
    if (has_avx2) return PK_ISA_AVX2; /* every CPU with AVX2 has F16C */
#endif
    return PK_ISA_GENERIC;
}

static pk_isa choose_isa(void)
{
    pk_isa best = best_isa();
    const char *cap = pk_variable_text(PK_ENV_PAGEDKV_CPU_ISA);
    if (!cap) return best;
    for (pk_isa isa = PK_ISA_GENERIC; isa <= PK_ISA_AVX512; isa++)
        if (!strcmp(cap, names[isa])) return isa < best ? isa : best;
    fprintf(stderr, "pagedkv: PAGEDKV_CPU_ISA is '%s' but must be generic, avx2 or avx512; using %s\n", cap,
            names[best]);
    return best;
}

pk_isa pk_cpu_isa_level(void)
{
    static int chosen = -1; /* threads that race here compute the same value */
    int isa = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (isa < 0) {
        isa = (int)choose_isa();
        __atomic_store_n(&chosen, isa, __ATOMIC_RELAXED);
    }
    return (pk_isa)isa;
}

const char *pk_cpu_isa(void) { return names[pk_cpu_isa_level()]; }

/* Whether what some CPUs have beside AVX-512 may be used. */
static bool may_go_beyond_avx512(void)
{
    return !pk_variable_text(PK_ENV_PAGEDKV_CPU_ISA) && pk_cpu_isa_level() == PK_ISA_AVX512;
}

bool pk_cpu_is_intel(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

/* vdpbf16ps multiplies two elements a lane where an fma of fp32 multiplies one. Zen starts as many of either; Intel's
 * CPUs start four fma in the time of one vdpbf16ps, so bf16 would take twice as long (benchmarks/lab/cpu/NOTES.md #16). */
bool pk_cpu_has_fast_avx512bf16(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    return may_go_beyond_avx512() && __builtin_cpu_supports("avx512bf16") && !pk_cpu_is_intel();
#else
    return false;
#endif
}

bool pk_cpu_has_avx512vbmi(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    return may_go_beyond_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
#else
    return false;
#endif
}

#ifdef __x86_64__
static bool may_use_tiles;

/* A thread that uses tiles has 8 KB more for Linux to save, so a process must ask for them first (from 5.16 on):
 * https://docs.kernel.org/arch/x86/xstate.html */
static void ask_for_tiles(void)
{
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16) || !(d & AMX_TILE)) return;
    if (!__builtin_cpu_supports("avx512bf16")) return; /* which attention_amx.c uses, too; all such CPUs have it */
    may_use_tiles = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

bool pk_cpu_has_amx(void)
{
#ifdef __x86_64__
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!may_go_beyond_avx512()) return false;
    pthread_once(&once, ask_for_tiles);
    return may_use_tiles;
#else
    return false;
#endif
}
