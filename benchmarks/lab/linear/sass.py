"""Counts the instructions of each kernel's hot loop for 1,024 weights: sass.py CUBIN_OR_PROGRAM

The hot loop is the shortest one with 16 matrix instructions. ALU instructions (logic, shifts, integer sums,
comparisons, conversions) take two clocks of a scheduler each, m16n8k16 was measured at 6.3.
"""

import re
import subprocess
import sys
from collections import Counter

TOOL = "cuobjdump"
ALU = ("LOP3", "SHF", "IADD3", "ISETP", "PRMT", "SEL", "LEA", "FSETP", "F2FP", "IMNMX", "VIMNMX", "FMNMX", "HMNMX2", "R2P", "PLOP3")


def loops(lines: list[tuple[int, str]]) -> list[tuple[int, int]]:
    found = []
    for address, text in lines:
        target = re.search(r"\bBRA\S*\s.*?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            found.append((int(target[1], 16), address))
    return found


def report(name: str, lines: list[tuple[int, str]]) -> None:
    def body(loop: tuple[int, int]) -> list[str]:
        return [text for address, text in lines if loop[0] <= address <= loop[1]]

    def products(loop: tuple[int, int]) -> int:
        return sum("HMMA" in text or "IMMA" in text for text in body(loop))

    every = loops(lines)
    if not every:
        return
    some = [loop for loop in every if products(loop) >= 16]
    if not some:
        return
    hot = min(some, key=lambda loop: loop[1] - loop[0])
    most = products(hot)
    kinds = Counter(re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0] for text in body(hot))
    inner = [loop for loop in every if hot[0] <= loop[0] and loop[1] <= hot[1] and loop != hot]
    print(f"{name}\n  {len(lines)} instructions; hot loop {sum(kinds.values())}, matrix {most}, loops inside {len(inner)}")
    eights = 2 if re.search(r", 2, [0-9]+> >", name) else 1
    k1024 = most / (4 * eights) if "IMMA" not in kinds else most / 2
    alu = sum(count for kind, count in kinds.items() if kind in ALU)
    if k1024:
        print(f"  of 1,024 weights: {sum(kinds.values()) / k1024:.1f} instructions, ALU {alu / k1024:.1f} ({2 * alu / k1024:.0f} clocks)")
    print("  " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(24)))


def main() -> None:
    text = subprocess.run([TOOL, "-sass", sys.argv[1]], capture_output=True, text=True, check=True).stdout
    for part in text.split("Function : ")[1:]:
        name = subprocess.run(["c++filt", part.split("\n")[0].strip()], capture_output=True, text=True, check=True).stdout.strip()
        lines = [(int(a, 16), t) for a, t in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", part)]
        report(name, lines)


main()
