"""What a check found: the cases as data, and the forms that other tools read."""
