"""Ranges of context length that share their plans: costs change slowly, judging is dear."""

from __future__ import annotations


def bucket_of(context_tokens: int, first_tokens: int) -> int:
    """Number of the bucket, from 0. Bucket 0 ends at `first_tokens`, each next one at twice the
    end of the one before."""
    if first_tokens < 1:
        raise ValueError("the first bucket holds at least one token")
    bucket, end = 0, first_tokens
    while context_tokens > end:
        bucket, end = bucket + 1, 2 * end
    return bucket


def context_of(bucket: int, first_tokens: int, n_ctx: int) -> int:
    """The context length that stands for a bucket: the middle of its range, within the context."""
    middle = first_tokens // 2 if bucket == 0 else 3 * first_tokens * 2 ** (bucket - 1) // 2
    return max(1, min(middle, n_ctx - 1))
