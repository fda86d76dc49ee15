"""Which sublayers to leave out, how far to draft, and whether to draft at all."""
