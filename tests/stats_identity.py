"""What the counters of every generation keep to, at every moment and however it ends (Stats)."""

from __future__ import annotations

from knapspec_edge.records import Stats


def check_stats(stats: Stats) -> None:
    """All of the identity that the docstring of Stats states."""
    drafting = sum(stats.accepted_lengths.values())
    # tokens
    assert stats.completion_tokens == stats.draft_n_accepted + stats.target_n - stats.cut_n
    assert stats.completion_tokens >= 0
    assert stats.cut_n >= 0
    assert stats.target_n in (0, stats.rounds + 1)
    assert stats.target_n or not (stats.rounds or stats.completion_tokens or stats.cut_n)
    # drafts
    assert 0 <= stats.draft_n_accepted <= stats.draft_n
    assert drafting <= min(stats.rounds, stats.draft_n)
    assert sum(k * n for k, n in stats.accepted_lengths.items()) == stats.draft_n_accepted
    assert (stats.draft_n > 0) == (drafting > 0)
    assert 0 <= stats.proposed_n_accepted <= stats.proposed_n <= stats.draft_n
    assert stats.proposed_n_accepted <= stats.draft_n_accepted
    # what was not proposed was drafted under a plan
    assert stats.draft_n_accepted - stats.proposed_n_accepted <= stats.draft_n - stats.proposed_n
    assert stats.latest_draft is not None or stats.draft_n == stats.proposed_n
    # places
    assert len(stats.tried_at) == len(stats.accepted_at)
    assert sum(stats.tried_at) <= stats.draft_n
    for i, (tried, accepted) in enumerate(zip(stats.tried_at, stats.accepted_at, strict=True)):
        longer = sum(n for k, n in stats.accepted_lengths.items() if k > i)
        assert accepted == longer
        assert accepted <= tried <= (stats.accepted_at[i - 1] if i else drafting)
    assert sum(stats.accepted_at) == stats.draft_n_accepted
    # what is derived
    assert stats.acceptance is None or 0.0 <= stats.acceptance <= 1.0
    assert stats.cached_tokens <= stats.prompt_tokens
    assert min(stats.prompt_ms, stats.predicted_ms, stats.draft_ms, stats.verify_ms) >= 0.0
