"""The stable sort of slots by expert, and the map from received rows to padded groups."""
