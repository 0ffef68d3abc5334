"""From a float EdgeModel to smaller ones."""
