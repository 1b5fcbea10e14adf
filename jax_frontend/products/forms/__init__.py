"""The forms of a quantized operand, a file each."""
