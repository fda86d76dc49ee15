"""One input into text: its bytes, what kind it is by what it begins with, and what its reader
makes of it."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass

from ...config import DEFAULTS
from ...errors import DocumentError, UsageError
from .archives import archive_kind, read_docx, read_epub
from .encodings import decode, is_text_encoding, looks_like_text
from .extras import missing
from .html import declared_encoding, html_text
from .pdf import read_pdf
from .sources import Source, reason

_HTML_ENDINGS = (".html", ".htm", ".xhtml")
_HTML_START = re.compile(rb"\s*(?:<\?xml[^>]*>\s*|<!--.{0,500}?-->\s*)?<(?:!doctype )?html", re.I)
_PDF_WITHIN = 1024  # bytes; what PDF readers agree on
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_PACKAGE = "EncryptedPackage".encode("utf-16-le")  # in the directory of a protected .docx
_FORMATS = {".pdf": "PDF", ".docx": "Word", ".epub": "EPUB"}


@dataclass(frozen=True)
class Document:
    """The text of one input; never blank."""

    name: str  # of its Source
    text: str  # line ends are \n; encodes as UTF-8
    sha256: str  # hexadecimal, of the bytes read (not of the text)
    n_bytes: int
    kind: str  # "text", "html", "pdf", "docx", "epub"
    notes: tuple[str, ...]  # such as "read as Windows-1252", "2 of 9 pages have no text"


def read(source: Source, *, encoding: str | None = None) -> Document:
    """`encoding`: of text and HTML, None to find out.

    Raises DocumentError: one line that names the input and says what is wrong with it. UsageError:
    there is no such encoding.
    """
    if encoding is not None and not is_text_encoding(encoding):
        raise UsageError(f"there is no encoding {encoding!r}")
    name = "standard input" if source.path is None else source.name
    data = _bytes(source, name)
    if not data.strip():
        raise DocumentError(f"{name} is empty" if not data else f"{name} holds nothing but blanks")
    ending = "" if source.path is None else source.path.suffix.lower()
    kind = _kind(data, ending, name)
    try:
        text, notes = _text(kind, data, name, encoding)
    except ImportError:
        raise missing(name, {"html": "HTML"}.get(kind) or _FORMATS[f".{kind}"]) from None
    except MemoryError:
        raise DocumentError(f"{name} takes more memory than there is") from None
    text = text.encode("utf-8", "replace").decode()  # lone surrogates, which no tokenizer takes
    if not any(character.isprintable() and not character.isspace() for character in text):
        raise DocumentError(
            f"{name} holds no text"
            + (f" ({', '.join(notes)})" if notes else ", at most pictures" * (kind == "docx"))
        )
    return Document(
        name=source.name,
        text=text,
        sha256=hashlib.sha256(data).hexdigest(),
        n_bytes=len(data),
        kind=kind,
        notes=notes,
    )


def _bytes(source: Source, name: str) -> bytes:
    """Everything the input holds, unless that is unreasonably much."""
    limit = DEFAULTS.document_bytes_max
    try:
        if source.path is None:
            if sys.stdin is None:
                raise DocumentError(f"{name} is closed")
            size, data = 0, sys.stdin.buffer.read(limit + 1)
        else:
            with open(source.path, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size  # 0 for a pipe
                data = stream.read(limit + 1) if size <= limit else b""
    except (OSError, ValueError) as error:
        raise DocumentError(f"cannot read {name}: {reason(error)}") from None
    if max(size, len(data)) > limit:
        raise DocumentError(f"{name} has more than {limit >> 20} MiB, the most that is read")
    return data


def _kind(data: bytes, ending: str, name: str) -> str:
    """By content first: names are often wrong. Raises DocumentError for known other formats."""
    if _is_pdf(data, ending):
        return "pdf"
    if data.startswith(b"PK\x03\x04"):
        return archive_kind(data, name)
    if data.startswith(_OLE):
        if _PACKAGE in data:
            raise DocumentError(f"{name} is protected by a password: save a copy without it")
        raise DocumentError(f"{name} is in an old format of Office: save it as .docx")
    if data.startswith(b"{\\rtf"):
        raise DocumentError(f"{name} is RTF: save it as .docx")
    if data.startswith(b"GGUF") and b"\0" in data[4:8]:  # a small number; text may begin so too
        raise DocumentError(f"{name} is a model, not a document")
    if ending in _FORMATS:
        raise DocumentError(f"{name} is damaged, or not {_FORMATS[ending]} after all")
    if ending in _HTML_ENDINGS or (not ending and _HTML_START.match(data)):
        return "html"
    return "text"


def _is_pdf(data: bytes, ending: str) -> bool:
    """Its mark may stand behind other bytes, and also in a text about PDF: that has no table of
    its objects."""
    if b"%PDF-" not in data[:_PDF_WITHIN]:
        return False
    is_text = ending != ".pdf" and b"startxref" not in data and looks_like_text(data[:_PDF_WITHIN])
    return not is_text


def _text(kind: str, data: bytes, name: str, encoding: str | None) -> tuple[str, tuple[str, ...]]:
    if kind == "pdf":
        return read_pdf(data, name)
    if kind == "docx":
        return read_docx(data, name)
    if kind == "epub":
        return read_epub(data, name)
    declared = declared_encoding(data) if kind == "html" else None
    text, notes = decode(data, name, declared=declared, encoding=encoding)
    return (html_text(text) if kind == "html" else text), notes
