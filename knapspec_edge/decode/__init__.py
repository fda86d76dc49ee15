"""Decoding on token ids: the draft-verify loop, the session around it, statistics, the guard."""
