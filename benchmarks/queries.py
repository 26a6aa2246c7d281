"""What more queries per sequence cost in decode attention, as speculative decoding and short chunks have them.

    python benchmarks/queries.py [--row 32x4096] [--device cuda] [--no-record]

32 sequences of 4,096 keys, 32/8 and 16/8 heads of 128, pages of 16, bfloat16: 1, 2, 4, 8, 16 and 32 queries per
sequence, in the three calls of attention_cuda.py. Keys are read once however many queries there are, so the planned
call should take little more than that of one query in the same run: checks.py has how much more is asked for.

Writes results/queries-<device>.json.
"""

from __future__ import annotations

import checks
import torch
from attention_cuda import measure
from record import make_parser, record_run

HEADS = (32, 8), (16, 8)
QUERIES = (1, *checks.MOST_OF_ONE_QUERY)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--row", default="32x4096", help="sequences and the keys of each")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    rows, medians = [], {}
    for heads in HEADS:
        for queries in QUERIES:
            rows.append(measure((args.row, heads, 128, 16, queries, "bfloat16", 0), medians, args.device))
            if args.device != "cpu":
                torch.cuda.empty_cache()
        times = {row["queries"]: row["late_us"] for row in rows if row["heads"] == f"{heads[0]}/{heads[1]}"}
        for queries, (multiple, is_low) in checks.of_one_query(times).items():
            print(f"{heads[0]}/{heads[1]} {args.row}, {queries:2} queries: {times[queries]:.1f} us, {multiple:.3f} of one query; "
                  f"{checks.MOST_OF_ONE_QUERY[queries]:.2f} asked{'' if is_low else ': MISSED'}", flush=True)
    record_run(args, f"queries-{args.device}", rows, args.device)


if __name__ == "__main__":
    main()
