"""Where every token goes: the sort by expert, and the map from received rows to padded groups."""
