"""Products of blockwise FP8."""
