"""How much memory or disk something is, in words."""


def bytes_in_words(count: int) -> str:
    """As a person reads it: `1.5 GB`, `12.0 MB`."""
    return f"{count / 1_000_000_000:.1f} GB" if count >= 100_000_000 else f"{count / 1_000_000:.1f} MB"
