"""Both folded operands of weights."""
