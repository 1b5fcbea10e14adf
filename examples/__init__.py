"""Training examples: the same config, text and initial weights in two frameworks."""
