"""How good an engine's answers are: loss, divergence by KV format, retrieval, drift of the state, acceptance of drafts."""
