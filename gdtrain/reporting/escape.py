"""Text of others in HTML."""

import html


def escape(text: object) -> str:
    """As text in HTML and in a quoted attribute, with what UTF-8 has no bytes for as a question mark."""
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"))
