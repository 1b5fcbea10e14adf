"""What is measured: shapes, inputs, and the check that runs before the clock."""
