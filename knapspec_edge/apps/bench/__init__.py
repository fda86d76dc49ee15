"""Paired comparison: plain decoding, policies, forced plans, and other builds of llama.cpp.

`tasks` and `texts` make the prompts, `sides` answer them, `runner` has them answer in turn, `rows`
does the arithmetic, `resume` keeps rows, `report` writes them.
"""
