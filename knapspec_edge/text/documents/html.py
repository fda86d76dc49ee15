"""HTML into Markdown: headings, lists and tables stay recognisable, what is not text goes."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

# By the HTML standard none of these is content that the page is about.
_NOT_TEXT = (
    "head", "script", "style", "noscript", "template", "svg", "math", "nav", "iframe", "object",
    "canvas", "audio", "video", "button", "dialog", "select", "textarea", "datalist",
)  # fmt: skip
_DECLARATION = re.compile(r"\s*<\?xml[^>]*>")
_DECLARED = re.compile(rb"""<(?:meta|\?xml)[^>]{0,200}?(?:charset|encoding)\s*=\s*["']?([\w-]+)""")
_DECLARED_WITHIN = 2048  # bytes; browsers look at 1024
_NO_COMMENT = re.compile("<!(?!--)")  # what the parser takes for a declaration, and may reject
_BLANK_LINES = re.compile(r"\n{3,}")


def declared_encoding(data: bytes) -> str | None:
    """What a page says of itself."""
    found = _DECLARED.search(data[:_DECLARED_WITHIN].lower())
    return found.group(1).decode("ascii", "replace") if found else None


def _drop_forms(soup: BeautifulSoup) -> None:
    """Remove forms, such as a search, but not those around a page: ASP.NET puts all into one."""
    forms = [form for form in soup.find_all("form") if form.find_parent("form") is None]
    sizes = [len(form.get_text(strip=True)) for form in forms]
    rest = len(soup.get_text(strip=True)) - sum(sizes)
    for form, size in zip(forms, sizes, strict=True):
        if size <= rest:
            form.decompose()


def html_text(markup: str, *, titled: bool = True) -> str:
    """The text of a page or a part of one; "" if it has none. Raises ImportError.

    Where the page marks its main content, only that is taken. `titled`: the page's title comes
    first unless the text has it anyway.
    """
    import markdownify
    from bs4 import BeautifulSoup, ParserRejectedMarkup

    markup = _DECLARATION.sub("", markup, count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "looks like XML", "looks like a file name"
        try:
            soup = BeautifulSoup(markup, "html.parser")
        except ParserRejectedMarkup:
            soup = BeautifulSoup(_NO_COMMENT.sub("&lt;!", markup), "html.parser")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    for element in soup.find_all(_NOT_TEXT):
        element.decompose()
    _drop_forms(soup)
    main = soup.find_all("main")
    content = main[0] if len(main) == 1 and main[0].get_text(strip=True) else soup
    converter = markdownify.MarkdownConverter(
        heading_style=markdownify.ATX,
        bullets="-",
        strip=["a", "img"],
        escape_asterisks=False,
        escape_underscores=False,
        wrap=True,
        wrap_width=None,  # lines of the markup are not lines of the text
    )
    try:
        text = str(converter.convert_soup(content))
    except RecursionError:  # nested some hundred levels deep
        text = content.get_text("\n", strip=True)
    text = "\n".join(line.rstrip() for line in text.splitlines())
    text = _BLANK_LINES.sub("\n\n", text).strip("\n")
    if titled and title and text.strip() and title not in text:
        text = f"# {title}\n\n{text}"
    return text
