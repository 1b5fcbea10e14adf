"""Products of folded operands."""
