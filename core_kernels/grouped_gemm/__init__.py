"""Matrix products with one weight matrix per expert."""
