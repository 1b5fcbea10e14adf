"""Other libraries: Flax, and layouts of weights."""
