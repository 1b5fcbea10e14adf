"""Whole training steps of models of transformers: sizes, tokens, steps, checks, and the parts of a step."""
