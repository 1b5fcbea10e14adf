"""Matrix products with one weight matrix per group of rows, and their weight gradients."""
