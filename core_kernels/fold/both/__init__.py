"""Both folded operands of an activation."""
