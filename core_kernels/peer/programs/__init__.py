"""Programs of an exchange that the device drives, other than the feed-forward's in schedule.py."""
