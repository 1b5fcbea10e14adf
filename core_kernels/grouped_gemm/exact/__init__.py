"""Products of dequantized values."""
