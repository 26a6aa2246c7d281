/* variants_int4_more.cu - int4 in groups of 128: more rows, and zeros. */
#include "variants.h"

using more_f16 = w4<true, false, false>;
using more_minus = w4<true, false, true>;
using zeros = w4<true, true, true>;

std::vector<variant> int4_more_variants()
{
    return {
        variant_of<shape<more_f16, 8, 2, 4, 2, 1, BULK, 6>>("C bulk, 8 warps x 2"),
        variant_of<shape<more_minus, 8, 2, 4, 1, 1, BULK, 6>>("C bulk, 8 warps x 2"),
        variant_of<shape<more_f16, 8, 2, 4, 2, 1, BULK, 6, 2>>("C bulk, 8 warps x 2, copies of 4 KB"),
        variant_of<shape<more_minus, 8, 2, 4, 1, 1, BULK, 6, 2>>("C bulk, 8 warps x 2, copies of 4 KB"),
        variant_of<shape<more_minus, 8, 2, 4, 1, 1, BULK, 5>>("C bulk, 8 warps x 2, ring of 5"),
        variant_of<shape<more_f16, 16, 1, 2, 1, 1, BULK, 5>>("C bulk, 16 warps"),
        variant_of<shape<more_f16, 16, 1, 2, 1, 1, COPIES, 5>>("B copies, 16 warps"),
        variant_of<shape<w4<false, false, true>, 8, 2, 4, 1, 1, BULK, 6>>("F bulk, bfloat16, 8 warps x 2"),
        variant_of<shape<more_minus, 16, 1, 2, 1, 2, BULK, 4>>("C bulk, 16 warps"),
        variant_of<shape<more_minus, 16, 1, 2, 1, 2, COPIES, 4>>("B copies, 16 warps"),
        variant_of<shape<w4<false, false, true>, 16, 1, 2, 1, 2, BULK, 4>>("F bulk, bfloat16, 16 warps"),
        variant_of<shape<zeros, 8, 2, 4, 4, 1, BULK, 6>>("C bulk, 8 warps x 2"),
        variant_of<shape<zeros, 16, 1, 2, 1, 1, BULK, 5>>("C bulk, 16 warps"),
        variant_of<shape<zeros, 16, 1, 2, 1, 2, BULK, 4>>("C bulk, 16 warps"),
    };
}
