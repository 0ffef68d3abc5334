"""From something of the user's to a float EdgeModel."""
