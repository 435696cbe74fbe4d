"""The language of the grammar example: sums, products and brackets over whole numbers."""

DIGITS = frozenset("0123456789")
OPERATORS = frozenset("+-*/")


def begins_sentence(text: str) -> bool:
    """Whether some sentence of the grammar begins with this text."""
    return _open_brackets(text) is not None


def is_sentence(text: str) -> bool:
    """Whether the text is a whole sentence of the grammar."""
    return _open_brackets(text) == 0 and text[-1:] not in ("", *OPERATORS)


def _open_brackets(text: str) -> int | None:
    """Return the number of open brackets at the end; None if a character is out of place.

    An empty text has none open, but is no sentence.
    """
    depth, before = 0, ""
    for character in text:
        ends_operand = before in DIGITS or before == ")"
        if character in DIGITS:
            fits = before != ")"
        elif character == "(":
            fits = not ends_operand
            depth += 1
        elif character == ")":
            fits = ends_operand and depth > 0
            depth -= 1
        else:
            fits = character in OPERATORS and ends_operand
        if not fits:
            return None
        before = character
    return depth
