"""Documents that are zip archives: Word (.docx) and EPUB."""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections.abc import Iterator
from urllib.parse import unquote
from xml.etree import ElementTree

from ...config import DEFAULTS
from ...errors import DocumentError
from .encodings import decode
from .html import declared_encoding, html_text

_ENCRYPTED = 1  # flag of a zip entry
_TEXT_ENDINGS = (".xml", ".rels", ".xhtml", ".html", ".htm", ".opf", ".ncx")


def archive_kind(data: bytes, name: str) -> str:
    """ "docx" or "epub". Raises DocumentError for other archives and for damaged ones."""
    with _opened(data, name) as archive:
        names = set(archive.namelist())
        large = sum(
            entry.file_size
            for entry in archive.infolist()
            if entry.filename.lower().endswith(_TEXT_ENDINGS)
        )
    _check_size(large, name)
    if "word/document.xml" in names:
        return "docx"
    if "META-INF/container.xml" in names:
        return "epub"
    for part, what in (
        ("xl/", "an Excel table"),
        ("ppt/", "a PowerPoint presentation"),
        ("content.xml", "an OpenDocument file: save it as .docx"),
    ):
        if any(entry.startswith(part) for entry in names):
            raise DocumentError(f"{name} is {what}, which is not read")
    raise DocumentError(f"{name} is an archive, not a document: unpack it and name the folder")


def _check_size(n_bytes: int, name: str) -> None:
    """Raises DocumentError for text of so many bytes that unpacking it is no good idea."""
    limit = DEFAULTS.document_bytes_max
    if n_bytes > limit:
        raise DocumentError(
            f"{name} unpacks to {n_bytes >> 20} MiB of text; at most {limit >> 20} are read"
        )


def read_docx(data: bytes, name: str) -> tuple[str, tuple[str, ...]]:
    """Raises DocumentError, ImportError."""
    import mammoth

    try:
        # without this, pictures become part of the text
        no_images = mammoth.images.img_element(lambda image: {})
        markup = mammoth.convert_to_html(io.BytesIO(data), convert_image=no_images).value
    except Exception as error:  # of whatever kind a damaged file provokes
        raise damaged(name, "Word", error) from error
    return html_text(markup), ()


def read_epub(data: bytes, name: str) -> tuple[str, tuple[str, ...]]:
    """Raises DocumentError, ImportError."""
    try:
        with _opened(data, name) as archive:
            title, chapters = _spine(archive)
            if _protected(archive).intersection(chapters):
                raise DocumentError(f"{name} is encrypted against copying (DRM)")
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
            # whatever their names end in, and however often each is named
            _check_size(sum(sizes.get(chapter, 0) for chapter in chapters), name)
            parts = []
            absent = 0
            for chapter in chapters:
                try:
                    page = archive.read(chapter)
                except KeyError:
                    absent += 1
                    continue
                markup, _ = decode(page, name, declared=declared_encoding(page))
                parts.append(html_text(markup, titled=False))
    except (DocumentError, ImportError):
        raise
    except Exception as error:
        raise damaged(name, "EPUB", error) from error
    text = "\n\n".join(part for part in parts if part.strip())
    if title and text and title not in text[:500]:
        text = f"# {title}\n\n{text}"
    return text, (f"{absent} of {len(chapters)} chapters are missing",) if absent else ()


def damaged(name: str, what: str, error: Exception) -> DocumentError:
    told = " ".join(str(error).split())[:100] or type(error).__name__
    return DocumentError(f"{name} is damaged, or not {what} after all: {told}")


def _opened(data: bytes, name: str) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except Exception as error:
        raise damaged(name, "a document", error) from error
    if any(entry.flag_bits & _ENCRYPTED for entry in archive.infolist()):
        raise DocumentError(f"{name} is protected by a password: remove it first")
    return archive


def _spine(archive: zipfile.ZipFile) -> tuple[str, list[str]]:
    """The title and the names of the content files in reading order, without tables of contents."""
    container = ElementTree.fromstring(archive.read("META-INF/container.xml"))
    package_file = next((item.get("full-path", "") for item in _local(container, "rootfile")), "")
    try:
        package = ElementTree.fromstring(archive.read(package_file))
    except KeyError:
        raise ValueError("its list of contents is missing") from None
    folder = posixpath.dirname(package_file)
    title = next(("".join(e.itertext()) for e in package.iter() if e.tag.endswith("}title")), "")
    files = {}
    for item in _local(package, "item"):
        if "nav" not in item.get("properties", "").split():
            path = posixpath.join(folder, unquote(item.get("href", "").partition("#")[0]))
            files[item.get("id", "")] = posixpath.normpath(path)
    references = [item.get("idref", "") for item in _local(package, "itemref")]
    return " ".join(title.split()), [files[ref] for ref in references if ref in files]


def _local(root: ElementTree.Element, tag: str) -> Iterator[ElementTree.Element]:
    return (element for element in root.iter() if element.tag.rpartition("}")[2] == tag)


def _protected(archive: zipfile.ZipFile) -> set[str]:
    """Names of encrypted entries; usually fonts only."""
    try:
        listing = ElementTree.fromstring(archive.read("META-INF/encryption.xml"))
    except KeyError:
        return set()
    return {unquote(item.get("URI", "")) for item in _local(listing, "CipherReference")}
