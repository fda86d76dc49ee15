"""PDF through PDFium."""

from __future__ import annotations

import re

from ...errors import DocumentError
from .archives import damaged

_PASSWORD_ERROR = 4  # FPDF_ERR_PASSWORD
_SECURITY_ERROR = 5  # FPDF_ERR_SECURITY: a scheme that PDFium does not know
# PDFium's sign for a hyphen at the end of a line, in the middle of a word
_HYPHENATION = re.compile("[\ufffe\x02]\r?\n?")


def read_pdf(data: bytes, name: str) -> tuple[str, tuple[str, ...]]:
    """Pages are apart by a blank line. Raises DocumentError, ImportError."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code in (_PASSWORD_ERROR, _SECURITY_ERROR):
            raise DocumentError(
                f"{name} is protected by a password: save a copy without it"
            ) from None
        raise damaged(name, "PDF", error) from error
    pages = []
    n_failed = 0
    with document:
        for index in range(len(document)):
            try:
                page = document[index]
                text = page.get_textpage().get_text_bounded()
                page.close()
            except pypdfium2.PdfiumError:
                n_failed += 1
                text = ""
            pages.append(_HYPHENATION.sub("", text).replace("\r\n", "\n").strip())
    n_blank = sum(not page for page in pages) - n_failed
    if not pages:
        raise DocumentError(f"{name} has no pages")
    if n_failed == len(pages):
        raise DocumentError(f"{name} is damaged: none of its pages can be read")
    if not any(pages):
        raise DocumentError(
            f"{name} has no text in its {len(pages)} page{'s' * (len(pages) != 1)}, only pictures: "
            "make it readable with OCR first (ocrmypdf does)"
        )
    notes = []
    if n_failed:
        notes.append(f"{n_failed} of {len(pages)} pages are damaged")
    if n_blank:
        notes.append(f"{n_blank} of {len(pages)} pages have no text")
    return "\n\n".join(page for page in pages if page), tuple(notes)
