"""Programs of an exchange that the device drives: of a feed-forward, and of one product."""
