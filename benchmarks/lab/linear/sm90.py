"""Checks and times the choices of sm90.cu: python3 sm90.py check|time|race GROUP ... (see NOTES-sm90.md)."""

import ctypes
import statistics
import sys
import time

import torch

T0 = time.time()
lib = ctypes.CDLL("./lab_linear.bin")
FIELDS = "n tiles splits smem_kb is_constant lets_first".split()


class Choice(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in FIELDS]

    def __str__(self):
        return f"n{self.n} t{self.tiles} s{self.splits} {self.smem_kb}K"


P, I, L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
lib.lab_linear.argtypes = [Choice, P, L, P, L, P, P, L, I, I, I, I, I, P]
lib.lab_between.argtypes = [P, P, I, I, I, I, I, P]
lib.lab_chain.argtypes = [Choice, P, P, P, I, I, I, I, I, I, P]
torch.manual_seed(0)
DEV = "cuda"


def stream():
    return torch.cuda.current_stream().cuda_stream


def choices(rows, tiles=(1,), splits=(1, 2, 4, 8), smems=(227, 113)):
    sizes = [n for n in (16, 32, 64) if n >= rows][:1] if rows <= 64 else [64, 128] + [256] * (rows > 128)
    for n in sizes:
        for t in tiles:
            for split in splits:
                for smem in smems:
                    yield Choice(n, t, split, smem, 1, 0)


def check(c, rows, k, outs, bias, gated):
    xx = torch.full((rows + 1, k + 8), float("nan"), device=DEV, dtype=torch.bfloat16)
    ww = torch.full((outs + 1, k + 16), float("nan"), device=DEV, dtype=torch.bfloat16)
    xx[:rows, :k] = torch.randn(rows, k, device=DEV)
    ww[:outs, :k] = torch.randn(outs, k, device=DEV) / k**0.5
    b = torch.randn(outs, device=DEV).bfloat16() if bias else None
    ref = xx[:rows, :k].double() @ ww[:outs, :k].double().T + (b.double() if bias else 0)
    if gated:
        gate, up = (half.bfloat16().double() for half in ref.chunk(2, 1))
        ref, outs = torch.nn.functional.silu(gate).bfloat16().double() * up, outs // 2
    ok = True
    for f32 in (1, 0):
        wide = torch.full((rows + 1, outs + 5), 9.0, device=DEV, dtype=torch.float32 if f32 else torch.bfloat16)
        out = wide[:rows, 2 : outs + 2]
        status = lib.lab_linear(c, xx.data_ptr(), k + 8, ww.data_ptr(), k + 16, b.data_ptr() if bias else None, out.data_ptr(), outs + 5, rows, k, outs * (1 + gated), f32, gated, stream())
        if status >= 1000:
            return None
        if status:
            print("CHECK", c, rows, k, outs, "status", status, flush=True)
            sys.exit(1)
        torch.cuda.synchronize()
        err = ((out.double() - ref).abs() / (1 + ref.abs())).max().item()
        around = bool((wide[:, :2] == 9).all() and (wide[:, outs + 2 :] == 9).all() and (wide[rows:] == 9).all())
        if not err < (0.02 if gated else 1e-4 if f32 else 5e-3) or not around:
            print("CHECK", c, "rows", rows, "k", k, "outs", outs, "f32", f32, "err", err, "around", around, flush=True)
            ok = False
    return ok


def checks(gated):
    done = bad = skipped = 0
    for most in (64, 32, 16, 128, 256):
        for c in choices(most, smems=(227, 100)):
            print("\r", c, end="", flush=True)
            for rows, k, outs in ((most, 2048, 1024), (most - 1, 1096, 776), (max(1, most - 31), 4104, 136), (most, 520, 8)):
                ok = check(c, rows, k, outs, rows != most, gated)
                skipped += ok is None
                bad += ok is False
                done += 1
    print(f"\rcorrect gated={gated}: {done} cases, {skipped} skipped, {bad} BAD  {time.time() - T0:.1f} s", flush=True)


def window(graph, count):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(count):
        graph.replay()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / count * 1e3


def timed(run, reps=3, idle=0.005):
    graph = torch.cuda.CUDAGraph()
    run()
    with torch.cuda.graph(graph):
        if run():
            return float("inf")
    graph.replay()
    once = window(graph, 1)
    times = []
    for _ in range(reps):
        torch.cuda.synchronize()
        time.sleep(idle)
        times.append(window(graph, max(1, int(1000 / once))))
    return statistics.median(times)


SHAPES = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072), "head": (151936, 1024),
          "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (24576, 4096), "8B down": (4096, 12288)}  # fmt: skip


class Bench:
    def __init__(self, name, rows):
        self.name, self.rows, self.gated = name, rows, name.endswith("gated")
        self.outs, self.k = SHAPES[name.removesuffix(" gated")]
        self.width = self.outs // 2 if self.gated else self.outs
        self.count = max(2, min(64, -(-(540 << 20) // (self.outs * self.k * 2))))
        self.w = [torch.randn(self.outs, self.k, device=DEV, dtype=torch.bfloat16) / self.k**0.5 for _ in range(self.count)]
        self.pointers = (P * self.count)(*[w.data_ptr() for w in self.w])
        self.x = torch.randn(rows, self.k, device=DEV).bfloat16()
        self.f32 = name == "head"
        self.out = torch.randn(rows, self.width, device=DEV).to(torch.float32 if self.f32 else torch.bfloat16)

    def chain(self, c):
        return lib.lab_chain(c, self.x.data_ptr(), self.pointers, self.out.data_ptr(), self.rows, self.k, self.outs, self.count, self.f32, self.gated, stream())

    def time(self, c):
        if self.chain(c) >= 1000:
            return float("inf")
        return timed(lambda: self.chain(c)) / self.count

    def by_torch(self):
        out = torch.randn(self.rows, self.outs, device=DEV).bfloat16()

        def run():
            for w in self.w:
                lib.lab_between(out.data_ptr(), self.x.data_ptr(), self.rows, self.outs, self.k, 1, 0, stream())
                torch.mm(self.x, w.T, out=out)

        return timed(run) / self.count

    def between(self):
        def run():
            for _ in range(self.count):
                lib.lab_between(self.out.data_ptr(), self.x.data_ptr(), self.rows, self.width, self.k, 1, self.f32, stream())

        return timed(run) / self.count

    def race(self, c):
        """The graph against the same steps with a pause after each."""
        start = self.out.clone()
        for w in self.w:
            lib.lab_between(self.out.data_ptr(), self.x.data_ptr(), self.rows, self.width, self.k, 0, self.f32, stream())
            torch.cuda.synchronize()
            lib.lab_linear(c, self.x.data_ptr(), self.k, w.data_ptr(), self.k, None, self.out.data_ptr(), self.width, self.rows, self.k, self.outs, self.f32, self.gated, stream())
            torch.cuda.synchronize()
        expected, graph, unequal = self.out.clone(), torch.cuda.CUDAGraph(), 0
        with torch.cuda.graph(graph):
            self.chain(c)
        for _ in range(5):
            self.out.copy_(start)
            graph.replay()
            torch.cuda.synchronize()
            unequal += not torch.equal(self.out, expected)
        return unequal


def times(names, rows_list, until):
    for rows in rows_list:
        total, total_torch = 0.0, 0.0
        for name in names:
            if time.time() - T0 > until:
                return
            bench = Bench(name, rows)
            found = []
            small = not name.startswith("8B") and name != "head"
            for c in choices(rows):
                ctas = -(-bench.outs // (64 * c.tiles)) * c.splits * -(-rows // c.n)
                if (small and not 48 <= ctas <= 264) or (not small and (c.splits > 2 or ctas < 60)):
                    continue
                us = bench.time(c)
                if us < 1e6:
                    found.append((us, str(c), c))
            found.sort(key=lambda item: item[0])
            if not found:
                continue
            best = found[0][2]
            by_torch, unequal = bench.by_torch(), bench.race(best)
            total, total_torch = total + found[0][0], total_torch + by_torch
            late = bench.time(Choice(*[0 if f == "is_constant" else getattr(best, f) for f in FIELDS]))
            let = bench.time(Choice(*[1 if f == "lets_first" else getattr(best, f) for f in FIELDS]))
            print(f"{name} rows {rows}: between {bench.between():.2f} torch {by_torch:.2f} late {late:.2f} let first {let:.2f} race {unequal} | "
                  + "; ".join(f"{us:.2f} {c}" for us, c, _ in found[:8]) + f"; worst {found[-1][0]:.2f} {found[-1][1]}; of {len(found)}  {time.time() - T0:.0f} s", flush=True)  # fmt: skip
            del bench
            torch.cuda.empty_cache()
        print(f"rows {rows}: {total:.2f} torch {total_torch:.2f}", flush=True)


if sys.argv[1] == "check":
    checks(int(sys.argv[2]))
else:
    times(sys.argv[2].split(","), [int(r) for r in sys.argv[3].split(",")], float(sys.argv[4]))
