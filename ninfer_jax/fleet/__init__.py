"""More than one engine: which replica a request goes to, and the same server on each of them."""
