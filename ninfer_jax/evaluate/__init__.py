"""Measures of an engine's answers: loss, divergence by KV format, retrieval, drift of the state, acceptance of drafts."""
