"""From EdgeModels and a Reference to a verdict."""
