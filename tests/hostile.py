"""Text of an attacker: escapes, a forged line, C1 controls, and characters that reverse what follows."""

HOSTILE = "x\x1b[2J\nforged\r\x07\x9b1m\x7f\u202e\u2028"


def raw_lines(text: str) -> list[str]:
    """Lines with a raw control character."""
    return [line for line in text.split("\n") if not line.isprintable()]
