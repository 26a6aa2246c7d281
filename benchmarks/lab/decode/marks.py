"""Writes csrc/cuda/attention_decode.cu with time marks into a folder: compile it in place of the kernel's file, and `bench
time` reports after each row when the CTAs of the last launch started, had asked for their first keys, had waited for the
kernel before, had the first keys, left the loop, had merged their warps, and ended.

    python benchmarks/lab/decode/marks.py FOLDER
"""

import sys
from pathlib import Path

MARKS = ["start", "asked", "waited", "first", "loop", "warps", "end"]
DEVICE = """
__device__ unsigned long long lab_times[1 << 16][16];
static int lab_grid;
#define MARK(i) if (threadIdx.x == 0) lab_times[blockIdx.x & 65535][i] = clock64()
__device__ static inline unsigned long long lab_now()
{
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
__device__ static inline unsigned lab_sm()
{
    unsigned sm;
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    return sm;
}
"""
HOST = """
#include <algorithm>
#include <cstdio>
#include <vector>
void report()
{
    const char *names[] = {NAMES};
    std::vector<unsigned long long> raw(16 << 16);
    cudaMemcpyFromSymbol(raw.data(), lab_times, raw.size() * 8);
    int n = 0; /* CTAs with a unit */
    for (int c = 0; c < std::min(lab_grid, 65536); c++)
        if (raw[c * 16 + 9]) std::copy_n(&raw[c * 16], 16, &raw[n++ * 16]);
    auto at = [&](int cta, int i) { return raw[cta * 16 + i]; };
    unsigned long long begin = ~0ull, end = 0;
    for (int c = 0; c < n; c++) begin = std::min(begin, at(c, 8)), end = std::max(end, at(c, 9));
    double ratio = 0; /* ns a cycle */
    for (int c = 0; c < n; c++) ratio += (double)(at(c, 9) - at(c, 8)) / (at(c, 6) - at(c, 0)) / n;
    std::vector<double> waited;
    for (int c = 0; c < n; c++) waited.push_back(at(c, 8) - begin + (at(c, 2) - at(c, 0)) * ratio);
    double zero = *std::min_element(waited.begin(), waited.end());
    printf("  %d ctas, %.2f GHz, from first start to last end %.2f us; us after the first waited (which is %.2f of the globaltimer's us; min 10%% 50%% 90%% max):",
           n, 1 / ratio, (end - begin) / 1e3, (begin % 1000000000 + zero) / 1e3);
    for (int i = 0; i < 7; i++) {
        std::vector<double> t;
        for (int c = 0; c < n; c++) t.push_back((at(c, 8) - begin + (at(c, i) - at(c, 0)) * ratio - zero) / 1e3);
        std::sort(t.begin(), t.end());
        printf(" %s %.1f|%.1f|%.1f|%.1f|%.1f", names[i], t[0], t[n / 10], t[n / 2], t[n * 9 / 10], t[n - 1]);
    }
    printf("\\n   between them, median:");
    for (int i = 1; i < 7; i++) {
        std::vector<double> t;
        for (int c = 0; c < n; c++) t.push_back((double)(long long)(at(c, i) - at(c, i - 1)) * ratio / 1e3);
        std::sort(t.begin(), t.end());
        printf(" %s %.2f (%.2f..%.2f)", names[i], t[n / 2], t[n / 10], t[n * 9 / 10]);
    }
    printf("\\n   CTAs under way at 5%%, 10%%, ... of the time:");
    for (int k = 1; k < 20; k++) {
        int busy = 0;
        for (int c = 0; c < n; c++) {
            double t = (double)(end - begin) * k / 20;
            busy += at(c, 8) - begin <= t && at(c, 9) - begin > t;
        }
        printf(" %d", busy);
    }
    std::vector<double> last(256, 0), first(256, 1e18), count(256, 0);
    for (int c = 0; c < n; c++) {
        int sm = (int)at(c, 10) & 255;
        count[sm]++, last[sm] = std::max(last[sm], (at(c, 9) - begin) / 1e3), first[sm] = std::min(first[sm], (at(c, 8) - begin) / 1e3);
    }
    std::vector<double> ends, starts, counts;
    for (int sm = 0; sm < 256; sm++)
        if (count[sm]) ends.push_back(last[sm]), starts.push_back(first[sm]), counts.push_back(count[sm]);
    for (auto *v : {&starts, &ends, &counts}) std::sort(v->begin(), v->end());
    int m = (int)ends.size();
    printf("\\n   %d SMs (min 10%% 50%% 90%% max): first start", m);
    for (auto *v : {&starts, &ends, &counts})
        printf(" %.1f|%.1f|%.1f|%.1f|%.1f%s", (*v)[0], (*v)[m / 10], (*v)[m / 2], (*v)[m * 9 / 10], (*v)[m - 1], v == &starts ? ", last end" : v == &ends ? ", CTAs" : "");
    printf("\\n");
}
"""

text = Path("csrc/cuda/attention_decode.cu").read_text()


def insert(anchor: str, mark: str, *, behind: bool = True, count: int = 1) -> None:
    global text
    assert anchor in text, anchor
    text = text.replace(anchor, anchor + mark if behind else mark + anchor, count)


insert("// --- kernels\n", DEVICE)
insert("        bool starts_early =", "        MARK(0); if (threadIdx.x == 0) lab_times[blockIdx.x & 65535][8] = lab_now(), lab_times[blockIdx.x & 65535][9] = 0, lab_times[blockIdx.x & 65535][10] = lab_sm();\n", behind=False)
insert("            load_next(stage);\n        }\n", "        MARK(1);\n")
insert("        int planned_context", "        MARK(2);\n", behind=False)
insert("            this->compute_chunk", "            if (stage == 0 && first_key < lab_first + step) MARK(3);\n", behind=False)
insert("        for (int stage = 0; first_key < end_key;", "        int lab_first = first_key;\n", behind=False)
insert("        copy_async_wait<0>();\n", "        MARK(4);\n", behind=False)
insert("        __syncthreads();\n        merge_unit", "        MARK(5);\n", behind=False)
insert("        if (threadIdx.x == 0 && context != planned_context)\n", "        MARK(6); if (threadIdx.x == 0) lab_times[blockIdx.x & 65535][9] = lab_now();\n", behind=False)
insert("    int warps = cta::WARPS_PER_SM / shape.ctas_per_sm;\n", "    lab_grid = (int)(shape.num_units * args->num_kv_heads);\n")
folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
(folder / "attention_decode.cu").write_text(text + HOST.replace("{NAMES}", "{" + ", ".join(f'"{m}"' for m in MARKS) + "}"))
