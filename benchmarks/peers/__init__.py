"""What a measurement is compared with."""
