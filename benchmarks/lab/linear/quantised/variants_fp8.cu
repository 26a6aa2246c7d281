/* variants_fp8.cu - float8 (e4m3) with scales of blocks of 128 x 128, or of rows. */
#include "variants.h"

std::vector<variant> fp8_variants()
{
    return {
        variant_of<shape<w8, 8, 2, 4, 4, 1, BULK, 6>>("C bulk, 8 warps x 2"),
        variant_of<shape<w8, 8, 2, 4, 4, 1, BULK, 6, 2>>("C bulk, 8 warps x 2, copies of 4 KB"),
        variant_of<shape<w8, 16, 1, 2, 2, 1, BULK, 5>>("C bulk, 16 warps"),
        variant_of<shape<w8, 8, 2, 4, 4, 1, COPIES, 6>>("B copies, 8 warps x 2"),
        variant_of<shape<w8, 16, 1, 2, 2, 1, COPIES, 5>>("B copies, 16 warps"),
        variant_of<shape<w8, 16, 1, 2, 2, 1, DIRECT, 2>>("A registers, 16 warps, 2 units"),
        variant_of<shape<w8, 8, 2, 4, 4, 1, BULK, 6, 1, COPIES_ONLY>>("C bulk, 8 warps x 2, no products"),
        variant_of<shape<w8, 8, 2, 4, 4, 1, ROWS_OF_FP8, 6, 1, UNCHECKED>>(
            "R rows as they are, 8 warps x 2 (unchecked)"),
        variant_of<shape<w8, 16, 1, 2, 2, 1, ROWS_OF_FP8, 5, 1, UNCHECKED>>("R rows as they are, 16 warps (unchecked)"),
        variant_of<shape<w8, 8, 2, 4, 2, 1, BULK, 6>>("C bulk, 8 warps x 2"),
        variant_of<shape<w8, 8, 2, 4, 2, 1, BULK, 6, 2>>("C bulk, 8 warps x 2, copies of 4 KB"),
        variant_of<shape<w8, 8, 2, 4, 1, 1, BULK, 6>>("C bulk, 8 warps x 2"),
        variant_of<shape<w8, 8, 2, 4, 1, 1, BULK, 5>>("C bulk, 8 warps x 2, ring of 5"),
        variant_of<shape<w8, 8, 2, 4, 4, 1, BULK, 6, 2, TRACED>>("C bulk, 8 warps x 2, copies of 4 KB, traced"),
        variant_of<shape<w8, 16, 1, 2, 1, 1, BULK, 5>>("C bulk, 16 warps"),
        variant_of<shape<w8, 16, 1, 2, 1, 1, COPIES, 5>>("B copies, 16 warps"),
        variant_of<shape<w8, 16, 1, 2, 1, 2, BULK, 4>>("C bulk, 16 warps"),
        variant_of<shape<w8, 16, 1, 2, 1, 2, COPIES, 4>>("B copies, 16 warps"),
    };
}
