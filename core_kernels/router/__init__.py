"""The choice of experts from the router's logits, and its gradient."""
