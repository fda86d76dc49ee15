"""From bytes to text: which encoding they are in, and whether they are text at all."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections import Counter

from ...errors import DocumentError
from .extras import missing

# Longest first: the mark of UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# What these names stand for on the web, where the text is usually of the larger encoding.
_LARGER = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
}
# Control characters without a meaning in text. Meaning have \b (bold in old manuals), \t, \n, \v,
# \f, \r, escape (colours) and U+0085 (new line).
_CONTROLS = re.compile("[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")
_MAX_CONTROLS = 0.005  # of all characters
# Characters beyond ASCII that are valid UTF-8, for each broken one: then it is UTF-8 all the same.
_MIN_GOOD = 10
_NEARLY_EQUAL = 0.005  # of confidence; less tells nothing
# What tells text in UTF-16 or UTF-32 without a mark from other data with zeros, all of which can be
# read as such: a blank or line end now and then, few characters that do not exist, and more in the
# first block of 256 (ASCII, line ends) than at the beginning of any other, which in the wrong byte
# order is where those lie. Chinese and Japanese use two of these much.
_MAX_WORD = 500  # characters for each blank, at the most
_BLANKS = " \t\r\n\u3000"


def looks_like_text(head: bytes) -> bool:
    """Whether a file that begins like this is text in Unicode."""
    marks = (pair for pair in _MARKS if head.startswith(pair[0]))
    mark, encoding = next(marks, (b"", "utf-8"))
    head = head[len(mark) :]
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)  # may end within a character
    except UnicodeDecodeError:
        return False
    return not _is_binary(text)


def is_text_encoding(name: str) -> bool:
    """Whether there is an encoding of that name that turns bytes into text; "hex" is none."""
    try:
        b"aaaa".decode(name)  # of no bytes at all nothing would be checked
    except UnicodeDecodeError:
        return True
    except (LookupError, ValueError):  # ValueError: a NUL in the name; "undefined"
        return False
    return True


def decode(
    data: bytes, name: str, *, declared: str | None = None, encoding: str | None = None
) -> tuple[str, tuple[str, ...]]:
    """The text and notes on how it was read. Line ends become \\n.

    `declared` is what the document says of itself, believed where nothing speaks against it;
    `encoding` what the user says. Raises DocumentError for what is not text.
    """
    text, notes = _decode(data, name, declared, encoding)
    if _is_binary(text):
        raise DocumentError(f"{name} is not text")
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    return text.removeprefix("\ufeff"), notes


def _decode(
    data: bytes, name: str, declared: str | None, encoding: str | None
) -> tuple[str, tuple[str, ...]]:
    if encoding is not None:
        try:
            return data.decode(encoding), ()
        except UnicodeError as error:
            raise DocumentError(f"{name} is not {encoding}: {_where(error)}") from None
    for mark, marked in _MARKS:
        if data.startswith(mark):
            try:
                return data[len(mark) :].decode(marked), ()
            except UnicodeDecodeError as error:
                raise DocumentError(
                    f"{name} begins as {marked.upper()} and is not: {_where(error)}"
                ) from None
    has_nul = b"\0" in data  # then it is UTF-16, or no text
    if not has_nul:
        try:
            return _decode_stateful(data) or data.decode(), ()
        except UnicodeDecodeError:
            pass
        mended = _mended_utf8(data)
        if mended is not None:
            return mended
        if declared is not None:
            try:
                known = codecs.lookup(declared).name
                known = _LARGER.get(known, known)
                return data.decode(known), ()
            except (LookupError, UnicodeError):
                pass
    return _detect(data, name, has_nul)


def _decode_stateful(data: bytes) -> str | None:
    """ISO-2022-JP is ASCII with escape sequences, so it passes as UTF-8."""
    if b"\x1b$" in data and max(data, default=0) < 0x80:
        try:
            return data.decode("iso2022_jp")
        except UnicodeDecodeError:
            return None
    return None


def _mended_utf8(data: bytes) -> tuple[str, tuple[str, ...]] | None:
    """UTF-8 with a few broken characters, such as one that a cut at so many bytes left."""
    text = data.decode("utf-8", "replace")
    n_broken = text.count("\ufffd")
    n_good = sum(not character.isascii() for character in text) - n_broken
    if n_good < _MIN_GOOD * n_broken:
        return None
    return text, (f"{n_broken} broken character{'s' * (n_broken != 1)} replaced",)


def _detect(data: bytes, name: str, has_nul: bool) -> tuple[str, tuple[str, ...]]:
    try:
        import chardet
    except ImportError:
        if has_nul:
            raise DocumentError(f"{name} is not text") from None
        raise missing(name, "text that is not UTF-8") from None
    results = chardet.detect_all(
        data,
        encoding_era=chardet.EncodingEra.MODERN_WEB,
        max_bytes=len(data),
        prefer_superset=True,
    )
    best = results[0]["confidence"]
    likely = [r["encoding"] for r in results if r["confidence"] >= best - _NEARLY_EQUAL]
    chosen = next((name for name in likely if name == "Windows-1252"), likely[0])
    if chosen is None:
        kind = results[0].get("mime_type")
        what = f" ({kind})" if kind and not kind.endswith("octet-stream") else ""
        raise DocumentError(f"{name} is not text{what}")
    try:
        text = data.decode(chosen)
    except (LookupError, UnicodeDecodeError):
        raise DocumentError(
            f"{name} is not text, or its encoding cannot be told (perhaps {chosen})"
        ) from None
    if has_nul and not _is_plausible(text):
        raise DocumentError(f"{name} is not text")
    return text, (f"read as {chosen}",)


def _is_plausible(text: str) -> bool:
    """Whether bytes with zeros that were read as UTF-16 or UTF-32 are text in it."""
    counts = Counter(text)
    n_absent = sum(n for c, n in counts.items() if unicodedata.category(c) in ("Cn", "Co", "Cs"))
    n_first = sum(n for c, n in counts.items() if c < "\u0100")
    n_starts = sum(n for c, n in counts.items() if ord(c) % 256 == 0 and c not in "\u3000\u4e00")
    n_blanks = sum(counts[c] for c in _BLANKS)
    return (
        n_absent <= _MAX_CONTROLS * len(text)
        and n_first > n_starts
        and n_blanks >= len(text) // _MAX_WORD
    )


def _is_binary(text: str) -> bool:
    return len(_CONTROLS.findall(text)) > _MAX_CONTROLS * len(text)


def _where(error: UnicodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"{error.reason} at byte {error.start}"
    return " ".join(str(error).split())  # some encodings tell no place
