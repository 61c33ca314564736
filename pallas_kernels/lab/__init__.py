"""Kernels under the glass: what they compile to for a card, whether their numbers hold, how long they take."""
