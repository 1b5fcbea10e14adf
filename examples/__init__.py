"""Training examples: one config, one text, one set of initial weights, two frameworks."""
