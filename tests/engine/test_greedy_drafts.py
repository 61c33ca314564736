"""Greedy answers with drafts equal greedy answers without. `test_greedy_matrix.py` has every K and every KV format, and
`test_speculative.py` the states behind them."""

from __future__ import annotations

import pytest
from scripted import compare_greedy

pytestmark = pytest.mark.bits


def test_with_three_drafts_in_full_precision(plain_engine, draft_engine):
    compare_greedy(plain_engine, draft_engine)
