"""The blocked layout of scales, which cuBLAS's block-scaled products and Blackwell's tensor cores read.

The package's own products read row-major scales. `block_scales` and `unblock_scales` are building blocks for callers of
cuBLAS, cuDNN or `torch._scaled_grouped_mm` on Blackwell.
"""
