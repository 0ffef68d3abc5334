"""Where a LiteRT file is run: worker processes and what starts them."""
