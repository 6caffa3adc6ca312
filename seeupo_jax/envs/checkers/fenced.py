"""The fenced code blocks of a model's text."""

from __future__ import annotations

import re
from collections.abc import Collection

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`\n]*\Z")


def last_fenced(text: str, languages: Collection[str]) -> str | None:
    """The last closed block of one of these languages; None: there is none.

    Args:
      languages: in lower case; "" is a block without a language.
    """
    last: str | None = None
    opened, language, lines = "", "", list[str]()
    for line in text.split("\n"):
        fence = _FENCE.match(line.rstrip("\r"))
        if not opened and fence:
            opened, language, lines = fence[1], fence[2].lower(), []
        elif fence and fence[1].startswith(opened) and not fence[2]:
            if language in languages:
                last = "\n".join(lines)
            opened = ""
        elif opened:
            lines.append(line)
    return last
