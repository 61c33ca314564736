"""The measures of `quality.py`: by KV format, by recipe, of repeats; and their tables and pictures."""
