/* variants_int4.cu - int4 in groups of 128: of one and two rows. */
#include "variants.h"

using f16 = w4<true, false, false>;
using minus = w4<true, false, true>;

std::vector<variant> int4_variants()
{
    return {
        variant_of<shape<f16, 8, 2, 4, 4, 1, BULK, 6>>("C bulk, 8 warps x 2"),
        variant_of<shape<f16, 8, 2, 4, 4, 1, BULK, 4>>("C bulk, 8 warps x 2, ring of 4"),
        variant_of<shape<f16, 8, 2, 4, 4, 1, BULK, 6, 2>>("C bulk, 8 warps x 2, copies of 4 KB"),
        variant_of<shape<f16, 8, 3, 4, 4, 1, BULK, 4, 2>>("C bulk, 8 warps x 3, copies of 4 KB"),
        variant_of<shape<f16, 16, 1, 2, 2, 1, BULK, 5>>("C bulk, 16 warps"),
        variant_of<shape<f16, 8, 2, 4, 4, 1, COPIES, 6>>("B copies, 8 warps x 2"),
        variant_of<shape<f16, 16, 1, 2, 2, 1, COPIES, 5>>("B copies, 16 warps"),
        variant_of<shape<f16, 8, 2, 4, 4, 1, DIRECT, 2>>("A registers, 8 warps x 2, 2 units"),
        variant_of<shape<f16, 16, 1, 2, 2, 1, DIRECT, 2>>("A registers, 16 warps, 2 units"),
        variant_of<shape<minus, 8, 2, 4, 4, 1, BULK, 6>>("H bulk, zeros subtracted, 8 warps x 2"),
        variant_of<shape<w4<false, false, true>, 8, 2, 4, 4, 1, BULK, 6>>("F bulk, bfloat16, 8 warps x 2"),
        variant_of<shape<w4_digits, 8, 2, 4, 2, 1, BULK, 6>>("E bulk, integers, 8 warps x 2"),
        variant_of<shape<w4_digits, 8, 2, 4, 2, 1, BULK, 6, 2>>("E bulk, integers, copies of 4 KB"),
        variant_of<shape<w4_digits, 8, 2, 4, 1, 1, BULK, 6>>("E bulk, integers, 8 warps x 2"),
        variant_of<shape<f16, 8, 2, 4, 4, 1, BULK, 6, 1, COPIES_ONLY>>("C bulk, 8 warps x 2, no products"),
        variant_of<shape<f16, 8, 2, 4, 4, 1, COPIES, 6, 1, COPIES_ONLY>>("B copies, 8 warps x 2, no products"),
        variant_of<shape<f16, 8, 2, 4, 4, 1, DIRECT, 2, 1, COPIES_ONLY>>("A registers, 8 warps x 2, no products"),
        variant_of<shape<f16, 8, 2, 4, 4, 1, BULK, 6, 2, NO_WEIGHT>>("C bulk, 8 warps x 2, no weight"),
        variant_of<shape<f16, 8, 2, 4, 4, 1, BULK, 6, 2, TRACED>>("C bulk, 8 warps x 2, copies of 4 KB, traced"),
        variant_of<shape<w4_digits, 8, 2, 4, 2, 1, BULK, 6, 2, TRACED>>("E bulk, integers, copies of 4 KB, traced"),
    };
}
