"""Grouped products, the feed-forward of experts, and the formats of their operands."""
