"""Folding: one scale per row, or per row and span of tokens, instead of one per 32 values."""
